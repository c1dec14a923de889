"""The interfaces of features: what some calls need besides being forwarded.

A `Middleware` (translation, token capture, exact sessions, shadows) looks at every call that is planned. For a call
that needs it, it changes the request (`CallPlan`) and adds a `CallFilter`, whose methods are called during the call. A
call without features has no parts. A new feature is added to `middleware`; neither the plan nor the call changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.gateway.config import RouteSettings
from penstock.gateway.model.release import Pin
from penstock.gateway.traffic.calls.call_record import CallRecord
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.traffic.versions import ResourceUse
from penstock.gateway.wire.http.request import Headers, HttpRequest, Refusal
from penstock.gateway.wire.http.upstream_connection import UpstreamCaller, UpstreamConnection
from penstock.gateway.wire.rewriting import Framing


class PendingCall(UpstreamCaller, Protocol):
    """A call that is being connected."""

    record: CallRecord
    request: HttpRequest
    connecting: asyncio.Task[None] | None

    def on_refused(self, refusal: Refusal) -> None:
        """Called when no connection can be made; `refusal` says why."""
        ...


class CallFilter:
    """A feature's share in one call. A method that it does not override does nothing."""

    __slots__ = ()

    def connect(self, call: PendingCall, pool: ConnectionPool, fresh: bool) -> asyncio.Task[None] | None:
        """Connect in the part's own way and return a task that can be cancelled; None to connect as any other call.
        `fresh`: not on a connection that was idle."""
        return None

    def retry_body(self, record: CallRecord, answer: bytes) -> bytes | None:
        """The body of a second request after the engine has refused the call with status 400; None to keep the answer.
        `answer`: its body, without content encoding."""
        return None

    def framing(self, connection: UpstreamConnection, http10: bool) -> Framing | None:
        """The framing that changes the answer; None if the answer passes unchanged."""
        return None

    def client_body(self) -> bytes | None:
        """The answer's body as the client got it; None if it is the upstream's."""
        return None

    def problem(self) -> str | None:
        """A short reason why a complete upstream answer did not reach the client as one; None if it did."""
        return None

    def on_end(self, record: CallRecord, status: str) -> None:
        """Called at the end of the call, with its status: the last chance to add to its record."""

    def on_complete(self, record: CallRecord, token_ids: bool) -> None:
        """Called after a complete, successful response. `token_ids`: whether it had token ids."""

    def on_recorded(self, record: CallRecord) -> None:
        """Called when the recorder has the record of a call whose answer was complete or whose upstream failed."""


@dataclass(slots=True)
class CallPlan:
    """The destination of a call, and the request in its final form. Made by the plan, changed by features."""

    pools: list[ConnectionPool]
    """Upstreams to try in turn."""
    call: CallRequest
    """The call, with the dialect and path that go upstream."""
    body: bytes
    headers: Headers
    versions: dict[str, str] = field(default_factory=dict[str, str])
    arm: str | None = None
    texts: dict[str, str] = field(default_factory=dict[str, str])
    """Versions, arms and texts of resources as in `CallRecord`."""
    given: tuple[ResourceUse, Mapping[str, Pin]] | None = None
    """The released resources that it uses, and the versions that its rollout was given."""
    captured: tuple[str, ...] = ()
    """Names of fields of the body that the gateway has added."""
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    """Attributes to add to its span."""
    convert: Callable[[bytes], bytes] | None = None
    """Converts another body of the agent's for the upstream; None if bodies pass unchanged."""
    filters: list[CallFilter] = field(default_factory=list[CallFilter])
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    """Model name by upstream; empty if all upstreams use the same name."""
    streams: bool = False
    """True if a part changes a streamed answer; such an answer is a stream whatever its content type says."""
    whole: bool = False
    """True if its answer is passed on only when it is complete, as long as another upstream is left."""


class Middleware(Protocol):
    """Changes the calls that need it."""

    def serves(self, route: RouteSettings | None, given: bool) -> bool:
        """True if calls of this route may need the feature. `given`: they use a released resource. Asked once."""
        ...

    def plan(self, send: CallPlan, route: RouteSettings | None) -> None:
        """Change the request of a call that needs the feature, and add its part; raises `Refusal`. `route`: the route
        of the call's model."""
        ...
