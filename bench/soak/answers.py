"""The provider's answers to each kind of call. Pure: the parts of an answer, by the name of its call."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any

from bench import corpus
from bench.soak.kinds import NAME

EVENTS, PER_WRITE = 40, 8
"""Events of a stream, and events of a write."""
ENDS = (b"data: [DONE]\n\n", b"event: message_stop", b"event: response.completed")
"""Last events of streams: one of them is near the end of every stream."""
_ID = NAME.decode()
_HEAD = "HTTP/1.1 {status}\r\nContent-Type: {type}\r\nx-request-id: req_8f0c2d71b6f94e5a\r\n"


class Answers:
    """The answers, made once; only the name of the call is written into them."""

    def __init__(self) -> None:
        rng = random.Random(21)
        words = corpus.plain_words(corpus.paragraphs())
        text, said = " ".join(rng.choices(words, k=60)), [f" {word}" for word in rng.choices(words, k=EVENTS)]
        self.chat, self.messages = _plain(_chat(text)), _plain(_messages(text))
        self.responses, self.embeddings = _plain(_responses(text)), _plain(_embeddings(rng))
        self.tool = _plain(_tool(text))
        self.chat_stream, self.messages_stream = _events_of_chat(said), _events_of_messages(said)
        self.responses_stream = _events_of_responses(said)

    @staticmethod
    def refused(status: str) -> bytes:
        """Return an error with a status."""
        return _plain({"error": {"message": "Not now.", "type": "server_error", "code": None}}, status)


def stream(events: Sequence[bytes], name: bytes, packed: bool) -> list[bytes]:
    """Return the writes of a stream: its head, then some events at a time, each write a chunk; `packed`: as one
    gzip."""
    kind = "text/event-stream\r\nTransfer-Encoding: chunked" + ("\r\nContent-Encoding: gzip" if packed else "")
    head = _HEAD.format(status="200 OK", type=kind).encode() + b"\r\n"
    groups = [b"".join(events[at : at + PER_WRITE]).replace(NAME, name) for at in range(0, len(events), PER_WRITE)]
    if packed:
        packer = zlib.compressobj(1, wbits=31)
        groups = [packer.compress(group) + packer.flush(zlib.Z_SYNC_FLUSH) for group in groups]
        groups[-1] += packer.flush()
    writes = [b"%x\r\n%b\r\n" % (len(group), group) for group in groups]
    writes[-1] += b"0\r\n\r\n"
    return [head, *writes]


def _plain(body: dict[str, Any], status: str = "200 OK") -> bytes:
    text = corpus.compact(body).encode()
    head = _HEAD.format(status=status, type="application/json") + f"Content-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


def _chat(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "refusal": None}
    usage = {"prompt_tokens": 248, "completion_tokens": 66, "total_tokens": 314}
    choices = [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    about = {"id": _ID, "object": "chat.completion", "created": 1793872800, "model": "soak-1"}
    return {**about, "choices": choices, "usage": usage}


def _messages(text: str) -> dict[str, Any]:
    about = {"id": _ID, "type": "message", "role": "assistant", "model": "soak-1"}
    usage = {"input_tokens": 248, "output_tokens": 66}
    content = [{"type": "text", "text": text}]
    return {**about, "content": content, "stop_reason": "end_turn", "stop_sequence": None, "usage": usage}


def _responses(text: str) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}
    usage = {"input_tokens": 248, "output_tokens": 66, "total_tokens": 314}
    about = {"id": _ID, "object": "response", "created_at": 1793872800, "model": "soak-1"}
    return {**about, "status": "completed", "output": [message], "usage": usage}


def _embeddings(rng: random.Random) -> dict[str, Any]:
    data = [{"object": "embedding", "index": 0, "embedding": [round(rng.uniform(-1, 1), 6) for _ in range(64)]}]
    # OpenAI's answer has no id. Clients ignore unknown fields, and the soak looks for this one.
    return {
        "object": "list",
        "data": data,
        "model": "soak-1",
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
        "id": _ID,
    }


def _tool(text: str) -> dict[str, Any]:
    result = {"content": [{"type": "text", "text": text}], "resultType": "complete"}
    return {"jsonrpc": "2.0", "id": _ID, "result": result}


def _event(data: dict[str, Any], named: bool = True) -> bytes:
    name = f"event: {data['type']}\n" if named else ""
    return f"{name}data: {corpus.compact(data)}\n\n".encode()


def _events_of_chat(words: list[str]) -> list[bytes]:
    about = {"id": _ID, "object": "chat.completion.chunk", "created": 1793872800, "model": "soak-1"}
    deltas: list[dict[str, str]] = [{"role": "assistant", "content": ""}, *({"content": word} for word in words), {}]
    finishes = [None] * (len(deltas) - 1) + ["stop"]
    choices = [{"index": 0, "delta": d, "finish_reason": f} for d, f in zip(deltas, finishes, strict=True)]
    return [*(_event({**about, "choices": [choice]}, named=False) for choice in choices), ENDS[0]]


def _events_of_messages(words: list[str]) -> list[bytes]:
    begun: dict[str, Any] = {**_messages(""), "content": [], "stop_reason": None}
    deltas = [{"type": "text_delta", "text": word} for word in words]
    block: dict[str, Any] = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    ended = {"delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": {"output_tokens": 66}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}, block]
    events += [{"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas]
    events += [{"type": "content_block_stop", "index": 0}, {"type": "message_delta", **ended}, {"type": "message_stop"}]
    return [_event(event) for event in events]


def _events_of_responses(words: list[str]) -> list[bytes]:
    begun: dict[str, Any] = {**_responses(""), "status": "in_progress", "output": [], "usage": None}
    events: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    events += [{"type": "response.output_text.delta", **place, "delta": word} for word in words]
    events.append({"type": "response.completed", "response": _responses("".join(words))})
    return [_event({**event, "sequence_number": number}) for number, event in enumerate(events)]
