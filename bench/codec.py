"""python -m bench.codec: what orjson and msgspec are for. One core, the best of five, microseconds.

Each job of the hot path is done with json and pydantic, which are there anyway, and with the library that the gateway
uses. The inputs are the benchmark's: a 1 KB prompt, a 100 KB conversation with the model after the messages, an answer
of 600 bytes, and the head of the span that such a call leaves.
"""

from __future__ import annotations

import json
import os
import tempfile
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import orjson
from pydantic import BaseModel, ConfigDict

from bench import corpus
from penstock.gateway.model.span import Span, Usage
from penstock.gateway.tape.store import codec
from penstock.gateway.wire.dialects.loose_json import peek

REPEATS = 5


class PydanticPeek(BaseModel):
    """Fields of a request that routing needs, read by pydantic."""

    model_config = ConfigDict(extra="ignore")
    model: Any = None
    n: Any = None


class PydanticAnswer(BaseModel):
    """Fields of an answer that a span's head needs, read by pydantic."""

    class Choice(BaseModel):
        finish_reason: str | None = None

    id: str | None = None
    model: str | None = None
    usage: dict[str, Any] | None = None
    choices: list[Choice] | None = None


class StructChoice(msgspec.Struct):
    finish_reason: str | None = None


class StructAnswer(msgspec.Struct):
    """Fields of an answer that a span's head needs, read by msgspec."""

    id: str | None = None
    model: str | None = None
    usage: dict[str, Any] | None = None
    choices: list[StructChoice] | None = None


@dataclass(frozen=True)
class Job:
    """One job, done in several ways; the last is the gateway's."""

    name: str
    ways: dict[str, Callable[[], Any]]


SPAN = Span(
    rollout="r3f2a-001204",
    attempt="a1",
    sequence=7,
    start_ns=1793872800123456789,
    end_ns=1793872800623456789,
    first_byte_ns=498000000,
    dialect="chat",
    path="/v1/chat/completions",
    upstream="mock",
    http_status=200,
    model="bench-chat",
    model_served="bench-chat",
    finish="stop",
    response_id="chatcmpl-9d0e3f6a7b8c1d2e3f4a5b6c",
    usage=Usage(input_tokens=248, output_tokens=46),
    choices=1,
    request_bytes=1012,
    response_bytes=600,
    body=20481,
    trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
    span_id="00f067aa0ba902b7",
)
"""The head of a typical call."""


def peeks(size: str, body: bytes) -> Job:
    """Read the model's name and the number of wanted answers from a request."""
    ways: dict[str, Callable[[], Any]] = {
        "json.loads": partial(json.loads, body),
        "orjson.loads": partial(orjson.loads, body),
        "pydantic": partial(PydanticPeek.model_validate_json, body),
        "msgspec Struct": partial(peek, body),
    }
    return Job(f"model of a {size} request", ways)


def answers(body: bytes) -> Job:
    """Read id, model, usage and finish reason from an answer."""
    ways: dict[str, Callable[[], Any]] = {
        "json.loads": partial(json.loads, body),
        "orjson.loads": partial(orjson.loads, body),
        "pydantic": partial(PydanticAnswer.model_validate_json, body),
        "msgspec Struct": partial(msgspec.json.Decoder(StructAnswer).decode, body),
    }
    return Job("facts of a 600 B answer", ways)


def writes(rows: list[dict[str, Any]]) -> Job:
    """Write a page of a list, from plain values to JSON."""
    ways: dict[str, Callable[[], Any]] = {
        "json.dumps": lambda: json.dumps(rows).encode(),
        "orjson.dumps": partial(orjson.dumps, rows),
    }
    return Job("100 summaries, values to JSON", ways)


def summaries() -> list[Job]:
    """Write a span's summary to the tape and read it back. The hot path has the values at hand; a noun is built only to
    be shown."""
    names = codec.fields(Span, ("rollout", "attempt", "sequence"))
    defaults = codec.defaults(Span, names)
    values = codec.values(SPAN, names)
    text, record = SPAN.model_dump_json(exclude_defaults=True).encode(), codec.encode(values, defaults)
    fields = SPAN.model_dump(exclude_defaults=True)
    encode: dict[str, Callable[[], Any]] = {
        f"pydantic, build and dump_json ({len(text)} B)": lambda: Span(**fields).model_dump_json(exclude_defaults=True),
        f"pydantic, dump_json alone ({len(text)} B)": partial(SPAN.model_dump_json, exclude_defaults=True),
        f"msgpack array ({len(record)} B)": partial(codec.encode, values, defaults),
    }
    decode: dict[str, Callable[[], Any]] = {
        "pydantic, validate_json": partial(Span.model_validate_json, text),
        "msgpack array": partial(codec.decode, record),
    }
    return [Job("summary to bytes", encode), Job("summary from bytes", decode)]


def microseconds(way: Callable[[], Any]) -> float:
    """Return the best of five, each long enough to be timed."""
    timer = timeit.Timer(way)
    number, _ = timer.autorange()
    return min(timer.repeat(REPEATS, number)) / number * 1e6


def jobs() -> list[Job]:
    with tempfile.TemporaryDirectory() as folder:
        material = corpus.write(Path(folder))
        short, long = (corpus.first_body(material.prompts(name)) for name in ("chat_1k", "chat_100k"))
        answer = corpus.first_answer(material.folder / "chat")
    page = [SPAN.model_dump(mode="json", exclude_defaults=True)] * 100
    return [peeks("1 KB", short), peeks("100 KB", long), answers(answer), writes(page), *summaries()]


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(f"| {'job':26} | {'with':38} | {'us':>8} | {'x ours':>7} |")
    print(f"| {'-' * 26} | {'-' * 38} | {'-' * 7}: | {'-' * 6}: |")
    for job in jobs():
        times = {name: microseconds(way) for name, way in job.ways.items()}
        ours = list(times.values())[-1]
        for name, time in times.items():
            print(f"| {job.name:26} | {name:38} | {time:8.2f} | {time / ours:7.1f} |")


if __name__ == "__main__":
    main()
