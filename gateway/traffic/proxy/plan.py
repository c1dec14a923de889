"""Plans a call: its destination, and the changes to its request. Nothing here writes to a socket.

    Send    forward to these upstreams, with this request
    Wait    wait until the tape has the versions of the rollout: its first call that uses a released resource

`plan` is for a new call, `plan_pinned` for a call whose versions must be decided (again).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic

from penstock.gateway.model.facts import WHOLE
from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.release import Pin
from penstock.gateway.traffic.calls.call_record import CallRecord
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.proxy.call_filter import CallFilter, CallPlan, Middleware
from penstock.gateway.traffic.proxy.exact.exact_filter import ExactMiddleware
from penstock.gateway.traffic.proxy.exact.sessions import ExactSessionStore
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.traffic.proxy.system_messages import SystemFoldingMiddleware
from penstock.gateway.traffic.proxy.translation.translator import TranslationMiddleware, Translator
from penstock.gateway.traffic.trials.shadow import ShadowJob
from penstock.gateway.traffic.upstreams.routes import alias_at
from penstock.gateway.traffic.versions import ResourceUse
from penstock.gateway.upstream_settings import RouteSettings
from penstock.gateway.wire.capture import CaptureRequest, accept_identity, add_capture_fields
from penstock.gateway.wire.dialects.request_body import replace_model
from penstock.gateway.wire.http.headers import PROMPT
from penstock.gateway.wire.http.request import GatewayFault, Headers, HttpRequest
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection
from penstock.gateway.wire.rewriting import Framing, capture_framing


@dataclass(frozen=True, slots=True)
class PinWait:
    """The call waits until its rollout is pinned; then `plan_pinned` is called."""

    pinned: asyncio.Future[list[Pin]]
    found: ResourceUse


def plan(shared: ProxyContext, call: CallRequest, request: HttpRequest) -> CallPlan | PinWait:
    """Plan a new call; raises `Refusal`."""
    if shared.recorder.failing is not None:
        shared.check_gap(call)
    if not shared.pins.catalog.empty:
        found = shared.pins.find(call, prompt_named(call, request.headers))
        if found is not None:
            return plan_pinned(shared, call, request, found)
    return plan_route(shared, call, request)


def plan_route(shared: ProxyContext, call: CallRequest, request: HttpRequest) -> CallPlan:
    """Plan a call that uses no released resource."""
    pools, found = shared.route(call, request)
    body = call.body if found.alias is None else replace_model(call.body, found.alias, call.form)
    send = CallPlan(pools, call, body, request.headers)
    plain = found.route is None or found.route.model in shared.plain_routes
    return send if plain else _with_features(shared, send, found.route)


def plan_pinned(
    shared: ProxyContext,
    call: CallRequest,
    request: HttpRequest,
    found: ResourceUse,
    error: BaseException | None = None,
) -> CallPlan | PinWait:
    """Plan a call that uses released resources. `error`: why the tape could not record the rollout's versions."""
    if error is None:
        pins = shared.pins.pinned(call, found)
        if pins is None:
            return PinWait(shared.pins.pin(call, found, shared.epoch_ns + int(monotonic() * 1e9)), found)
    elif shared.refuses_gaps(call.address.mode):
        raise GatewayFault(503, "tape", f"this rollout cannot be given its versions: {error}")
    else:
        pins = shared.pins.fallback_pins(call, found, error)
    return _switched(shared, call, request, found, pins)


def _switched(
    shared: ProxyContext, call: CallRequest, request: HttpRequest, found: ResourceUse, pins: Mapping[str, Pin]
) -> CallPlan:
    made = shared.pins.versioned_request(call, found, pins)
    if not made.upstreams:
        pools, choice = shared.route(call, request)
        route, alias = choice.route, choice.alias
        body = made.body if alias is None else replace_model(made.body, alias, call.form)
    else:
        pools, route = shared.version_upstreams(made.upstreams, found.model, call, request)
        body = made.body
    send = CallPlan(pools, call, body, request.headers, made.versions, made.arm, made.texts, (found, pins))
    return _with_features(shared, send, route)


