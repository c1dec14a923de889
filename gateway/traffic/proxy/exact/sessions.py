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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, Literal, NamedTuple, TypeAlias
from uuid import uuid4

import aiohttp
import orjson

from penstock.gateway.model.metrics import Metrics
from penstock.gateway.reading.turns import plain_bodies
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.traffic.proxy.exact.chat_answer import (
    AnswerChoice,
    MessageFingerprint,
    answer_choices,
    message_fingerprints,
    messages,
)
from penstock.gateway.traffic.trials.sender import background
from penstock.gateway.wire.dialects.loose_json import Json, loads, obj, text
from penstock.gateway.wire.dialects.tokens import WIDTH

# Finds the tokens that a chat template writes after a model's turn, to continue a session. Pure.
#
# A session is what the engine has read and generated, turn by turn: tokens before an answer, the answer, tokens
# before the next one. The template writes the same conversation anew (`whole`), with the past answers as it would
# write them. These may differ from the very tokens: text is tokenised another way, white space is stripped, JSON is
# written anew, reasoning is left out. The tokens to send after the last answer stand in `whole` behind the end of
# that answer's turn.
#
# Nothing is guessed. All tokens between two answers must stand in `whole` as they were, in their order, so that only
# answers were written anew. The last token of the answer must be the one with which the template ends a turn,
# whatever the turn says: with another text in its place the same token stands there (`turn_tail`). And that token
# must stand in the turn once, so the model did not write it as text. Otherwise the session cannot be continued.
#
# Ids are bytes of 32-bit integers, as in `gateway.wire.dialects.tokens`.


class TurnTokens(NamedTuple):
    """One turn of a session."""

    before: bytes
    """Ids between the answer before and this one, the opening of this turn included; at first, the whole prompt."""
    answer: bytes
    """Ids that the model made."""
    ended: bool
    """True when the model ended its turn itself: its last id says so, and is no text."""


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A conversation as the template renders it now; token ids."""

    whole: bytes
    """All of it, with the opening of the next turn."""
    upto: bytes
    """Up to the end of the last answer's turn, without an opening."""
    opening: bytes
    """The ids at the end that make the model speak."""
    tail: bytes
    """The ids after the token that ends a turn of the model, whatever its text; see `turn_tail`."""


def continuation_ids(pieces: Sequence[TurnTokens], written: RenderedConversation) -> bytes | None:
    """The ids to send after the last answer; None if the session cannot be continued."""
    last, opening = pieces[-1], written.opening
    if not last.ended or not written.whole.endswith(opening):
        return None
    rest, end = _rest(pieces, written.whole, opening), last.answer[-WIDTH:]
    if rest is None or turn_tail(pieces, written.upto, opening) != written.tail:
        return None
    at = find_ids(rest, end)
    found = rest[at + WIDTH :] if at >= 0 else b""
    # There must be something new after the answer: otherwise the model would be asked to speak twice.
    return found if found.startswith(written.tail) and len(found) > len(written.tail) + len(opening) else None


def turn_tail(pieces: Sequence[TurnTokens], ids: bytes, opening: bytes) -> bytes | None:
    """The ids that the template puts after the token that ends the last answer. `ids`: the conversation up to the end
    of the turn of that answer or of another one in its place. None unless that token stands in the turn exactly
    once."""
    rest = _rest(pieces, ids, opening)
    return None if rest is None else _only(rest, pieces[-1].answer[-WIDTH:])


def _rest(pieces: Sequence[TurnTokens], ids: bytes, opening: bytes) -> bytes | None:
    """The ids from the beginning of the last answer; None unless all ids between answers stand in `ids`."""
    at, end = 0, b""
    for number, piece in enumerate(pieces):
        between = end + piece.before[: len(piece.before) - len(opening)]
        # A turn ends where its end token first stands; of a turn that was cut off only the tokens after it are known.
        found = find_ids(ids, end or between, at) if number else 0
        if found < 0 or not piece.before.endswith(opening) or not ids.startswith(between, found):
            return None
        at, end = found + len(between), piece.answer[-WIDTH:] if piece.ended else b""
    return ids[at:]


