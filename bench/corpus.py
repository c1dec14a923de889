"""Makes requests and answers: files of text that mock.c and load.c read.

Prompts are English with code in it, Python's own language reference, cut and shuffled with a fixed seed, so that they
compress like a conversation (to about a quarter) and neither like noise nor like one repeated letter. Bodies look as
the OpenAI SDK writes them: compact, the model after the messages.

A *corpus* holds conversations told in 12 steps. In a short one every step is another prompt of about 1 KB; in a long
one a step is the step before plus what an agent adds in a turn, a tool call and its result of about 1 KB, around 100 KB
in all.
A *script* holds the mock's answers, byte for byte, in the parts in which it writes them.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

STEPS = 12
EVENTS = 200
ANSWER_BYTES = 600
"""Bytes of the body of a plain answer."""
BURST_WRITES = 20

SHORT, LONG = 256, 64
LONG_START = 92_000
VARIANTS = 64
STAMP = "#" + "0" * 19
"""The mock replaces the digits with the time of sending."""


@dataclass(frozen=True)
class Material:
    """The files of a run, and the length of a right answer's body."""

    folder: Path
    stream_bytes: dict[str, int]

    def prompts(self, name: str) -> Path:
        """Return the corpus of a name: chat_1k, chat_100k, openings, openings_sse, turns, turns_sse, burst or paced."""
        return self.folder / f"{name}.prompts"


def write(folder: Path) -> Material:
    """Write all corpora and scripts into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(20)
    prose = paragraphs()
    short = [short_conversation(rng, prose) for _ in range(SHORT)]
    write_corpus(folder / "chat_1k.prompts", short, tail("bench-chat"))
    write_corpus(folder / "burst.prompts", short, tail("bench-burst", stream=True))
    write_corpus(folder / "paced.prompts", short, tail("bench-paced", stream=True))
    single = [(text[a:b], [(0, b - a)]) for text, steps in short for a, b in steps]
    write_corpus(folder / "openings.prompts", single, tail("bench-chat"))
    write_corpus(folder / "openings_sse.prompts", single, tail("bench-burst", stream=True))
    long = [long_conversation(rng, prose) for _ in range(LONG)]
    write_corpus(folder / "chat_100k.prompts", long, tail("bench-chat", tools=TOOLS))
    grown = [long_conversation(rng, prose, 0) for _ in range(SHORT)]
    write_corpus(folder / "turns.prompts", grown, tail("bench-chat", tools=TOOLS))
    write_corpus(folder / "turns_sse.prompts", grown, tail("bench-burst", tools=TOOLS, stream=True))
    words = plain_words(prose)
    write_script(folder / "chat", [[plain_answer(rng, words)] for _ in range(VARIANTS)])
    sizes = {name: write_streams(folder / name, rng, words) for name in ("burst", "paced")}
    return Material(folder, sizes)


def paragraphs() -> list[str]:
    """Return the language reference in pieces of a few hundred characters."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return [piece for piece in text.split("\n\n") if len(piece) > 40]


def plain_words(prose: list[str]) -> list[str]:
    """Return words that need no escaping."""
    return [word for piece in prose[:400] for word in piece.split() if word.isascii() and word.isalpha()]


def compact(value: Any) -> str:
    """Return JSON as the OpenAI SDK writes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


# Requests.

SYSTEM = (
    "You are a careful software engineer. Answer briefly, name the rule of the language that applies, "
    "and say so when you are not sure. Use a tool when you need to look something up."
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]},
        },
    }
    for name, description, key in [
        ("read_file", "Read a file of the repository and return its text.", "path"),
        ("search", "Search the repository for a regular expression and return the matching lines.", "pattern"),
        ("run", "Run a shell command in the repository and return its output.", "command"),
    ]
]

Conversation = tuple[bytes, list[tuple[int, int]]]
"""Text, and for each step the range of it that is sent before the tail."""


def tail(model: str, **rest: Any) -> bytes:
    """Return the end of every request body, after the messages."""
    return ("]," + compact({"model": model, "temperature": 0.7, **rest})[1:]).encode()


def passage(rng: random.Random, prose: list[str], size: int) -> str:
    """Return about `size` characters of running text."""
    start, text = rng.randrange(len(prose)), ""
    while len(text) < size:
        text += prose[start % len(prose)] + "\n\n"
        start += 1
    return text[:size]


def opening(rng: random.Random, prose: list[str], size: int) -> str:
    """Return the start of a body: the system text and a question, whose number load.c replaces by the rollout's."""
    question = "Task 00000000. " + passage(rng, prose, size - 15)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return compact({"messages": messages})[:-2]


def short_conversation(rng: random.Random, prose: list[str]) -> Conversation:
    """Return twelve prompts of about 1 KB, one after the other."""
    bodies = [opening(rng, prose, 690).encode() for _ in range(STEPS)]
    ends = list(accumulate(len(body) for body in bodies))
    return b"".join(bodies), [(end - len(body), end) for body, end in zip(bodies, ends, strict=True)]


def long_conversation(rng: random.Random, prose: list[str], start: int = LONG_START) -> Conversation:
    """Return a conversation that has `start` bytes and grows by about 1 KB a step."""
    text = opening(rng, prose, 2_000).encode()
    while len(text) < start:
        text += agent_turn(rng, prose).encode()
    ends: list[int] = []
    for _ in range(STEPS):
        text += agent_turn(rng, prose).encode()
        ends.append(len(text))
    return text, [(0, end) for end in ends]


