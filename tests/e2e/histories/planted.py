"""What the tests of the checker plant: operations, spans and attempts, and what is found of them."""

from __future__ import annotations

from typing import Any

from e2e.histories import checker
from e2e.histories.history import Operation, Result
from e2e.histories.tape import Tape
from e2e.histories.tool_server import text_of

from penstock.gateway.model.answers import AuditEntry
from penstock.gateway.model.rollout import Attempt, AttemptStatus, Judgement, Reward
from penstock.gateway.model.span import Span

CALL, OTHER, USED = "00000000000000c1", "00000000000000c2", "00000000000000d1"
HERE = {"rollout": "q1", "attempt": "a1"}


def did(kind: str, begin: float, end: float, result: Result = "ok", actor: str = "w1", **asked: Any) -> Operation:
    """An operation; `answer` is what it was answered."""
    answer = asked.pop("answer", {})
    return Operation(kind, actor, begin, end, result, asked, answer)


def call(begin: float, end: float, result: Result = "ok", name: str = CALL) -> Operation:
    return did("call", begin, end, result, call=name, **HERE)


def claim(begin: float, end: float, attempt: str = "a1", worker: str = "w1") -> Operation:
    return did("claim", begin, end, worker=worker, lease_s=10.0, answer={"claims": [["q1", attempt]]})


def held(begin: float, end: float, attempt: str = "a1") -> Operation:
    names = [["q1", attempt]]
    return did("heartbeat", begin, end, lease_s=10.0, names=names, answer={"held": names})


def finish(
    begin: float, end: float, result: Result = "ok", attempt: str = "a1", status: str = "succeeded"
) -> Operation:
    return did("finish", begin, end, result, rollout="q1", attempt=attempt, status=status, key="k")


def told(cursor: int, what: str, status: str | None = None, actor: str = "f1") -> Operation:
    return did("change", 20.0 + cursor, 20.0 + cursor, actor=actor, cursor=cursor, what=what, status=status)


def fault(what: str, begin: float, end: float) -> Operation:
    return did("fault", begin, end, actor="nemesis", what=what)


def span(sequence: int = 1, name: str = CALL, **more: Any) -> Span:
    found: dict[str, Any] = {"body": 1, "response_id": f"chatcmpl-{name}"} | more
    return Span(rollout="q1", attempt="a1", sequence=sequence, parent_id=name, **found)


def tool(begin: float, end: float, tool: str = "echo") -> Operation:
    return did("tool", begin, end, "ok", call=USED, tool=tool, **HERE, answer={"text": text_of(USED)})


def used(sequence: int, name: str = USED, **more: Any) -> Span:
    found: dict[str, Any] = {"rollout": "q1", "attempt": "a1", "body": 1} | more
    return Span(sequence=sequence, kind="tool", parent_id=name, **found)


def reward(sequence: int = 2, key: str = "k") -> Span:
    said = Reward.model_validate(Judgement(value=1.0, key=key).model_dump())
    return Span(rollout="q1", attempt="a1", sequence=sequence, kind="reward", attributes=said.attributes())


def attempt(number: int = 1, status: AttemptStatus = AttemptStatus.SUCCEEDED, worker: str = "w1") -> Attempt:
    return Attempt(rollout="q1", id=f"a{number}", sequence=number, status=status, worker=worker)


def only(history: list[Operation], tape: Tape, strict: bool = True) -> str:
    """The one problem that is found."""
    (found,) = checker.problems(history, tape, strict)
    return found


def entry(number: int, action: str, why: str, rollout: str = "q1") -> AuditEntry:
    return AuditEntry(number=number, at_ns=number, who="operator", action=f"{action}_rollout", target=rollout, why=why)


def problems(history: list[Operation], tape: Tape) -> list[str]:
    """All that is found."""
    return checker.problems(history, tape, strict=True)
