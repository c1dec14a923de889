"""Recent sessions, by attempt: the conversation and its tokens. Pure, bounded, in memory.

An answer with its conversation is a `SessionTurn`. It continues the turn whose tokens its prompt begins with. A request
continues the newest turn whose conversation and answer its messages begin with, compared by their fingerprints
(`gateway.wire.dialects.parts`), as `penstock doctor` does, and by the reasoning that it sends back. Among turns that
differ only in white space at the edges of their answers, it continues one whose answers are there to the letter, if
there is one. The `key` of a turn names its model and version: tokens of another are not continued.

The least recently used attempts are dropped first. A session that was dropped, or lost by a restart, can be restored
from the tape: everything follows from requests and answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, Literal, NamedTuple, TypeAlias

from penstock.gateway.traffic.proxy.exact.chat_parser import AnswerChoice, MessageFingerprint
from penstock.gateway.traffic.proxy.exact.continuation import TurnTokens

SessionKey: TypeAlias = tuple[str, ...]
"""Key of a session's tokens: agent, model, versions."""
StartReason: TypeAlias = Literal[
    "first", "forked", "compacted", "version", "tools", "template", "cut", "media", "unrendered"
]  # fmt: skip
"""Why a session begins."""

SESSION: Final = "penstock.session"
"""Attribute of a call: the session that it belongs to."""
_SYSTEM: Final = ("system", "developer")
_EACH: Final = 400
"""Bytes that a turn takes besides its ids."""


@dataclass(eq=False, slots=True)
class SessionTurn:
    """An answer, and the tokens before and in it."""

    session: str
    key: SessionKey
    parent: SessionTurn | None
    """The turn that it continues."""
    piece: TurnTokens
    size: int
    """Bytes of all ids up to its end."""
    edges: tuple[str, str]
    """White space around its text."""
    thought: str
    """Its reasoning."""
    place: int
    """Number of messages with content before it."""
    tools: bytes
    """Digest of the request's tools."""
    continued: bool = False
    """True if another turn continues it."""
    claimed_by: object = None
    """The running call that continues it; None if there is none. Used only for its identity."""

    def pieces(self) -> list[TurnTokens]:
        """The pieces of all turns of its session up to it."""
        found: list[TurnTokens] = []
        turn: SessionTurn | None = self
        while turn is not None:
            found.append(turn.piece)
            turn = turn.parent
        return found[::-1]

    def ids(self) -> bytes:
        """All ids that the engine has read and generated up to its end."""
        return b"".join(part for piece in self.pieces() for part in (piece.before, piece.answer))


@dataclass(slots=True)
class TemplateTokens:
    """The fixed tokens of a template, asked for once."""

    opening: bytes | None = None
    """The ids at the end that make the model speak."""
    tails: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    """The ids after the token that ends a turn, by that token."""


class TurnMatch(NamedTuple):
    """The turn that a request continues."""

    turn: SessionTurn
    message: int
    """Index of the message that is its answer."""


