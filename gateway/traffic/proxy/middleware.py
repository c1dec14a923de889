"""The features of calls, in the order in which they change a request: translation comes first, so that the others see
the request that the engine gets."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.release import Pin
from penstock.gateway.traffic.calls.call_record import CallRecord
from penstock.gateway.traffic.proxy.call_filter import CallFilter, CallPlan, Middleware
from penstock.gateway.traffic.proxy.exact.exact_filter import ExactMiddleware
from penstock.gateway.traffic.proxy.exact.session_store import ExactSessionStore
from penstock.gateway.traffic.proxy.system_messages import SystemFoldingMiddleware
from penstock.gateway.traffic.proxy.translation.translator import TranslationMiddleware, Translator
from penstock.gateway.traffic.trials.shadow.stage import ShadowJob
from penstock.gateway.traffic.versions import ResourceUse
from penstock.gateway.upstream_settings import RouteSettings
from penstock.gateway.wire.capture.answer import capture_framing
from penstock.gateway.wire.capture.request import CaptureRequest, accept_identity, add_capture_fields
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection
from penstock.gateway.wire.rewriting import Framing


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

    def plan(self, send: CallPlan, route: RouteSettings | None) -> None:
        """Add the fields that ask for them, where they are missing."""
        asked = add_capture_fields(send.call.dialect, send.body) if route is not None and route.train else None
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
