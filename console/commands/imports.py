"""`penstock import KIND`: puts what others have recorded on the tape of a running gateway, through its own ingest.

A rollout that is imported is made of spans of kind `otel` with the names of OpenTelemetry's GenAI conventions, so that
all that reads spans reads these. `send_spans` is the one way to the tape: what it has answered is durable and masked,
and spans that are there are not sent again. Each kind is a command in a module of its own, below `import` in
`command_table.GROUPS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import msgspec

from penstock.gateway.client.console import CommandError

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

Value: TypeAlias = str | int | float | bool | list["Value"] | dict[str, "Value"] | None
REQUEST_BYTES: Final = 4 << 20
"""Bytes of spans after which a request is sent; the gateway takes four times as many. One span may be larger."""
LONGEST: Final = 10_000
"""Most characters of a text, and elements of a list, that are sent; the gateway keeps fewer, and marks what it cuts."""
_KINDS: Final = {"internal": 1, "server": 2, "client": 3}


@dataclass(frozen=True, slots=True)
class ImportedSpan:
    """A span on its way to the tape; what the gateway keeps of one is in docs/opentelemetry.md."""

    span_id: str
    """16 hex digits, made from the source, so that the same item has the same id in every import."""
    name: str
    start_ns: int
    end_ns: int
    parent_id: str | None = None
    attributes: Mapping[str, Value] = field(default_factory=dict[str, Value])
    kind: str = "internal"
    """`internal`, `server` or `client`."""
    error: str | None = None
    """Why it failed; None if it did not."""
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Other fields of OTLP's JSON, such as `traceId`, `events` and `links`."""


async def send_spans(client: Client, rollout: str, attempt: str, spans: Iterable[ImportedSpan]) -> int:
    """Put those spans of an attempt on the tape that are not there yet; returns how many. Raises `CommandError` if the
    gateway rejects some, `ClientError` if it cannot be asked."""
    from penstock.gateway.client.connection import NotFound

    try:
        there = {span.span_id async for span in client.spans(rollout, attempt, "kind:otel")}
    except NotFound:
        there = set[str | None]()
    batch, size, sent = list[bytes](), 0, 0
    for span in spans:
        if span.span_id in there:
            continue
        there.add(span.span_id)
        batch.append(msgspec.json.encode(otlp_span(span, rollout, attempt)))
        size, sent = size + len(batch[-1]), sent + 1
        if size > REQUEST_BYTES:
            await _post(client, rollout, attempt, batch)
            batch, size = [], 0
    if batch:
        await _post(client, rollout, attempt, batch)
    return sent


async def _post(client: Client, rollout: str, attempt: str, spans: list[bytes]) -> None:
    body = b'{"resourceSpans":[{"scopeSpans":[{"spans":[' + b",".join(spans) + b"]}]}]}"
    answer = await client.read("POST", f"/rollout/{rollout}/attempt/{attempt}/v1/traces", body=body.decode())
    client.changed = True
    partial = cast("dict[str, Any]", msgspec.json.decode(answer)).get("partialSuccess")
    if partial and partial.get("rejectedSpans") not in (None, "0", 0):
        raise CommandError(f"{rollout}: the gateway did not take all of it: {partial.get('errorMessage')}")


def otlp_span(span: ImportedSpan, rollout: str, attempt: str) -> dict[str, Any]:
    """A span of an attempt as OTLP writes it in JSON."""
    from penstock.gateway.model.span import trace_id

    made: dict[str, Any] = {
        "traceId": trace_id(rollout, attempt),
        "spanId": span.span_id,
        "name": span.name,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": otlp_attributes(span.attributes),
    }
    made |= {} if span.parent_id is None else {"parentSpanId": span.parent_id}
    return made | ({} if span.error is None else {"status": {"code": 2, "message": span.error}}) | dict(span.more)


def otlp_attributes(attributes: Mapping[str, Value]) -> list[dict[str, Any]]:
    """Attributes as OTLP writes them in JSON."""
    return [{"key": name, "value": _value(value)} for name, value in attributes.items()]


def _value(value: Value) -> dict[str, Any]:
    """A value of an attribute as OTLP writes it in JSON."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue" if -(2**63) <= value < 2**63 else "stringValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value[:LONGEST]}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(one) for one in value[:LONGEST]]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": otlp_attributes(value)}}
    return {}
