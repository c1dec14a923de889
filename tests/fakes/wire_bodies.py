"""Bodies and streams as servers write them, and how two readings of them compare."""

from __future__ import annotations

import json
from typing import Any

from penstock.gateway.model.turn import Turn
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.base import Facts
from penstock.gateway.wire.dialects.family import Failure

Json = dict[str, Any]


def body(value: Any) -> bytes:
    return json.dumps(value).encode()


def cut(text: str) -> list[str]:
    """In pieces of three characters."""
    return [text[at : at + 3] for at in range(0, len(text), 3)]


def sse(*events: Any, named: bool = False, end: str = "\n") -> bytes:
    """Objects as events; `named` puts the type of each before it; a string is sent as it is."""
    lines: list[str] = []
    for it in events:
        lines += [f"event: {it['type']}"] if named and "type" in it else []
        lines += ["data: " + (it if isinstance(it, str) else json.dumps(it, separators=(",", ":"))), ""]
    return "".join(line + end for line in lines).encode()


def same(one: Turn, other: Turn) -> None:
    """Two turns say the same, but for how the answer was transferred."""
    assert one.model_dump(exclude={"stream"}) == other.model_dump(exclude={"stream"})


def agreed(name: str, request: bytes, response: bytes, streamed: bool) -> Facts:
    """Facts, after asserting that the thorough reading says the same."""
    dialect = by_name(name)
    cheap, turn = dialect.facts(request, response, streamed), dialect.read(request, response, streamed)
    calls = [part for choice in turn.choices for part in choice.message.parts if part.type == "tool_call"]
    failed: Failure | None = "ended_early" if "response: the stream ended early" in turn.problems else None
    if turn.error is not None or "failed" in {choice.finish for choice in turn.choices}:
        failed = "stream_error" if streamed else "error_body"
    assert cheap == Facts(
        model=turn.model,
        model_served=turn.model_served,
        response_id=turn.response_id,
        finish=turn.choices[0].finish if turn.choices else cheap.finish,
        usage=turn.usage,
        tool_calls=len(calls),
        choices=len(turn.choices),
        failed=failed,
    )
    return cheap
