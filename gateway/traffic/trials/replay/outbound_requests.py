"""Requests that repeat a recorded or live call for a release: which calls may be repeated, and what is sent. Pure.

The agent's tools are never run, whatever an answer calls. A request that would make the *provider* run something, or
change a conversation that it keeps, is not repeated (`unrepeatable`). The new span names the call that it repeats
(`gateway.model.attributes`: ROLLOUT/ATTEMPT#SEQUENCE, of a rehearsal ROLLOUT/ATTEMPT) and its leg.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock.gateway.model.release import Arm
from penstock.gateway.releases.catalog import Catalog, ModelTarget
from penstock.gateway.releases.prompts.rewrite import TextFindings
from penstock.gateway.traffic.calls.address import ADDRESS_HEADERS
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.wire.dialects import candidate_families
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.family import Family
from penstock.gateway.wire.dialects.loose_json import loads, obj
from penstock.gateway.wire.dialects.websocket_messages import ClientMessageKind
from penstock.gateway.wire.http.request import HttpRequest

RUN = "penstock.rehearsal"
"""Attribute of a request that was made for an agent in rehearsal: its ROLLOUT/ATTEMPT."""
CANDIDATE, INCUMBENT, JUDGE = "candidate", "incumbent", "judge"
ARM_OF: Final[Mapping[str, Arm]] = {CANDIDATE: "candidate", INCUMBENT: "stable"}
"""The arm whose versions each leg has."""
DROPPED: Final = ADDRESS_HEADERS | {
    b"content-length",
    b"transfer-encoding",
    b"accept-encoding",
    b"content-encoding",
    b"idempotency-key",
    b"x-idempotency-key",
    b"x-stainless-retry-count",
    b"traceparent",
    b"tracestate",
}
"""Headers that hold for one request only: an idempotency key would bring the first answer again, and a repeated request
is sent without an encoding."""


@dataclass(frozen=True, slots=True)
class OutboundRequest:
    """A request to an upstream."""

    pool: ConnectionPool
    dialect: Dialect
    request: HttpRequest
    """Its method and headers; keys are replaced by the upstream's own, where it has one."""
    path: str
    """Path and query below an address."""
    body: bytes
    attributes: Mapping[str, str]
    """Attributes of its span."""
    model: str | None = None
    """The model, by the agent's name."""
    agent: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """Versions that are written in it, by resource."""
    families: tuple[Family, ...] = ()
    """Families that the agent's call may belong to, where it is not of its dialect's."""


def compose(question: OutboundRequest) -> tuple[str, list[tuple[bytes, bytes]]]:
    """Return (path and query, headers) as a call would send them, without headers that hold for one request only."""
    pool, request = question.pool, question.request
    families = question.families or candidate_families(question.dialect, question.path, request.headers)
    head, _, _ = pool.heads.compose(request, pool.target(question.path).encode("latin-1"), None, None, families)
    first, *rest = head.split(b"\r\n")
    lines = [line.partition(b": ")[::2] for line in rest if line]
    kept = [(name, value) for name, value in lines if name.lower() not in DROPPED]
    return first.split(b" ")[1].decode("latin-1"), [*kept, (b"Accept-Encoding", b"identity")]


def call_name(rollout: str, attempt: str, sequence: int) -> str:
    """Return the name of a repeated call."""
    return f"{rollout}/{attempt}#{sequence}"


def without_masked_values(path: str) -> str:
    """Return a recorded path without the parameters whose values were masked: these are keys, and the upstream has its
    own."""
    head, _, query = path.partition("?")
    kept = "&".join(one for one in query.split("&") if not one.endswith("=***"))
    return f"{head}?{kept}" if kept else head


def rewrite(
    catalog: Catalog, body: bytes, prompts: TextFindings | None, model: str | None, versions: Mapping[str, str]
) -> tuple[bytes, ModelTarget | None] | str:
    """Return (a request with these versions of its resources, its weights), or why a version does not fit."""
    made, weights = catalog.rewrite(body, prompts, model, versions)
    if prompts is not None and len(made.uses) < len(prompts.uses):
        return f"a version cannot be written in: {made.misses[-1].detail}"
    return made.body, weights


_SERVER_FIELDS: Final = ("web_search_options", "plugins", "mcp_servers", "conversation", "background")
"""Fields by which the provider runs something, goes on by itself, or changes a conversation that it keeps."""


def unrepeatable(dialect: Dialect, body: bytes) -> str | None:
    """Return why a request must not be repeated; None when it may be."""
    asked = obj(loads(body))
    if not asked:
        return "its request is no JSON object"
    if dialect.read_client_message(body).kind is not ClientMessageKind.OTHER:
        return "it was asked on a WebSocket, whose earlier answers it goes on from"
    for name in _SERVER_FIELDS:
        if asked.get(name):
            return f"the provider would act by itself ({name})"
    for kind in dialect.server_tools(asked):
        return f"the provider would run a tool of its own ({kind})"
    return None
