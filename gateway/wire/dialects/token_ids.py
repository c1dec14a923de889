"""Token ids in a recorded answer, which inference engines return on request. Pure; nothing here raises.

vLLM and SGLang answer `return_token_ids` on chat completions and completions: the prompt's ids stand in
`prompt_token_ids` of the response or of a choice, the generated ones in `token_ids` of a choice. In a stream the
prompt's come with the first chunk, and each chunk has the ids of its own piece, which may have no text.
Log-probabilities stand in `logprobs.content[].logprob` (chat) or in `logprobs.token_logprobs` (completions).

Ids are kept as bytes of 32-bit integers: a long conversation has hundreds of thousands of them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.gateway.wire.dialects.loose_json import Json, arr, chunks, count, loads, obj, objs
from penstock.gateway.wire.dialects.usage import quantity

IDS: Final = "return_token_ids"
LOGPROBS: Final = "logprobs"
"""The fields of a request that ask for token ids and log-probabilities."""
WIDTH = array("i").itemsize
HIGHEST: Final = 1e-6
"""The largest valid log-probability: 0, and the error of 32-bit arithmetic."""
UNKNOWN: Final = -9999.0
"""vLLM's value for a log-probability that is unknown or minus infinity."""
_COUNTS: Final = (("completion_tokens", "output_tokens"), ("prompt_tokens", "input_tokens"), ("total_tokens",))
"""The engines' names for their counts: of generated tokens, of the prompt, and of both."""


@dataclass(slots=True)
class ChoiceTokens:
    """The tokens that one choice generated."""

    ids: bytes = b""
    """Token ids, as 32-bit integers."""
    logprobs: int = 0
    """Number of log-probabilities that came with the ids."""
    invalid_logprobs: int = 0
    """Number of log-probabilities that are not valid: above 0, or not finite."""
    prompt_tokens: int = 0
    """Number of tokens of the choice's own prompt; 0 where the prompt's ids stand beside the choices, or nowhere."""
    missing_ids: bool = False
    """True if an event of the choice has content but no ids."""


@dataclass(slots=True)
class AnswerTokens:
    """The tokens of an answer, as its engine reports them."""

    prompt: bytes = b""
    """Token ids of the prompt; empty when there are none."""
    outputs: dict[int, ChoiceTokens] = field(default_factory=dict[int, ChoiceTokens])
    """Outputs by index of the choice."""
    usage: Any = None
    """The engine's own counts as received; in a stream the newest."""
    readable: bool = True
    """False if the answer is not JSON."""

    @property
    def complete(self) -> bool:
        """True if the prompt and every choice have ids."""
        return bool(self.prompt and self.outputs) and all(output.ids for output in self.outputs.values())

    @property
    def generated(self) -> int:
        """Number of tokens that all choices generated."""
        return sum(length(output.ids) for output in self.outputs.values())

    @property
    def prompt_lengths(self) -> list[int]:
        """Number of prompt tokens of each choice, by index."""
        return [one.prompt_tokens or length(self.prompt) for _, one in sorted(self.outputs.items())]

    @property
    def count_mismatch(self) -> str | None:
        """Why the ids do not cover all tokens that the engine counted; None where they do, or there are none."""
        if not self.generated:
            return None
        unspelt = any(one.ids and one.missing_ids for one in self.outputs.values())
        return count_mismatch(self.usage, self.prompt_lengths, self.generated, unspelt)


def length(ids: bytes) -> int:
    """The number of tokens whose ids are in these bytes."""
    return len(ids) // WIDTH


def common_prefix(a: bytes, b: bytes) -> int:
    """Number of tokens in the common beginning of two sequences."""
    pairs = zip(memoryview(a).cast("i"), memoryview(b).cast("i"), strict=False)
    return next((at for at, (x, y) in enumerate(pairs) if x != y), min(length(a), length(b)))