def _only(ids: bytes, end: bytes) -> bytes | None:
    """The ids after the id `end`; None unless it stands there exactly once."""
    at = find_ids(ids, end)
    return None if at < 0 or find_ids(ids, end, at + WIDTH) >= 0 else ids[at + WIDTH :]


def find_ids(ids: bytes, some: bytes, start: int = 0) -> int:
    """The byte offset of `some` in `ids`, at a whole id; -1 if it is not there."""
    at = ids.find(some, start)
    while at >= 0 and at % WIDTH:
        at = ids.find(some, at + 1)
    return at


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


# The sessions that all calls of exact routes share; sessions that were dropped from memory are read from the tape.
#
# Everything about a session follows from requests and answers: the same function learns from a call that has just
# ended and from one on the tape.

LIMIT: Final = 256 << 20
"""Most bytes that sessions take in memory."""
_USUAL: Final[Json] = {
    "echo": False,
    "continue_final_message": False,
    "add_generation_prompt": True,
    "truncate_prompt_tokens": None,
    "use_beam_search": False,
}
"""Fields, with their defaults, that can make the prompt something else than the conversation and the opening of the
next turn."""


class ExactSessionStore:
    """The sessions of a gateway, with the tape they are restored from."""

    def __init__(
        self, session: Callable[[], aiohttp.ClientSession], tape: Store, recorder: Recorder, metrics: Metrics
    ) -> None:
        self.session, self.metrics = session, metrics
        self.rendering: set[str] = set()
        """Names of upstreams that have rendered a request."""
        self._sessions = SessionCache(LIMIT)
        self._tape, self._recorder = tape, recorder

    async def attempt(self, name: tuple[str, str], conversation: Sequence[MessageFingerprint]) -> AttemptTurns:
        """Return the sessions of an attempt, from memory or else from the tape."""
        known = self._sessions.get(name)
        if known is None and any(one.role == "assistant" for one in conversation):
            await self._recorder.flush()
            read = await background(lambda: self._read(name))
            known = self._sessions.get(name) or read
        known = known or AttemptTurns()
        self._sessions.put(name, known)
        return known

    def learn(
        self, name: tuple[str, str], session: str, key: SessionKey, bodies: tuple[bytes, bytes], stream: bool
    ) -> None:
        """Learn from an ended call. Sessions that were dropped meanwhile are read from the tape when needed."""
        known = self._sessions.get(name)
        if known is not None:
            learn(known, session, key, bodies, stream)
            self._sessions.put(name, known)

    def _read(self, name: tuple[str, str]) -> AttemptTurns:
        """Read the sessions of an attempt from the tape; on a thread."""
        found = AttemptTurns()
        for span in self._tape.spans(*name):
            exchange = self._tape.exchange(span) if span.kind == "llm" and span.status == "ok" else None
            if exchange is not None and not span.truncated:
                bodies, attributes = plain_bodies(exchange), span.attributes or {}
                session = text(attributes.get(SESSION)) or new_session()
                learn(found, session, session_key(span.agent, bodies[0], span.versions or {}), bodies, span.stream)
        return found


def learn(attempt: AttemptTurns, session: str, key: SessionKey, bodies: tuple[bytes, bytes], stream: bool) -> None:
    """Add a request and its answer if they are chat completions with all token ids."""
    asked, answers = obj(loads(bodies[0])), answer_choices(bodies[1], stream)
    if answers and has_standard_prompt(asked):
        attempt.add(session, key, message_fingerprints(messages(asked)), tools_digest(asked), answers)


def has_standard_prompt(asked: Json) -> bool:
    """True if the prompt of a request is its conversation and the opening of the next turn."""
    return bool(asked.get("messages")) and all(asked.get(name) in (None, value) for name, value in _USUAL.items())


def session_key(agent: str | None, body: bytes, versions: Mapping[str, str]) -> SessionKey:
    """The key of a call's session: agent, model, versions. `body`: its request, as it goes upstream."""
    model = text(obj(loads(body)).get("model")) or ""
    return agent or "", model, *(f"{name}={version}" for name, version in sorted(versions.items()))


def tools_digest(asked: Json) -> bytes:
    """A digest of the tools on offer."""
    return blake2b(orjson.dumps(asked.get("tools"), option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


def new_session() -> str:
    """Return a unique session id."""
    return uuid4().hex[:12]
