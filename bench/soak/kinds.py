"""The requests of clients, and the expected end of each kind of call if nobody kills the gateway. Pure.

A call has a name of 16 hex digits: in its `traceparent`, which its span keeps, and in its body, from which the provider
takes it as the id of the answer. Its model is `soak-` and its kind, which tells the provider what to do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

from bench import corpus

NAME = b"0123456789abcdef"
"""Placeholder of the call's name in a body."""
TASK = b"Task 00000000"
VARIANTS = 64
STEPS = corpus.STEPS
"""Calls of a rollout."""
MCP_VERSION = "2026-07-28"


class Seen(IntEnum):
    """A client's observation of a call."""

    PENDING = 0
    """Nothing yet."""
    ANSWERED = 1
    """The whole answer, with its name."""
    REFUSED = 2
    """A whole error."""
    BROKEN = 3
    """The connection closed before the answer was whole, or nothing came for too long."""
    LEFT = 4
    """Nothing more, because the client has left."""
    UNSENT = 5
    """Nothing, because it could not connect."""
    WRONG = 6
    """A whole answer without its name, or without an end."""


Leaves = Literal["", "before", "middle"]


@dataclass(frozen=True)
class Kind:
    """A kind of call, with its expected end."""

    name: str
    weight: int = 0
    """Its share of the calls of mixed rollouts; 0: it makes rollouts of its own."""
    path: str = "/v1/chat/completions"
    sees: Seen = Seen.ANSWERED
    """Its client's observation when nobody kills the gateway."""
    ends: str = "ok"
    """The status of its span then."""
    stream: bool = False
    packed: bool = False
    """True if the client accepts gzip."""
    addressed: bool = True
    leaves: Leaves = ""
    waits: bool = False
    """True if its provider makes it wait, so that its latency says nothing about the gateway."""

    @property
    def model(self) -> str:
        """The model in the body."""
        return f"soak-{self.name}"


MESSAGES, RESPONSES, EMBEDDINGS = "/v1/messages", "/v1/responses", "/v1/embeddings"
KINDS = (
    Kind("turns"),
    Kind("implicit", addressed=False),
    Kind("chat", 31),
    Kind("opening", 15, addressed=False),
    Kind("stream", 12, stream=True),
    Kind("stream_gzip", 8, stream=True, packed=True),
    Kind("messages", 6, MESSAGES),
    Kind("messages_stream", 4, MESSAGES, stream=True),
    Kind("responses", 5, RESPONSES),
    Kind("responses_stream", 3, RESPONSES, stream=True),
    Kind("embeddings", 4, EMBEDDINGS),
    Kind("tool", 3, "/mcp/echo"),
    Kind("failover", 2, waits=True),
    Kind("refused_500", 1, sees=Seen.REFUSED, ends="error"),
    Kind("refused_429", 1, sees=Seen.REFUSED, ends="error"),
    Kind("broken", 1, sees=Seen.BROKEN, ends="error", stream=True),
    Kind("slow_head", 1, waits=True),
    Kind("slow_tokens", 1, stream=True, waits=True),
    Kind("leaves_before", 1, sees=Seen.LEFT, ends="cancelled", leaves="before", waits=True),
    Kind("leaves_middle", 1, sees=Seen.LEFT, ends="cancelled", stream=True, leaves="middle", waits=True),
)
BY_NAME = {kind.name: number for number, kind in enumerate(KINDS)}
MIXED = [number for number, kind in enumerate(KINDS) if kind.weight]
WEIGHTS = [KINDS[number].weight for number in MIXED]
WHOLE = [BY_NAME["turns"], BY_NAME["implicit"]]
"""Kinds of calls that make a whole conversation of twelve calls, which grows from 3 to 15 KB."""
SHARES = (3, 1, 11)
"""Shares of rollouts: conversations with an address, conversations without, mixed ones."""


