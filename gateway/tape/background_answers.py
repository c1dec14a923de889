"""Answers that another call fetches, as operations inside a write transaction.

A call that asks for its answer in the background stays open until its answer has come: `record_deferred` notes under
the answer's name that the call waits. The first call that fetches the answer's last state ends it (`record_fetched`),
whichever client or process makes it: the answer, its tokens and its outcome become those of the call that has asked.
Later fetches of the same answer change nothing. A process may write that an answer was fetched before another has
written that it was asked for; then the second ends the call. An answer that nobody fetches for a day is given up.

    background      name of an answer       "a" since (u64) key of the call that waits for it
                                            "f" since (u64) key of the call that has fetched it
                    nothing                 when answers were looked through (u64)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

from penstock.gateway.model.facts import BACKGROUND, FETCHED
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Side
from penstock.gateway.reading.turns import plain_bodies
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.codec import StoredBody, process_of, values
from penstock.gateway.tape.store.directory import DEFERRED
from penstock.gateway.tape.store.reader import exchange
from penstock.gateway.tape.store.records import ESTIMATE, OWN, STYLE, SpanEntry
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.base import Facts

DATABASE: Final = "background"
WAITS_NS: Final = 24 * 3600 * 10**9
"""Nanoseconds after which an answer is given up."""
_LOOK_NS: Final = 600 * 10**9
"""Nanoseconds between two searches for answers to give up."""
_ASKED, _FETCHED, _LOOKED = b"a", b"f", b"\0"
_KEPT: Final = tuple(name for name in (*STYLE, *OWN) if name not in ("body", "estimate"))
UsageCorrector: TypeAlias = Callable[[Transaction, SpanEntry, str], None]
"""Called with the tokens of an answer and its name, once the call that has asked has them."""


class _AnswerRecord(NamedTuple):
    """The record of an answer."""

    state: bytes
    since_ns: int
    call: tuple[str, str, int]

    @staticmethod
    def read(stored: bytes) -> _AnswerRecord:
        return _AnswerRecord(stored[:1], keys.to_number(stored[1:9]), keys.split_summary_key(stored[9:]))

    def packed(self) -> bytes:
        return self.state + keys.number(self.since_ns) + keys.summary_key(*self.call)


class _FetchedAnswer(NamedTuple):
    """An answer that was fetched."""

    facts: Facts
    by: SpanEntry | Span
    body: StoredBody | None
    """Bytes of the call that has fetched it."""


def record_deferred(tape: Transaction, entry: SpanEntry, correct: UsageCorrector | None) -> None:
    """Note that a call waits for an answer, or end it if the answer was fetched already."""
    name, mine = entry.deferred, (entry.rollout, entry.attempt, entry.sequence)
    if name is None:
        return
    noted = _noted(tape, name)
    if noted is not None and noted.state == _ASKED and noted.call != mine:
        _give_up(tape, noted.call)  # Its answer could not be told from this call's.
    answer = None
    if noted is not None and noted.state == _FETCHED and noted.since_ns >= (entry.end_ns or 0):
        answer = _read(tape, name, noted.call)
    if answer is not None:
        _end(tape, mine, answer, name, correct)
        return
    tape.put(DATABASE, name.encode(), _AnswerRecord(_ASKED, entry.start_ns, mine).packed())
    _look_through(tape, entry.start_ns)


def record_fetched(
    tape: Transaction, entry: SpanEntry, answers: tuple[str, Facts], correct: UsageCorrector | None
) -> None:
    """End the call that waits for this answer: another call has fetched its last state."""
    (name, facts), mine = answers, (entry.rollout, entry.attempt, entry.sequence)
    noted = _noted(tape, name)
    if noted is not None and noted.state == _FETCHED:
        return
    if noted is not None:
        _end(tape, noted.call, _FetchedAnswer(facts, entry, entry.body), name, correct)
    tape.put(DATABASE, name.encode(), _AnswerRecord(_FETCHED, entry.start_ns, mine).packed())
    _look_through(tape, entry.start_ns)


def give_up(tape: Transaction, rollout: bytes) -> None:
    """Give up all answers that calls of a rollout wait for. `rollout`: its key."""
    for key in [key for key, value in tape.scan("open", rollout) if process_of(value) == DEFERRED]:
        entry = _give_up(tape, keys.split_summary_key(key))
        if entry is not None and entry.attributes is not None:
            name = str(entry.attributes.get(BACKGROUND)).encode()
            tape.delete(DATABASE, name)
            tape.delete("guesses", name)


def _noted(tape: Transaction, name: str) -> _AnswerRecord | None:
    stored = tape.get(DATABASE, name.encode())
    return None if stored is None else _AnswerRecord.read(stored)


def _look_through(tape: Transaction, now: int) -> None:
    """Every ten minutes, give up answers that were waited for too long, and forget those fetched long ago."""
    looked = tape.get(DATABASE, _LOOKED)
    if looked is not None and now - keys.to_number(looked) < _LOOK_NS:
        return
    tape.put(DATABASE, _LOOKED, keys.number(now))
    for key, noted in list(_all(tape)):
        if now - noted.since_ns > WAITS_NS:
            tape.delete(DATABASE, key)
            tape.delete("guesses", key)
            if noted.state == _ASKED:
                _give_up(tape, noted.call)


def _all(tape: Transaction) -> Iterator[tuple[bytes, _AnswerRecord]]:
    return ((key, _AnswerRecord.read(stored)) for key, stored in tape.scan(DATABASE) if key != _LOOKED)


def _read(tape: Transaction, name: str, call: tuple[str, str, int]) -> _FetchedAnswer | None:
    """An answer that was fetched before its call was known."""
    span = tape.span(call)
    body = None if span is None else tape.body(span)
    if span is None or body is None:
        return None
    said = plain_bodies(exchange(body))[1]
    return _FetchedAnswer(by_name(name.partition("/")[0]).facts(b"", said, span.stream), span, body)


def _end(
    tape: Transaction, call: tuple[str, str, int], answer: _FetchedAnswer, name: str, correct: UsageCorrector | None
) -> None:
    """End a call whose answer was fetched."""
    entry = _waiting(tape, call)
    if entry is None:
        return
    answer = _resumed(entry, answer)
    facts, by = answer.facts, answer.by
    entry.status, entry.error = ("ok", None) if facts.failed is None else ("error", facts.failed)
    entry.end_ns = by.end_ns
    entry.first_byte_ns = None if by.first_byte_ns is None else by.start_ns + by.first_byte_ns - entry.start_ns
    entry.model_served, entry.response_id = facts.model_served or entry.model_served, facts.response_id
    entry.finish, entry.usage = facts.finish, facts.usage
    entry.tool_calls, entry.choices = facts.tool_calls, facts.choices
    entry.stream, entry.truncated = by.stream, entry.truncated or by.truncated
    whose = f"{by.rollout}/{by.attempt}#{by.sequence}"
    entry.attributes = {**(entry.attributes or {}), BACKGROUND: name, FETCHED: whose}
    if entry.body is not None and answer.body is not None:
        entry.body = _with_answer(entry.body, answer.body, entry)
        entry.response_bytes = len(entry.body.response)
    tape.record(entry, 0)
    if correct is not None:
        correct(tape, entry, name)


def _resumed(entry: SpanEntry, answer: _FetchedAnswer) -> _FetchedAnswer:
    """The whole answer, where the fetched one is the rest of a stream whose beginning the call has got."""
    dialect, body = by_name(entry.dialect), answer.body
    if not answer.by.stream or body is None or entry.body is None:
        return answer
    whole = dialect.resumed(entry.body.response, body.response, answer.by.path)
    if whole is None:
        return answer
    return _FetchedAnswer(dialect.facts(b"", whole, True), answer.by, replace(body, response=whole))


def _with_answer(asked: StoredBody, came: StoredBody, entry: SpanEntry) -> StoredBody:
    """The bytes of a call with the fetched answer; its first answer is kept as a side."""
    told = Side(who="receipt", dialect=entry.dialect, path=entry.path, request_body=b"", response_body=asked.response)
    arrived = max(0, ((entry.end_ns or entry.start_ns) - entry.start_ns) // 1000)
    return replace(
        asked,
        response_headers=came.response_headers,
        response=came.response,
        trailers=came.trailers,
        marks=[arrived, len(came.response)] if came.response else [],
        sides=[*asked.sides, told],
    )


def _give_up(tape: Transaction, call: tuple[str, str, int]) -> SpanEntry | None:
    entry = _waiting(tape, call)
    if entry is not None:
        entry.status, entry.error = "cancelled", "not_fetched"
        tape.record(entry, 0)
    return entry


def _waiting(tape: Transaction, call: tuple[str, str, int]) -> SpanEntry | None:
    """A call that waits for its answer; None if it has ended, or was forgotten."""
    found = tape.deferred(call)
    if found is None:
        return None
    span, body = found
    kept: dict[str, Any] = {name: getattr(span, name) for name in _KEPT}
    entry = SpanEntry(span.rollout, span.attempt, sequence=span.sequence, **kept)
    entry.estimate = None if span.estimate is None else values(span.estimate, ESTIMATE)
    entry.body = body
    return entry
