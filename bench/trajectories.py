"""Real agent trajectories (`../shared/data`, where it exists) as the calls that the agents must have made."""

from __future__ import annotations

import gzip
import json
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

DATA = Path(__file__).parents[2] / "shared" / "data" / "tau-airline-gpt4o.jsonl.gz"
CREATED = 1_763_700_000

Agent: TypeAlias = list[tuple[bytes, Any]]
"""The calls of one agent in order: request body, message of the answer."""


def agents(path: Path = DATA) -> list[Agent]:
    with gzip.open(path) as lines:
        return [list(calls_of(json.loads(line)["messages"])) for line in lines]


def calls_of(messages: list[Any]) -> Iterator[tuple[bytes, Any]]:
    """Yield one call for every message of the assistant: all messages before it are the request."""
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            asked = {"messages": messages[:place], "model": "gpt-4o"}
            yield json.dumps(asked, separators=(",", ":"), ensure_ascii=False).encode(), message


def response_id(rng: random.Random) -> str:
    """Return a random id in OpenAI's form."""
    return "chatcmpl-" + "".join(rng.choices(string.ascii_letters + string.digits, k=29))


def wire_answer(request: bytes, message: Any, name: str, rng: random.Random) -> bytes:
    """Return the body of a provider's answer."""
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    asked, said = len(request) // 4, rng.randrange(20, 400)
    answer = {
        "id": name,
        "object": "chat.completion",
        "created": CREATED + rng.randrange(10**6),
        "model": "gpt-4o-2024-08-06",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish}],
        "usage": {
            "prompt_tokens": asked,
            "completion_tokens": said,
            "total_tokens": asked + said,
            "prompt_tokens_details": {"cached_tokens": asked // 128 * 128, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
        },
        "service_tier": "default",
        "system_fingerprint": "fp_4691090a87",
    }
    return json.dumps(answer, ensure_ascii=False).encode()
