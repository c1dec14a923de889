"""What some calls need besides being forwarded, and where it plugs in.

A `Feature` (translation, token capture, exact sessions, shadows) looks at every call that is planned. For a call that
needs it, it changes what is sent (`Send`) and leaves a `Part`, which is asked as the call goes on. A call without
features has no parts. Who adds a feature adds it to `features`, and edits neither the plan nor the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.gateway.calls.admitted import Admitted
from penstock.gateway.calls.capture.framing import Framing
from penstock.gateway.calls.record import Record
from penstock.gateway.http.errors import Refusal
from penstock.gateway.http.request import Headers, Request
from penstock.gateway.http.upstream_connection import Caller, UpstreamConnection
from penstock.gateway.model.release import Pin
from penstock.gateway.releases.catalog import Uses
from penstock.gateway.upstream_settings import Route
from penstock.gateway.upstreams.pool import Pool


class Connecting(Caller, Protocol):
    """A call that is being connected."""

    record: Record
    request: Request
    connecting: asyncio.Task[None] | None

    def on_refused(self, refusal: Refusal) -> None:
        """There is no connection, and why."""
        ...


class Part:
    """A feature's share in one call. What it does not need to say it leaves as it is here."""

    __slots__ = ()

    def connect(self, call: Connecting, pool: Pool, fresh: bool) -> asyncio.Task[None] | None:
        """Connects in a way of its own: a task that can be cancelled. None: as any other call. `fresh`: not on a
        connection that was idle."""
        return None

    def instead(self, record: Record, answer: bytes) -> bytes | None:
        """The body to ask with once more where the engine has refused the call with status 400; None: the answer stays.
        `answer`: its body, without content encoding."""
        return None

    def framing(self, connection: UpstreamConnection, http10: bool) -> Framing | None:
        """The way of an answer that is changed; None for one that passes as it comes."""
        return None

    def told(self) -> bytes | None:
        """What the client got, where that is not what the upstream sent."""
        return None

    def problem(self) -> str | None:
        """Why an answer that came whole did not reach the client as one; a short reason."""
        return None

    def ending(self, record: Record, status: str) -> None:
        """The call is over in this way. The last chance to add to its record."""

    def completed(self, record: Record, token_ids: bool) -> None:
        """It has ended with a good answer. `token_ids`: whether token ids of it were seen."""

    def handed_over(self, record: Record) -> None:
        """Its answer was whole, or its upstream has failed; the recorder has its record."""


@dataclass(slots=True)
class Send:
    """Where a call goes, and as what. Made by the plan, changed by features, then carried out."""

    pools: list[Pool]
    """Upstreams to try in turn."""
    call: Admitted
    """Its dialect and path as they go upstream."""
    body: bytes
    headers: Headers
    versions: dict[str, str] = field(default_factory=dict[str, str])
    arm: str | None = None
    texts: dict[str, str] = field(default_factory=dict[str, str])
    """Versions, arms and texts of resources as in `Record`."""
    given: tuple[Uses, Mapping[str, Pin]] | None = None
    """What it uses of the catalog, and what its rollout was given of it."""
    captured: tuple[str, ...] = ()
    """Names of fields of the body that the gateway has added."""
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    """For its span."""
    convert: Callable[[bytes], bytes] | None = None
    """How another body of its agent's goes upstream; None when as it is."""
    parts: list[Part] = field(default_factory=list[Part])
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    """What each upstream calls the model, where they do not all call it the same."""
    streams: bool = False
    """Whether a part of it changes a stream, which is one whatever its head calls it."""
    whole: bool = False
    """Whether its answer is passed on when all of it is there, while another upstream is left."""


class Feature(Protocol):
    """What some calls need."""

    def plan(self, send: Send, route: Route | None) -> None:
        """Changes what is sent of a call that needs it and adds its part; raises `Refusal`. `route`: that of the
        call's model."""
        ...
