"""What the dialect tests share: JSON bytes and event streams as servers write them, how readings compare."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock.gateway.dialects import by_name
from penstock.gateway.dialects.base import Facts
from penstock.gateway.dialects.ending import Failed
from penstock.gateway.model.turn import Turn


@pytest.fixture
def stream() -> Callable[..., bytes]:
    """Objects as events; `named` puts each one's type before it; a string is sent as it is."""

    def write(*objects: Any, named: bool = False, end: str = "\n") -> bytes:
        lines: list[str] = []
        for it in objects:
            lines += [f"event: {it['type']}"] if named else []
            lines += ["data: " + (it if isinstance(it, str) else json.dumps(it, separators=(",", ":"))), ""]
        return "".join(line + end for line in lines).encode()

    return write


@pytest.fixture
def same() -> Callable[[Turn, Turn], None]:
    """Asserts that two turns say the same, but for how the answer was transferred."""

    def check(one: Turn, other: Turn) -> None:
        assert one.model_dump(exclude={"stream"}) == other.model_dump(exclude={"stream"})

    return check


@pytest.fixture
def agreed() -> Callable[[str, bytes, bytes, bool], Facts]:
    """Facts, after asserting that the thorough reading says the same."""

    def facts(name: str, request: bytes, response: bytes, streamed: bool) -> Facts:
        dialect = by_name(name)
        cheap, turn = dialect.facts(request, response, streamed), dialect.read(request, response, streamed)
        calls = [part for choice in turn.choices for part in choice.message.parts if part.type == "tool_call"]
        finish = turn.choices[0].finish if turn.choices else cheap.finish
        assert cheap == Facts(
            model=turn.model,
            model_served=turn.model_served,
            response_id=turn.response_id,
            finish=finish,
            usage=turn.usage,
            tool_calls=len(calls),
            choices=len(turn.choices),
            failed=_failed(turn, streamed),
        )
        return cheap

    return facts


def _failed(turn: Turn, streamed: bool) -> Failed | None:
    """As the thorough reading tells it."""
    if turn.error is not None or "failed" in {choice.finish for choice in turn.choices}:
        return "stream_error" if streamed else "error_body"
    return "ended_early" if "response: the stream ended early" in turn.problems else None