def _with_features(shared: ProxyContext, send: CallPlan, route: RouteSettings | None) -> CallPlan:
    if route is not None and route.stream == "whole":
        send.whole = True
        send.attributes[WHOLE] = True
    released = send.given is not None and send.given[0].model is not None
    if route is not None and isinstance(route.alias, dict) and not released:
        asked = send.call.model or ""
        send.aliases = {pool.name: alias_at(route, pool.name) or asked for pool in send.pools}
    for feature in shared.features(route, send.given is not None):
        feature.plan(send, route)
    return send


def prompt_named(call: CallRequest, headers: Headers) -> str | None:
    """The name of the prompt in the call's path or header; None if neither names one."""
    named = call.address.prompt
    return named or next((value.decode("latin-1") for low, _, value in headers if low == PROMPT), None)


# The features of calls, in the order in which they change a request: translation comes first, so that the others see
# the request that the engine gets.


def build_middleware(
    translator: Translator | None, own: Secrets, exact: ExactSessionStore, shadow: ShadowJob, metrics: Metrics
) -> tuple[Middleware, ...]:
    """Return all features. `translator`: None if no route is translated, or none can be; `own`: the gateway's keys."""
    of_engines = (
        TranslationMiddleware(translator, own),
        SystemFoldingMiddleware(),
        TokenCaptureMiddleware(metrics),
        ExactMiddleware(exact),
    )
    return *of_engines, ShadowMiddleware(shadow)


class TokenCaptureMiddleware:
    """Asks the engine for token ids and log-probabilities, which the client does not get."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def serves(self, route: RouteSettings | None, given: bool) -> bool:
        """True if the route's model is trained."""
        return route is not None and bool(route.train)

    def plan(self, send: CallPlan, route: RouteSettings | None) -> None:
        """Add the fields that ask for them, where they are missing."""
        asked = add_capture_fields(send.call.dialect, send.body)
        if asked is not None:
            send.body, send.captured, send.headers = asked.body, asked.added, accept_identity(send.headers)
            send.streams = send.streams or asked.stream
            send.filters.append(TokenCaptureFilter(asked, self._metrics))


class TokenCaptureFilter(CallFilter):
    """A call whose answer has more fields than its client asked for."""

    __slots__ = ("_asked", "_metrics")

    def __init__(self, asked: CaptureRequest, metrics: Metrics) -> None:
        self._asked, self._metrics = asked, metrics

    def framing(self, connection: UpstreamConnection, http10: bool) -> Framing | None:
        """Remove the fields that the client did not ask for."""
        return capture_framing(self._asked, connection, connection.chunked and not http10)

    def on_complete(self, record: CallRecord, token_ids: bool) -> None:
        """Count whether the engine gave token ids."""
        self._metrics.captured_calls[("yes" if token_ids else "no",)] += 1


class ShadowMiddleware:
    """Makes calls that use a released resource available for mirroring to a candidate."""

    def __init__(self, shadow: ShadowJob) -> None:
        self._shadow = shadow

    def serves(self, route: RouteSettings | None, given: bool) -> bool:
        """True for calls that use a released resource."""
        return given

    def plan(self, send: CallPlan, route: RouteSettings | None) -> None:
        """Add the part that mirrors; the call itself does not change."""
        if send.given is not None:
            send.filters.append(ShadowFilter(self._shadow, *send.given))


class ShadowFilter(CallFilter):
    """A call that may be mirrored after its end."""

    __slots__ = ("_pins", "_shadow", "_uses")

    def __init__(self, shadow: ShadowJob, uses: ResourceUse, pins: Mapping[str, Pin]) -> None:
        self._shadow, self._uses, self._pins = shadow, uses, pins

    def on_recorded(self, record: CallRecord) -> None:
        """Offer the call to the shadow stage if a release mirrors now."""
        if self._shadow.mirrors:
            self._shadow.offer(record, self._uses, self._pins)
