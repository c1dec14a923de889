"""Token ids in a recorded answer, which inference engines return on request. Pure; nothing here raises.

vLLM and SGLang answer `return_token_ids` on chat completions and completions: the prompt's ids stand in
`prompt_token_ids` of the response or of a choice, the generated ones in `token_ids` of a choice. In a stream the
prompt's come with the first chunk, and each chunk has the ids of its own piece, which may have no text.
Log-probabilities stand in `logprobs.content[].logprob` (chat) or in `logprobs.token_logprobs` (completions).

Ids are kept as bytes of 32-bit integers: a long conversation has hundreds of thousands of them.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final, NamedTuple, Protocol

from penstock.gateway.model.span import Estimate, Usage
from penstock.gateway.wire.dialects.base import STRING, Dialect
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


# The tokens of an answer one by one, each with its text and log-probability, as far as the engine gave them. Pure.
#
# Chat completions give `logprobs.content` with an entry for each token, completions parallel lists (`tokens`,
# `token_logprobs`). vLLM gives `token_ids` besides, in the same order. `token_ids` reads the ids alone, for training.


class TokenLogprob(NamedTuple):
    """One generated token, as far as the engine described it."""

    text: str | None
    """Text; None when only the id is known."""
    id: int | None
    """Id in the engine's vocabulary; None when the engine did not give it."""
    logprob: float | None
    """Natural logarithm of the probability; None when the engine did not give it."""


def read_logprobs(response: bytes, stream: bool, choice: int = 0) -> list[TokenLogprob]:
    """The tokens of one choice of a decoded response body, plain or streamed; empty where the engine gave none."""
    pieces: Iterable[Json] = chunks(response, []) if stream else filter(None, [obj(loads(response))])
    choices = (one for piece in pieces for one in objs(piece.get("choices")))
    return [token for one in choices if (count(one.get("index")) or 0) == choice for token in _tokens(one)]


def _tokens(choice: Json) -> Iterator[TokenLogprob]:
    ids = (id if isinstance(id, int) else None for id in arr(choice.get("token_ids")))
    for id, said in zip_longest(ids, _said(obj(choice.get("logprobs")))):
        text, logprob = said or (None, None)
        yield TokenLogprob(text, id, logprob)


def _said(logprobs: Json) -> Iterator[tuple[str | None, float | None]]:
    """Texts and log-probabilities, in either of the two shapes."""
    for entry in objs(logprobs.get("content")):
        yield _text(entry.get("token")), _number(entry.get("logprob"))
    for text, value in zip_longest(arr(logprobs.get("tokens")), arr(logprobs.get("token_logprobs"))):
        yield _text(text), _number(value)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


# Tokens that a provider did not count: most streams have no usage unless their client asks for it. Pure.
#
# Where the engine gave token ids, which are requested for models in training, they are counted: this is exact, and
# usage like any other. Else there is an estimate, a token for every four bytes of text. The estimate is kept apart
# from usage, enters no sum, and is not used in training. Tokens that nobody counted stay unknown; they are never 0.

BYTES: Final = 4
"""Bytes of text per token, about: of English, of code, of JSON, and of scripts with three bytes a letter."""
SAMPLE: Final = 8 << 10
"""Bytes at the start of an answer whose texts are measured; the rest is assumed to be alike."""
_MEDIA: Final = (b";base64,", b'"bytes"')
"""Marks of a request with images or files, whose texts alone are measured. In any other the whole body counts: its
names and braces make up for what the chat template adds."""
_ASKED = re.compile(rb'"(?:content|text|input|output|instructions|system|prompt|arguments|description)' + STRING)
"""Matches the texts in requests; images and other data are left out."""


def usage_from_token_ids(usage: Usage | None, response: bytes, stream: bool, whole: bool) -> Usage | None:
    """Usage with counts from the token ids of an answer where it has none. `whole`: the answer is complete."""
    if b'"prompt_token_ids"' not in response or not lacks_counts(usage):
        return usage
    tokens = read_tokens(response, stream)
    if not (tokens.complete if whole else tokens.prompt):
        return usage
    known = usage or Usage()
    asked = length(tokens.prompt) if known.input_tokens is None else known.input_tokens
    made = tokens.generated if whole and known.output_tokens is None else known.output_tokens
    return known.model_copy(update={"input_tokens": asked, "output_tokens": made})


class CountableCall(Protocol):
    """The fields of a span, or of a call that becomes one, that tell its use of tokens."""

    @property
    def kind(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def upstream(self) -> str | None: ...
    @property
    def http_status(self) -> int | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def usage(self) -> Usage | None: ...


def lacks_token_counts(call: CountableCall, dialect: Dialect) -> bool:
    """True if a call has used tokens, or may have, and nobody counted them. A refused call has used none."""
    usage = call.usage
    if usage is not None and usage.input_tokens is not None and usage.output_tokens is not None:
        return False
    refused = (call.http_status or 0) >= 400 or call.error == "error_body"
    used = call.upstream is not None and call.status != "open" and not refused
    return used and call.kind == "llm" and dialect.uses_tokens and lacks_counts(usage, dialect.generates)


def lacks_counts(usage: Usage | None, output: bool = True) -> bool:
    """True if a count is missing. `output`: the call generates tokens."""
    return usage is None or usage.input_tokens is None or (output and usage.output_tokens is None)


def estimate_usage(usage: Usage | None, request: bytes, response: bytes, texts: re.Pattern[bytes]) -> Estimate:
    """An estimate of the counts that are missing in usage. `texts` matches the texts of the answer."""
    asked, said = len(request), 0
    if _MEDIA[0] in request or _MEDIA[1] in request:
        asked = sum(map(len, _ASKED.findall(request)))
    if response:
        seen = min(len(response), SAMPLE)
        said = sum(map(len, texts.findall(response, 0, seen))) * len(response) // seen
    return Estimate(
        input_tokens=-(-asked // BYTES) if usage is None or usage.input_tokens is None else None,
        output_tokens=-(-said // BYTES) if usage is None or usage.output_tokens is None else None,
    )