@dataclass(eq=False, slots=True)
class AttemptTurns:
    """The turns of one attempt."""

    turns: dict[bytes, list[SessionTurn]] = field(default_factory=dict[bytes, list[SessionTurn]])
    """Turns by the digest of the conversation up to their end."""
    seen: set[bytes] = field(default_factory=set[bytes])
    """Digests of every beginning of every conversation."""
    answers: set[bytes] = field(default_factory=set[bytes])
    """Digests of answers."""
    templates: dict[SessionKey, TemplateTokens] = field(default_factory=dict[SessionKey, "TemplateTokens"])
    """Fixed tokens of the template, by key."""
    size: int = 0

    def find(self, key: SessionKey, said: Sequence[MessageFingerprint]) -> TurnMatch | StartReason:
        """The turn that a conversation continues, or the reason why it begins a session."""
        prefixes, strange = _prefixes(key, said), False
        for at in range(len(said) - 1, -1, -1):
            turns = self.turns.get(prefixes[at], ()) if said[at].role == "assistant" else ()
            mine = (turn for turn in reversed(turns) if turn.key == key and _thoughts(turn, said))
            if (newest := next(mine, None)) is not None:
                same = (turn for turn in (newest, *mine) if _verbatim(turn, said))
                return TurnMatch(next(same, newest), said[at].at)
            strange = strange or any(turn.key != key for turn in turns)
        return "version" if strange else self._why(key, said, prefixes)

    def _why(self, key: SessionKey, said: Sequence[MessageFingerprint], prefixes: Sequence[bytes]) -> StartReason:
        """The reason why it begins a session, as in `gateway.reading.diagnosis.rows`."""
        shared = next((at for at, one in enumerate(prefixes) if one not in self.seen), len(said))
        if all(one.role in _SYSTEM for one in said[:shared]):
            kept = any(one.role == "assistant" and _after(_agent(key), one.print) in self.answers for one in said)
            return "compacted" if kept else "first"
        return "forked" if shared == len(said) or said[shared - 1].role == "assistant" else "compacted"

    def add(
        self,
        session: str,
        key: SessionKey,
        said: Sequence[MessageFingerprint],
        tools: bytes,
        answers: Sequence[AnswerChoice],
    ) -> None:
        """Add the answers to a request, all of `session`."""
        prefixes, before = _prefixes(key, said), self.find(key, said)
        self.seen.update(prefixes)
        for answer in answers:
            parent = before.turn if isinstance(before, TurnMatch) else None
            parent = parent if parent is not None and answer.prompt.startswith(parent.ids()) else None
            turn = _turn(session, key, parent, len(said), tools, answer)
            if answer.print:
                whole = _after(prefixes[-1] if prefixes else _agent(key), answer.print)
                self.turns.setdefault(whole, []).append(turn)
                self.seen.add(whole)
                self.answers.add(_after(_agent(key), answer.print))
            self.size += _EACH + len(turn.piece.before) + len(turn.piece.answer)


class SessionCache:
    """The sessions of all attempts."""

    def __init__(self, most_bytes: int, most_attempts: int = 100_000) -> None:
        self._most_bytes, self._most_attempts = most_bytes, most_attempts
        self._attempts: OrderedDict[tuple[str, str], tuple[AttemptTurns, int]] = OrderedDict()
        """Each with the size that it was counted with; least recently used first."""
        self._size = 0

    def get(self, name: tuple[str, str]) -> AttemptTurns | None:
        """The turns of an attempt; None if it is not in memory."""
        if name not in self._attempts:
            return None
        self._attempts.move_to_end(name)
        return self._attempts[name][0]

    def put(self, name: tuple[str, str], attempt: AttemptTurns) -> None:
        """Keep the sessions of an attempt, and drop others for them. A single one may be larger than the limit."""
        self._drop(name)
        self._attempts[name] = attempt, attempt.size
        self._size += attempt.size
        while len(self._attempts) > 1 and self._full:
            self._drop(next(iter(self._attempts)))

    @property
    def _full(self) -> bool:
        return self._size > self._most_bytes or len(self._attempts) > self._most_attempts

    def _drop(self, name: tuple[str, str]) -> None:
        _, size = self._attempts.pop(name, (None, 0))
        self._size -= size


def _turn(
    session: str, key: SessionKey, parent: SessionTurn | None, place: int, tools: bytes, answer: AnswerChoice
) -> SessionTurn:
    known = 0 if parent is None else parent.size
    piece = TurnTokens(answer.prompt[known:], answer.ids, answer.ended)
    if parent is not None:
        parent.continued = True
    size = len(answer.prompt) + len(answer.ids)
    return SessionTurn(session, key, parent, piece, size, answer.edges, answer.thought, place, tools)


def _thoughts(turn: SessionTurn | None, said: Sequence[MessageFingerprint]) -> bool:
    """True if all reasoning that is sent back is the model's."""
    while turn is not None:
        if said[turn.place].thought not in ("", turn.thought):
            return False
        turn = turn.parent
    return True


def _verbatim(turn: SessionTurn | None, said: Sequence[MessageFingerprint]) -> bool:
    """True if all answers are sent back with the white space at their edges."""
    while turn is not None:
        if said[turn.place].edges != turn.edges:
            return False
        turn = turn.parent
    return True


def _prefixes(key: SessionKey, said: Iterable[MessageFingerprint]) -> list[bytes]:
    """A digest of the conversation up to each message. Conversations of different agents have nothing in common."""
    found, whole = list[bytes](), _agent(key)
    for one in said:
        whole = _after(whole, one.print)
        found.append(whole)
    return found


def _after(before: bytes, print: bytes) -> bytes:
    return blake2b(print, key=before, digest_size=16).digest()


def _agent(key: SessionKey) -> bytes:
    return blake2b(key[0].encode(), digest_size=16).digest()
