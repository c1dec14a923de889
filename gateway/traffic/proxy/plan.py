"""Plans a call: its destination, and the changes to its request. Nothing here writes to a socket.

    Send    forward to these upstreams, with this request
    Wait    wait until the tape has the versions of the rollout: its first call that uses a released resource

`plan` is for a new call, `plan_pinned` for a call whose versions must be decided (again).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

import orjson

from penstock.gateway.config import RouteSettings
from penstock.gateway.model.facts import FOLDED, WHOLE
from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.release import Pin
from penstock.gateway.traffic.calls.call_record import CallRecord
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.proxy.exact.exact_filter import ExactMiddleware
from penstock.gateway.traffic.proxy.exact.sessions import ExactSessionStore
from penstock.gateway.traffic.proxy.proxy_context import CallFilter, CallPlan, Middleware, ProxyContext
from penstock.gateway.traffic.proxy.translation.translator import TranslationMiddleware, Translator
from penstock.gateway.traffic.trials.shadow import ShadowJob
from penstock.gateway.traffic.upstreams.routes import alias_at
from penstock.gateway.traffic.versions import ResourceUse
from penstock.gateway.wire.capture import CaptureRequest, accept_identity, add_capture_fields
from penstock.gateway.wire.dialects.json_scan import LEAF, JsonRange, find, splice
from penstock.gateway.wire.dialects.loose_json import UNREADABLE, Json, arr, error_message, loads, obj, strict, text
from penstock.gateway.wire.dialects.parts import TEXT
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
    if found.alias is not None:
        _rename(send, found.alias)
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
        body, alias = made.body, None
    send = CallPlan(pools, call, body, request.headers, made.versions, made.arm, made.texts, (found, pins))
    if alias is not None:
        _rename(send, alias)
    return _with_features(shared, send, route)


def _rename(send: CallPlan, alias: str) -> None:
    """Have the alias written into the path, if the model stands there."""
    if send.call.dialect.renamed(send.call.path, alias) != send.call.path:
        send.aliases = {pool.name: alias for pool in send.pools}


def _with_features(shared: ProxyContext, send: CallPlan, route: RouteSettings | None) -> CallPlan:
    if route is not None and route.stream == "whole":
        send.whole = True
        send.attributes = {WHOLE: True}
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
            send.filters += (TokenCaptureFilter(asked, self._metrics),)


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
            send.filters += (ShadowFilter(self._shadow, *send.given),)


class ShadowFilter(CallFilter):
    """A call that may be mirrored after its end."""

    __slots__ = ("_pins", "_shadow", "_uses")

    def __init__(self, shadow: ShadowJob, uses: ResourceUse, pins: Mapping[str, Pin]) -> None:
        self._shadow, self._uses, self._pins = shadow, uses, pins

    def on_recorded(self, record: CallRecord) -> None:
        """Offer the call to the shadow stage if a release mirrors now."""
        if self._shadow.mirrors:
            self._shadow.offer(record, self._uses, self._pins)


# Folds system messages for engines whose chat template takes only one, at the beginning.
#
# Claude Code sends system messages after the user has spoken, and Codex begins with two system messages. Many
# templates refuse both, and so the engine refuses every call. System messages at the beginning become one. A later
# one becomes text of the user, between `<system>` and `</system>`, where it stood: a conversation that goes on keeps
# its beginning, and so its tokens.
#
# A route decides whether this is done (`fold_system`). Without that setting a call goes out unchanged, and once more,
# folded, if the engine refuses it with words about systems or roles. If the folded call succeeds, later calls are
# folded at once.

_SYSTEM: Final = ("system", "developer")
_ABOUT_ROLES: Final = re.compile("system|role", re.IGNORECASE)
FoldedModels = set[tuple[str, str]]
"""Pairs of upstream name and route model whose template takes only one system message."""


class SystemFoldingMiddleware:
    """Folds the system messages of calls, at once or after the engine has refused them."""

    def __init__(self) -> None:
        self._known: FoldedModels = set()

    def serves(self, route: RouteSettings | None, given: bool) -> bool:
        """True if the route's model is one of ours: trained, or translated to."""
        return route is not None and bool(route.train or route.translates)

    def plan(self, send: CallPlan, route: RouteSettings | None) -> None:
        """Fold at once if the template is known to need it; else add the part that folds after a refusal."""
        if route is None or send.call.dialect.name != "chat":
            return
        key = send.pools[0].name, route.model
        if key in self._known:
            send.body, count = fold_system_messages(send.body)
            send.attributes = {**send.attributes, FOLDED: count} if count else send.attributes
            send.convert = _folding(send.convert)
        else:
            send.filters += (SystemFoldingFilter(self._known, key),)


