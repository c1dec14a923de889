"""Token ids in a recorded answer, as inference engines return them when they are asked to. Pure; nothing here raises.

vLLM and SGLang answer `return_token_ids` on chat completions and completions: the prompt's ids stand in
`prompt_token_ids` of the response or of a choice, the generated ones in `token_ids` of a choice. In a stream the
prompt's come with the first chunk, and each chunk has the ids of its own piece, which need not have any text.
Log-probabilities stand in `logprobs.content[].logprob` (chat) or in `logprobs.token_logprobs` (completions).

Ids are kept as bytes of 32-bit integers: a long conversation has hundreds of thousands of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.gateway.dialects.loose_json import Json, arr, chunks, count, loads, obj, objs

IDS: Final = "return_token_ids"
LOGPROBS: Final = "logprobs"
"""The fields of a request that ask for them."""
WIDTH = array("i").itemsize


@dataclass(slots=True)
class Output:
    """What one choice generated."""

    ids: bytes = b""
    """Its token ids."""
    logprobs: int = 0
    """How many log-probabilities came with them."""


@dataclass(slots=True)
class Tokens:
    """What an engine said of an answer's tokens."""

    prompt: bytes = b""
    """Token ids of the prompt; empty when there are none."""
    outputs: dict[int, Output] = field(default_factory=dict[int, Output])
    """By choice."""
    readable: bool = True
    """False when the answer is not JSON."""

    @property
    def complete(self) -> bool:
        """True when the prompt and every choice have ids."""
        return bool(self.prompt and self.outputs) and all(output.ids for output in self.outputs.values())

    @property
    def generated(self) -> int:
        """How many tokens all choices have."""
        return sum(length(output.ids) for output in self.outputs.values())


def length(ids: bytes) -> int:
    """How many tokens."""
    return len(ids) // WIDTH


def common(a: bytes, b: bytes) -> int:
    """How many tokens two sequences begin with in common."""
    pairs = zip(memoryview(a).cast("i"), memoryview(b).cast("i"), strict=False)
    return next((at for at, (x, y) in enumerate(pairs) if x != y), min(length(a), length(b)))


def read_tokens(response: bytes, stream: bool) -> Tokens:
    """The tokens of a decoded response body, plain or streamed."""
    problems: list[str] = []
    pieces: Iterable[Json] = chunks(response, problems) if stream else filter(None, [obj(loads(response))])
    found, seen = Tokens(), False
    for piece in pieces:
        seen = True
        found.prompt = found.prompt or _ids(piece.get("prompt_token_ids"))
        for choice in objs(piece.get("choices")):
            _add(found, choice)
    found.readable = seen and not problems
    return found


def _add(found: Tokens, choice: Json) -> None:
    found.prompt = found.prompt or _ids(choice.get("prompt_token_ids"))
    output = found.outputs.setdefault(count(choice.get("index")) or 0, Output())
    output.ids += _ids(choice.get("token_ids"))
    logprobs = obj(choice.get("logprobs"))
    output.logprobs += sum(_is_number(entry.get("logprob")) for entry in objs(logprobs.get("content")))
    output.logprobs += sum(map(_is_number, arr(logprobs.get("token_logprobs"))))


def _ids(value: Any) -> bytes:
    """Ids as bytes; empty unless all of them are ids."""
    try:
        ids = array("i", arr(value))
    except (TypeError, OverflowError):
        return b""
    return ids.tobytes() if min(ids, default=0) >= 0 else b""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