def episode(chance: random.Random) -> Iterator[tuple[int, int, int]]:
    """Yield the calls of a rollout: the kind's number, the conversation and the step in it."""
    which = chance.choices((*WHOLE, -1), SHARES)[0]
    conversation = chance.randrange(VARIANTS)
    for step in range(STEPS):
        yield (chance.choices(MIXED, WEIGHTS)[0] if which < 0 else which), conversation, step


class Requests:
    """Makes the bytes of every call."""

    def __init__(self, seed: int) -> None:
        rng, prose = random.Random(seed), corpus.paragraphs()
        texts = [corpus.passage(rng, prose, 700) for _ in range(VARIANTS)]
        grown = [corpus.long_conversation(rng, prose, 0) for _ in range(VARIANTS)]
        self._bodies = [_bodies(kind, texts, grown) for kind in KINDS]
        self._heads = [_head(kind) for kind in KINDS]

    def request(self, kind: int, place: tuple[int, int], rollout: int, call: bytes) -> bytes:
        """Return the bytes of a call. `place`: conversation and step; `rollout`: its number, which makes its
        conversation different from all others; `call`: its name."""
        conversation, step = place
        steps = self._bodies[kind][conversation]
        body = steps[step % len(steps)].replace(TASK, b"Task %08d" % rollout, 1).replace(NAME, call)
        address = (b"r%d" % rollout,) if KINDS[kind].addressed else ()
        return self._heads[kind] % (*address, call, call, len(body)) + body


def _bodies(kind: Kind, texts: list[str], grown: list[corpus.Conversation]) -> list[list[bytes]]:
    """Return the bodies of a kind by conversation and step."""
    if kind.name in ("turns", "implicit"):
        end = corpus.tail(kind.model, tools=corpus.TOOLS, user=NAME.decode())
        return [[text[start:stop] + end for start, stop in ranges] for text, ranges in grown]
    return [[corpus.compact(_asked(kind, f"{TASK.decode()}. {text}")).encode()] for text in texts]


def _asked(kind: Kind, text: str) -> dict[str, Any]:
    """Return a body of about 1 KB."""
    name, said = NAME.decode(), [{"role": "user", "content": text}]
    common: dict[str, Any] = {"model": kind.model} | ({"stream": True} if kind.stream else {})
    if kind.path == MESSAGES:
        return {**common, "max_tokens": 256, "system": corpus.SYSTEM, "messages": said, "metadata": {"user_id": name}}
    if kind.path == RESPONSES:
        return {**common, "instructions": corpus.SYSTEM, "input": said, "store": False, "user": name}
    if kind.path == EMBEDDINGS:
        return {**common, "input": text, "user": name}
    if kind.name == "tool":
        about = {
            "protocolVersion": MCP_VERSION,
            "clientInfo": {"name": "soak", "version": "1"},
            "clientCapabilities": {},
        }
        meta = {f"io.modelcontextprotocol/{key}": value for key, value in about.items()}
        params = {"name": "echo", "arguments": {"text": text}, "_meta": meta}
        return {"jsonrpc": "2.0", "id": name, "method": "tools/call", "params": params}
    return {**common, "messages": [{"role": "system", "content": corpus.SYSTEM}, *said], "user": name}


def _head(kind: Kind) -> bytes:
    """Return the head of every request, with room for rollout, name (twice) and length."""
    where = f"/rollout/%b/attempt/a1{kind.path}" if kind.addressed else kind.path
    lines = [f"POST {where} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    # No `Authorization`: keys are not tested here.
    lines += ["traceparent: 00-%b0000000000000001-%b-01", "Content-Length: %d"]
    lines += ["Accept-Encoding: gzip"] if kind.packed else []
    if kind.name == "tool":
        lines += ["Accept: application/json, text/event-stream", f"MCP-Protocol-Version: {MCP_VERSION}"]
        lines += ["Mcp-Method: tools/call", "Mcp-Name: echo"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