class SystemFoldingFilter(CallFilter):
    """A call that is folded after its engine has refused it."""

    __slots__ = ("_key", "_known", "_tried")

    def __init__(self, known: FoldedModels, key: tuple[str, str]) -> None:
        self._known, self._key, self._tried = known, key, False

    def retry_body(self, record: CallRecord, answer: bytes) -> bytes | None:
        """The request with one system message, if the refusal is about roles; else None."""
        if self._tried or not _ABOUT_ROLES.search(error_message(obj(loads(answer))) or ""):
            return None
        body, count = fold_system_messages(record.body)
        if not count:
            return None
        self._tried, record.convert = True, _folding(record.convert)
        record.note({FOLDED: count})
        return body

    def on_complete(self, record: CallRecord, token_ids: bool) -> None:
        """Remember that this template needs folded messages."""
        if self._tried:
            self._known.add(self._key)


def _folding(convert: Callable[[bytes], bytes] | None) -> Callable[[bytes], bytes]:
    return lambda body: fold_system_messages(body if convert is None else convert(body))[0]


def fold_system_messages(body: bytes) -> tuple[bytes, int]:
    """Return a request of chat completions with at most one system message, at the beginning, and the number of
    messages that were folded. The same bytes and 0 if nothing needs folding, or something cannot be folded."""
    try:
        # Of two lists of messages the last one counts.
        places = find(body, {"messages": LEAF})[-1:]
        raw = body[places[0].start : places[0].end] if places else b"[]"
        usual = strict(raw)
        # Python's own reader gives back halves of characters and NaN as they came.
        given = arr(json.loads(raw.decode("utf-8", "surrogatepass")) if usual is None else usual)
        return _spliced(body, places, given, orjson.dumps if usual is not None else lambda it: json.dumps(it).encode())
    except UNREADABLE:
        return body, 0


def _spliced(
    body: bytes, places: list[JsonRange], given: list[Any], write: Callable[[list[Json]], bytes]
) -> tuple[bytes, int]:
    if not all(isinstance(one, dict) for one in given):
        return body, 0
    count = sum(one.get("role") in _SYSTEM for one in given[1:])
    made = _folded(given) if count else None
    return (body, 0) if made is None else (splice(body, places, write(made)), count)


def _folded(given: list[Json]) -> list[Json] | None:
    """The folded messages; None if a system message is more than text."""
    first = next((at for at, one in enumerate(given) if one.get("role") not in _SYSTEM), len(given))
    head = [_said(one.get("content")) for one in given[:first]]
    made: list[Json] = [{"role": "system", "content": "\n\n".join(said or "" for said in head)}] if head else []
    if None in head:
        return None
    for one in given[first:]:
        said = _said(one.get("content")) if one.get("role") in _SYSTEM else None
        if said is not None:
            _tell(made, f"<system>\n{said}\n</system>")
        elif one.get("role") in _SYSTEM:
            return None
        else:
            made.append(one)
    return made


def _tell(made: list[Json], said: str) -> None:
    """Append text to the user's last message, or add a user message."""
    last = made[-1] if made else {}
    content = last.get("content")
    if last.get("role") == "user" and isinstance(content, str):
        made[-1] = last | {"content": f"{content}\n\n{said}"}
    elif last.get("role") == "user" and isinstance(content, list):
        made[-1] = last | {"content": [*arr(content), {"type": "text", "text": said}]}
    else:
        made.append({"role": "user", "content": said})


def _said(content: Any) -> str | None:
    """The text of a content that is only text; None for any other."""
    if isinstance(content, str):
        return content
    parts = [obj(part) for part in arr(content)]
    texts = [text(part.get("text")) for part in parts if text(part.get("type")) in TEXT]
    return "\n".join(said or "" for said in texts) if parts and len(texts) == len(parts) else None
