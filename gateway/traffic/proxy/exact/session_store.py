"""The sessions that all calls of exact routes share; sessions that were dropped from memory are read from the tape.

Everything about a session follows from requests and answers: the same function learns from a call that has just ended
and from one on the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Final
from uuid import uuid4

import aiohttp
import orjson

from penstock.gateway.model.metrics import Metrics
from penstock.gateway.reading.turns import plain_bodies
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.traffic.proxy.exact.chat_parser import (
    MessageFingerprint,
    answer_choices,
    message_fingerprints,
    messages,
)
from penstock.gateway.traffic.proxy.exact.sessions import SESSION, AttemptTurns, SessionCache, SessionKey
from penstock.gateway.traffic.trials.replay.sender import background
from penstock.gateway.wire.dialects.loose_json import Json, loads, obj, text

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