def agent_turn(rng: random.Random, prose: list[str]) -> str:
    """Return the messages that an agent adds in one turn: a tool call and its result."""
    key = "call_" + "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=24))
    arguments = compact({"path": f"src/{rng.choice(sorted(topics))}.py"})
    function = {"name": "read_file", "arguments": arguments}
    call = {"id": key, "type": "function", "function": function}
    assistant = {"role": "assistant", "content": passage(rng, prose, 160), "tool_calls": [call]}
    tool = {"role": "tool", "tool_call_id": key, "content": passage(rng, prose, 620)}
    return "," + compact(assistant) + "," + compact(tool)


def write_corpus(path: Path, conversations: list[Conversation], end: bytes) -> None:
    """Write u32 conversations, steps, tail size; per conversation u32 record size, (start, end) pairs, text; the
    tail."""
    blob = struct.pack("=III", len(conversations), len(conversations[0][1]), len(end))
    for text, ranges in conversations:
        padded = text + bytes(-len(text) % 4)
        numbers = [number for pair in ranges for number in pair]
        blob += struct.pack(f"={1 + len(numbers)}I", 4 + 4 * len(numbers) + len(padded), *numbers) + padded
    path.write_bytes(blob + end)


# Answers.

HEADERS = (
    "HTTP/1.1 200 OK\r\nDate: Thu, 05 Nov 2026 10:00:00 GMT\r\nContent-Type: {type}\r\nopenai-processing-ms: 312\r\n"
    "openai-version: 2020-10-01\r\nx-ratelimit-remaining-requests: 9999\r\nx-request-id: req_8f0c2d71b6f94e5a\r\n"
)
PLAIN_HEAD = HEADERS + "Content-Length: {size}\r\n\r\n"
STREAM_HEAD = HEADERS + "Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"


def plain_answer(rng: random.Random, words: list[str]) -> bytes:
    """Return a chat completion whose body is exactly ANSWER_BYTES long."""
    message = {"role": "assistant", "content": "", "refusal": None}
    usage = {"prompt_tokens": 248, "completion_tokens": 46, "total_tokens": 294}
    answer = {
        "id": f"chatcmpl-{rng.getrandbits(96):024x}",
        "object": "chat.completion",
        "created": 1793872800,
        "model": "bench-chat",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": usage,
    }
    room = ANSWER_BYTES - len(compact(answer))
    message["content"] = " ".join(rng.choices(words, k=room))[: room - 1] + "."
    body = compact(answer)
    return (PLAIN_HEAD.format(type="application/json", size=len(body)) + body).encode()


def write_streams(path: Path, rng: random.Random, words: list[str]) -> int:
    """Write the script of streamed answers; return the size of one body. All use the same words, so all are of one
    size."""
    said = rng.sample(words, EVENTS)
    mark = STAMP if path.name == "paced" else "#"
    streams = [stream(f"bench-{path.name}", said[turn:] + said[:turn], mark) for turn in range(16)]
    head = STREAM_HEAD.format(type="text/event-stream; charset=utf-8").encode()
    per_write = 1 if path.name == "paced" else EVENTS // BURST_WRITES
    write_script(path, [parts(head, events, per_write) for events in streams])
    return sum(len(event) for event in streams[0])


def stream(model: str, words: list[str], mark: str) -> list[bytes]:
    """Return the events of one streamed answer: the role, one event a word, the end."""
    deltas: list[dict[str, str]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": f" {word}{mark}"} for word in words]
    events = [event(model, delta, None) for delta in deltas]
    return [*events, event(model, {}, "stop"), b"data: [DONE]\n\n"]


def event(model: str, delta: dict[str, str], finish: str | None) -> bytes:
    """Return a chat.completion.chunk as an event."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    name = {"id": "chatcmpl-D2bq8uOQ1nTzY4Lk7vXe5RmS", "object": "chat.completion.chunk", "created": 1793872800}
    return f"data: {compact({**name, 'model': model, 'choices': [choice]})}\n\n".encode()


def parts(head: bytes, events: list[bytes], per_write: int) -> list[bytes]:
    """Return the wire bytes of a stream by write: every event is a chunk of its own, the head goes with the first."""
    chunks = [f"{len(event):x}\r\n".encode() + event + b"\r\n" for event in events]
    start, words, end = head + chunks[0], chunks[1:-2], b"".join(chunks[-2:]) + b"0\r\n\r\n"
    writes = [b"".join(words[at : at + per_write]) for at in range(0, len(words), per_write)]
    return [start, *writes, end]


def write_script(path: Path, variants: Iterable[list[bytes]]) -> None:
    """Write u32 variants, parts a variant; then each part with its u32 size before it."""
    listed = list(variants)
    blob = struct.pack("=II", len(listed), len(listed[0]))
    blob += b"".join(struct.pack("=I", len(part)) + part for variant in listed for part in variant)
    path.write_bytes(blob)


# Reading back, for benches of parts.


def first_body(path: Path) -> bytes:
    """Return the first request body of a corpus."""
    blob = path.read_bytes()
    _, steps, end = struct.unpack_from("=III", blob)
    start, stop = struct.unpack_from("=II", blob, 16)
    text = 16 + 8 * steps
    return blob[text + start : text + stop] + blob[-end:]


def first_answer(path: Path) -> bytes:
    """Return the body of the first plain answer of a script."""
    blob = path.read_bytes()
    (size,) = struct.unpack_from("=I", blob, 8)
    return blob[12 : 12 + size].partition(b"\r\n\r\n")[2]
