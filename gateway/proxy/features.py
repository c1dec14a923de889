"""The features of calls, in the order in which they change a request: translation comes first, so that the others see
the request that the engine gets."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.gateway.calls.capture.framing import Framing, cleaned
from penstock.gateway.calls.capture.request import Asked, ask, identity
from penstock.gateway.calls.record import Record
from penstock.gateway.http.upstream_connection import UpstreamConnection
from penstock.gateway.metrics import Metrics
from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.release import Pin
from penstock.gateway.proxy.exact.exact_call import ExactRoutes
from penstock.gateway.proxy.exact.session_store import Exact
from penstock.gateway.proxy.parts import Feature, Part, Send
from penstock.gateway.proxy.system_messages import FoldedSystem
from penstock.gateway.proxy.translation.translator import TranslatedRoutes, Translator
from penstock.gateway.releases.catalog import Uses
from penstock.gateway.releases.shadow.stage import Shadow
from penstock.gateway.upstream_settings import Route


def features(
    translator: Translator | None, own: Secrets, exact: Exact, shadow: Shadow, metrics: Metrics
) -> tuple[Feature, ...]:
    """Return all features. `translator`: None if no route is translated, or none can be; `own`: the gateway's keys."""
    of_engines = TranslatedRoutes(translator, own), FoldedSystem(), TrainedModels(metrics), ExactRoutes(exact)
    return *of_engines, Mirroring(shadow)


class TrainedModels:
    """Asks the engine for token ids and log-probabilities, which the client does not get."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def plan(self, send: Send, route: Route | None) -> None:
        """Add the fields that ask for them, where they are missing."""
        asked = ask(send.call.dialect, send.body) if route is not None and route.train else None
        if asked is not None:
            send.body, send.captured, send.headers = asked.body, asked.added, identity(send.headers)
            send.streams = send.streams or asked.stream
            send.parts.append(Captured(asked, self._metrics))


class Captured(Part):
    """A call whose answer has more fields than its client asked for."""

    __slots__ = ("_asked", "_metrics")

    def __init__(self, asked: Asked, metrics: Metrics) -> None:
        self._asked, self._metrics = asked, metrics

    def framing(self, connection: UpstreamConnection, http10: bool) -> Framing | None:
        """Remove the fields that the client did not ask for."""
        return cleaned(self._asked, connection, connection.chunked and not http10)

    def completed(self, record: Record, token_ids: bool) -> None:
        """Count whether the engine gave token ids."""
        self._metrics.captured_calls[("yes" if token_ids else "no",)] += 1


class Mirroring:
    """Makes calls that use a released resource available for mirroring to a candidate."""

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow

    def plan(self, send: Send, route: Route | None) -> None:
        """Add the part that mirrors; the call itself does not change."""
        if send.given is not None:
            send.parts.append(Mirrored(self._shadow, *send.given))


class Mirrored(Part):
    """A call that may be mirrored after its end."""

    __slots__ = ("_pins", "_shadow", "_uses")

    def __init__(self, shadow: Shadow, uses: Uses, pins: Mapping[str, Pin]) -> None:
        self._shadow, self._uses, self._pins = shadow, uses, pins

    def handed_over(self, record: Record) -> None:
        """Offer the call to the shadow stage if a release mirrors now."""
        if self._shadow.mirrors:
            self._shadow.offer(record, self._uses, self._pins)