def count_mismatch(usage: Any, asked: Sequence[int], generated: int, unspelt: bool = False) -> str | None:
    """Why ids do not cover all tokens that the engine counted; None where they do, or nobody counted. `usage`: the
    engine's counts as received; `asked`: the number of prompt ids of each choice; `generated`: the number of generated
    ids of all choices; `unspelt`: some content has no ids while other content has."""
    made, read, total = (_counted(usage, *names) for names in _COUNTS)
    if made is not None and made != generated:
        return f"the engine counted {made:,} generated tokens and gave ids of {generated:,}"
    if read is not None and asked and read not in _prompts(asked):
        return f"the engine counted {read:,} tokens of the prompt and gave ids of {asked[0]:,}"
    if made is None and read is None and asked and total is not None and total - generated not in _prompts(asked):
        return f"the engine counted {total:,} tokens in all and gave ids of {sum(asked) + generated:,}"
    if made is None and total is None and unspelt:
        return "the engine counted no tokens, and gave no ids of some of what it said"
    return None


def _counted(usage: Any, *names: str) -> int | None:
    return next((known for name in names if (known := quantity(obj(usage).get(name))) is not None), None)


def has_content(choice: Json) -> bool:
    """True if a choice, or a piece of one, has content: text or tool calls."""
    said = obj(choice.get("delta")) or obj(choice.get("message"))
    return bool(choice.get("text")) or any(value for key, value in said.items() if key != "role")


def _prompts(asked: Sequence[int]) -> set[int]:
    """The possible numbers of tokens of all prompts together. Completions take several prompts; the n choices of each
    are consecutive, and a prompt is counted once."""
    alike = (n for n in range(1, len(asked) + 1) if len(asked) % n == 0)
    return {sum(asked[::n]) for n in alike if all(one == asked[at - at % n] for at, one in enumerate(asked))}


def read_tokens(response: bytes, stream: bool) -> AnswerTokens:
    """Read the tokens of a decoded response body, plain or streamed."""
    problems: list[str] = []
    pieces: Iterable[Json] = chunks(response, problems) if stream else filter(None, [obj(loads(response))])
    found = tokens_of(pieces)
    found.readable = found.readable and not problems
    return found


def tokens_of(pieces: Iterable[Json]) -> AnswerTokens:
    """Read the tokens of an answer's object, or of the events of a stream."""
    found = AnswerTokens(readable=False)
    for piece in pieces:
        found.readable = True
        found.prompt = found.prompt or _ids(piece.get("prompt_token_ids"))
        found.usage = piece.get("usage") or found.usage
        for at, choice in enumerate(objs(piece.get("choices"))):
            index = count(choice.get("index"))
            _add(found, choice, at if index is None else index)
    return found


def _add(found: AnswerTokens, choice: Json, index: int) -> None:
    output, own = found.outputs.setdefault(index, ChoiceTokens()), choice.get("prompt_token_ids")
    if own and not output.prompt_tokens:
        prompt = _ids(own)
        output.prompt_tokens, found.prompt = length(prompt), found.prompt or prompt
    output.ids += _ids(choice.get("token_ids"))
    output.missing_ids = output.missing_ids or (not choice.get("token_ids") and has_content(choice))
    logprobs = obj(choice.get("logprobs"))
    given: list[Any] = [entry.get("logprob") for entry in objs(logprobs.get("content"))]
    given += arr(logprobs.get("token_logprobs"))
    numbers = list(filter(_is_number, given))
    good = sum(map(is_logprob, numbers))
    output.logprobs += good
    output.invalid_logprobs += len(numbers) - good


def _ids(value: Any) -> bytes:
    """Ids as 32-bit integers; empty unless all values are ids."""
    try:
        ids = array("i", arr(value))
    except (TypeError, OverflowError):
        return b""
    return ids.tobytes() if min(ids, default=0) >= 0 else b""


def is_logprob(value: float) -> bool:
    """True if a number is a known log-probability."""
    return UNKNOWN < value <= HIGHEST and math.isfinite(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
