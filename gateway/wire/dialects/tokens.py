"""The tokens of an answer: how many there were, wherever its provider puts that, and the other facts that its price
needs; their ids and log-probabilities, which inference engines return on request; an estimate where nobody counted.
Pure; nothing here raises.

A span's summary and its turn read usage by the same function of the same values, so that they cannot disagree: a stream
is brought into the shape of a plain answer first (`latest_usage_fields`). Counts are numbers, also with a point or as
strings.

The other facts for a price are `Usage.billed`, which most answers do not have:

    tier          the service tier that served it, where that is not the usual one
    speed, geo    what multiplies the price: `fast`, `us`
    cost          what the provider itself says it costs, in US dollars
    cache_write_long                                   of the tokens written to a cache, those that are kept longer
    input_audio, input_image, output_audio, output_image, cached_audio, cached_image       of tokens, those of media
    seconds, characters, images                        of calls with media: heard or made, spoken, made
    calls         how often a tool of the provider's ran, by its name
    parts         (model, input, output, cached, cache write, long cache write) of what ran within the call
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final, NamedTuple, Protocol, cast

import msgspec

from penstock.gateway.model.span import UNITS, Estimate, Usage
from penstock.gateway.wire.dialects.base import STRING, Dialect
from penstock.gateway.wire.dialects.loose_json import MOST_TOKENS, Json, arr, count, label, loads, obj, objs, text
from penstock.gateway.wire.dialects.sse import chunks

_NUMBER = re.compile(r"\d{1,16}(?:\.\d*)?")
_USUAL: Final = frozenset(
    {"", "default", "standard", "auto", "scale", "on_demand", "provisioned_throughput", "reserved", "unspecified"}
)
"""Tiers at the usual price, or without a price for each call."""
_TIERS: Final = {"batches": "batch", "fast": "priority"}
"""Tiers that have another name in lists of prices."""
_NOWHERE: Final = frozenset({"global", "not_available"})
_MEDIA: Final = ("audio", "image")
_MEDIA_TOKENS: Final = {"audio_tokens": "audio", "image_tokens": "image"}
_DETAILS: Final = frozenset(
    {
        "prompt_tokens_details", "input_tokens_details", "input_token_details", "completion_tokens_details",
        "output_tokens_details", "output_token_details",
    }
)  # fmt: skip
_MEDIA_DETAILS: Final = frozenset({*_MEDIA_TOKENS, "cached_tokens_details"})
_WRITES: Final = frozenset(
    {
        "cache_write_tokens_details", "cache_creation_token_details", "cache_creation", "cache_write_tokens",
        "cache_creation_tokens", "cache_creation_input_tokens",
    }
)  # fmt: skip
_COSTS: Final = frozenset({"cost", "cost_details", "estimated_cost", "cost_in_usd_ticks"})
_TOOLS: Final = frozenset({"server_tool_use", "server_side_tool_usage_details", "tool_usage", "num_sources_used"})
"""Fields that most answers lack: looked for first, so that most answers cost nothing more."""
_APART: Final = ("compaction", "advisor_message")
"""Types of iterations of a message whose tokens are not in its own counts."""
_MOST_PARTS, _MOST_TOOLS = 64, 16
_TICKS: Final = 1e10
"""xAI's units of cost in a dollar."""


def quantity(value: Any) -> int | None:
    """A count as servers write it: 100, 100.0 or "100"; None for any other value."""
    if type(value) is int:
        return value if 0 <= value < MOST_TOKENS else None
    if isinstance(value, str):
        value = float(value) if _NUMBER.fullmatch(value) else None
    if isinstance(value, float):
        return math.ceil(value) if 0 <= value < MOST_TOKENS else None
    return None


def _quantities(fields: Json) -> dict[str, int]:
    """The members of an object that are counts."""
    found: dict[str, int] = {}
    for name, value in fields.items():
        if value.__class__ is int:
            if 0 <= value < MOST_TOKENS:
                found[name] = value
        elif value.__class__ is not dict and (count := quantity(value)) is not None:
            found[name] = count
    return found


def _money(value: Any) -> float | None:
    if isinstance(value, str):
        value = float(value) if _NUMBER.fullmatch(value) else None
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and 0 <= value < MOST_TOKENS else None


def _first(*values: Any) -> int | None:
    for value in values:
        if value is not None and (it := quantity(value)) is not None:
            return it
    return None


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


# -- the place of usage in answers -------------------------------------------------------------------------------------


def usage_fields(answer: Json) -> Json:
    """The fields about usage of an answer, or of an event of it, at their place in OpenAI's plain answers."""
    found: Json = {}
    usage = answer.get("usage")
    if not usage or not isinstance(usage, dict):
        choices = (obj(choice.get("usage")) for choice in reversed(objs(answer.get("choices"))))
        usage = obj(obj(answer.get("x_groq")).get("usage")) or next(filter(None, choices), None)
    if usage:
        found["usage"] = usage
    tier = answer.get("service_tier")
    if tier and label(tier):
        found["service_tier"] = tier
    return found


def latest_usage_fields(events: Iterable[Json]) -> Json:
    """The fields about usage of a stream, oldest event first: counts are cumulative, so that the last ones count."""
    found: Json = {}
    for event in events:
        found |= usage_fields(event)
    return found


def decoded_fields(answer: msgspec.Struct) -> Json:
    """The fields that were decoded of an answer for its summary, as a JSON object."""
    listed = msgspec.structs.asdict
    told: Json = listed(answer)
    for name in ("choices", "output"):
        if told.get(name) and (name == "output" or not isinstance(told["usage"], dict)):
            told[name] = [listed(it) for it in told[name]]
    return told


# -- OpenAI's, and those that speak like it ----------------------------------------------------------------------------


def openai_usage(answer: Json) -> Usage | None:
    """Usage of chat, completions and responses, under the names of any of them."""
    given, tier = answer.get("usage"), answer.get("service_tier")
    fields = cast("Json", given) if isinstance(given, dict) else Json()
    if not fields and not (fields := obj(usage_fields(answer).get("usage"))):
        return None
    read, made = Json(), Json()
    if not _DETAILS.isdisjoint(fields):
        read = obj(_some(fields, "prompt_tokens_details", "input_tokens_details", "input_token_details"))
        made = obj(_some(fields, "completion_tokens_details", "output_tokens_details", "output_token_details"))
    counts, of_read, of_made = _quantities(fields), _quantities(read) if read else {}, _quantities(made) if made else {}
    hit, miss = counts.get("prompt_cache_hit_tokens"), counts.get("prompt_cache_miss_tokens")
    asked = counts.get("prompt_tokens", counts.get("input_tokens"))
    if asked is None:
        asked = _total((hit, miss))
    said = counts.get("completion_tokens", counts.get("output_tokens"))
    cached = of_read.get("cached_tokens", counts.get("cached_tokens", hit))
    if cached is None:
        cached = counts.get("cache_read_input_tokens")
    reasoning = of_made.get("reasoning_tokens", counts.get("reasoning_tokens", of_made.get("thinking_tokens")))
    write = long = None
    if not (_WRITES.isdisjoint(fields) and _WRITES.isdisjoint(read)):
        write, long = _written(fields, read)
    total = counts.get("total_tokens")
    if reasoning:
        said = _with_beside(said, reasoning, total, asked)
    if cached or write:
        asked = _with_beside(asked, (cached or 0) + (write or 0), total, said)
    billed: Json = {"cache_write_long": long} if long else {}
    if not (_MEDIA_DETAILS.isdisjoint(read) and _MEDIA_DETAILS.isdisjoint(made)):
        billed |= _media("input", read) | _media("output", made) | _media("cached", read.get("cached_tokens_details"))
    if tier := (label(tier) if tier else None) or fields.get("service_tier"):
        billed["tier"] = _tier(tier)
    if not _COSTS.isdisjoint(fields):
        billed["cost"] = _own_cost(fields)
    if answer.get("output") or answer.get("tool_usage") or not _TOOLS.isdisjoint(fields):
        billed["calls"] = _calls(answer, fields)
    return _usage((asked, said, cached, write), reasoning, billed)


def embeddings_usage(answer: Json) -> Usage | None:
    """Usage of embeddings: some servers give only a total, which is the prompt."""
    usage = openai_usage(answer)
    if usage is None or usage.input_tokens is not None:
        return usage
    return usage.model_copy(update={"input_tokens": quantity(obj(answer.get("usage")).get("total_tokens"))})


def number(value: Any) -> float | None:
    """A number from 0 on, also as a string; None for any other value."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    return _money(value)


def _some(fields: Json, *names: str) -> Any:
    for name in names:
        if value := fields.get(name):
            return value
    return None


def _media(of: str, details: Any) -> Json:
    if not isinstance(details, dict):
        return {}
    known = cast("Json", details)
    return {f"{of}_{kind}": quantity(known[name]) for name, kind in _MEDIA_TOKENS.items() if known.get(name)}


def _written(fields: Json, read: Json) -> tuple[int | None, int | None]:
    """(tokens written to a cache, those of them that are kept longer)."""
    by_time = obj(read.get("cache_write_tokens_details")) or obj(fields.get("cache_write_tokens_details"))
    by_time = by_time or obj(read.get("cache_creation_token_details")) or obj(fields.get("cache_creation"))
    short = _first(by_time.get("ttl_30m_tokens"), by_time.get("ephemeral_5m_input_tokens"))
    long = _first(by_time.get("ttl_12h_tokens"), by_time.get("ephemeral_1h_input_tokens"))
    whole = _first(
        read.get("cache_write_tokens"), read.get("cache_creation_tokens"), fields.get("cache_creation_input_tokens"),
        fields.get("cache_write_tokens"),
    )  # fmt: skip
    return (_total((short, long)) if whole is None else max(whole, long or 0)), long


def _with_beside(known: int | None, part: int, total: int | None, other: int | None) -> int | None:
    """A count with a part that some servers do not include in it: the total tells, and so does a part that is
    larger."""
    if known is None or not part:
        return known
    beside = total == known + part + (other or 0) if total is not None else False
    return known + part if beside or part > known else known


def _tier(value: Any) -> str | None:
    name = (label(value) or "").lower().removeprefix("service_tier_").removeprefix("on_demand_")
    return None if name in _USUAL else _TIERS.get(name, name)


def _own_cost(fields: Json) -> float | None:
    """The cost that the provider reports: OpenRouter and others a number, Perplexity an object, DeepInfra an estimate,
    xAI ticks. With a customer's own key, the cost at OpenRouter's provider is added, since it is billed there. None if
    none is reported."""
    said = fields.get("cost")
    cost = _money(obj(said).get("total_cost") if isinstance(said, dict) else said)
    upstream = _money(obj(fields.get("cost_details")).get("upstream_inference_cost"))
    ticks = _money(fields.get("cost_in_usd_ticks"))
    if cost is None:
        other = _money(fields.get("estimated_cost")) if ticks is None else ticks / _TICKS
        return upstream if other is None else other
    return cost + (upstream or 0.0) if fields.get("is_byok") is True else cost


def _calls(answer: Json, fields: Json) -> dict[str, int]:
    """Number of runs of each of the provider's tools: as the provider counts them, or by the items of an answer."""
    counted = {key: quantity(value) for key, value in obj(fields.get("server_tool_use")).items()}
    counted |= {key: quantity(value) for key, value in obj(fields.get("server_side_tool_usage_details")).items()}
    # xAI's live search is billed by the source.
    counted["live_search"] = quantity(fields.get("num_sources_used"))
    used = obj(answer.get("tool_usage")) or obj(fields.get("tool_usage"))
    counted |= {key: quantity(obj(value).get("num_requests")) for key, value in used.items()}
    found = {
        name.removesuffix("_requests").removesuffix("_calls"): times
        for name, times in list(counted.items())[:_MOST_TOOLS]
        if times and label(name)
    }
    # Opening a page that a search has found costs nothing.
    kinds = [(it.get("type"), obj(it.get("action")).get("type")) for it in objs(answer.get("output"))]
    searches = sum(kind == "web_search_call" and did in (None, "search") for kind, did in kinds)
    files = sum(kind == "file_search_call" for kind, _ in kinds)
    return {name: times for name, times in (("web_search", searches), ("file_search", files)) if times} | found


def _usage(counts: tuple[int | None, ...], reasoning: int | None, billed: Json) -> Usage:
    asked, said, cached, write = counts
    # A reported cost of 0 is kept.
    kept = {name: it for name, it in billed.items() if it or (name == "cost" and it is not None)} if billed else None
    return Usage(
        input_tokens=asked,
        output_tokens=said,
        cached_tokens=cached,
        cache_write_tokens=write,
        reasoning_tokens=reasoning,
        billed=kept or None,
    )


# -- Anthropic's -------------------------------------------------------------------------------------------------------

Counts = list[int | None]
"""In this order: input with cached and written tokens, output, cached, written, written for longer."""


def messages_usage(answer: Json) -> Usage | None:
    """Usage of messages. Input tokens leave out cached ones, and the counts leave out iterations that summarised the
    conversation (compaction) or gave advice within the call: both are added."""
    fields = obj(answer.get("usage"))
    if not fields:
        return None
    if quantity(fields.get("input_tokens")) is None and "prompt_tokens" in fields:
        return openai_usage(answer)
    counts, parts = _iterated(_message_counts(fields), objs(fields.get("iterations")))
    reasoning = quantity(obj(fields.get("output_tokens_details")).get("thinking_tokens"))
    geo, speed = (label(fields.get("inference_geo")) or "").lower(), label(fields.get("speed"))
    billed: Json = {"tier": _tier(fields.get("service_tier")), "speed": None if speed == "standard" else speed}
    billed |= {"geo": None if geo in _NOWHERE else geo, "cost": _own_cost(fields), "cache_write_long": counts[4]}
    billed |= {"calls": _calls({}, fields), "parts": parts}
    return _usage(tuple(counts[:4]), reasoning, billed)


def _message_counts(fields: Json) -> Counts:
    fresh, said = quantity(fields.get("input_tokens")), quantity(fields.get("output_tokens"))
    cached = quantity(fields.get("cache_read_input_tokens"))
    write, long = _written(fields, {})
    return [None if fresh is None else fresh + (cached or 0) + (write or 0), said, cached, write, long]


def _iterated(counts: Counts, iterations: list[Json]) -> tuple[Counts, list[list[Any]]]:
    """(the counts of all iterations, the parts of them that have a price of their own). Prices with a threshold apply
    to each part by itself."""
    if not iterations:
        return counts, []
    parts: list[list[Any]] = [[label(it.get("model")), *_message_counts(it)] for it in iterations]
    apart = [part[1:] for part, it in zip(parts, iterations, strict=True) if it.get("type") in _APART]
    within = [part[1:] for part, it in zip(parts, iterations, strict=True) if it.get("type") not in _APART]
    sums = [_total(part[at] for part in within) for at in range(5)]
    own = [max((it for it in pair if it is not None), default=None) for pair in zip(counts, sums, strict=True)]
    whole = [_total((own[at], *(part[at] for part in apart))) for at in range(5)]
    if len(parts) == 1 and not apart and parts[0][0] is None:
        return whole, []
    if len(parts) > _MOST_PARTS:
        rest = parts[_MOST_PARTS - 1 :]
        parts[_MOST_PARTS - 1 :] = [[None, *(_total(part[at] for part in rest) for at in range(1, 6))]]
    return whole, parts


# -- Google's and Amazon's ---------------------------------------------------------------------------------------------


def gemini_usage(answer: Json) -> Usage | None:
    """Usage of generateContent: thoughts are output, results of Google's own tools are input."""
    fields = obj(answer.get("usageMetadata"))
    if not fields:
        return None
    asked, said, thought, results, cached = (
        quantity(fields.get(name))
        for name in (
            "promptTokenCount", "candidatesTokenCount", "thoughtsTokenCount", "toolUsePromptTokenCount",
            "cachedContentTokenCount",
        )
    )  # fmt: skip
    billed: Json = {"tier": _tier(fields.get("serviceTier")) or _tier(fields.get("trafficType"))}
    billed |= _modalities("input", fields.get("promptTokensDetails"))
    billed |= _modalities("output", fields.get("candidatesTokensDetails"))
    billed |= _modalities("cached", fields.get("cacheTokensDetails"))
    billed["calls"] = _grounded(objs(answer.get("candidates")))
    return _usage((None if asked is None else asked + (results or 0), _total((said, thought)), cached, None),
                  thought, billed)  # fmt: skip


def _modalities(of: str, details: Any) -> Json:
    found = {(label(it.get("modality")) or "").lower(): quantity(it.get("tokenCount")) for it in objs(details)}
    return {f"{of}_{kind}": found[kind] for kind in _MEDIA if kind in found}


def _grounded(candidates: list[Json]) -> dict[str, int]:
    """Billed searches: older models are billed for each answer that searched, newer ones for each search."""
    queries = [it for one in candidates for it in _queries(one)]
    return {"grounding": 1, "web_search": len(queries)} if queries else {}


def _queries(candidate: Json) -> list[Any]:
    return [it for it in arr(obj(candidate.get("groundingMetadata")).get("webSearchQueries")) if it]


def converse_usage(answer: Json) -> Usage | None:
    """Usage of Converse: input tokens leave out cached ones, which are added."""
    fields = obj(answer.get("usage"))
    if not fields:
        return None
    fresh, said = quantity(fields.get("inputTokens")), quantity(fields.get("outputTokens"))
    cached = _first(fields.get("cacheReadInputTokens"), fields.get("cacheReadInputTokenCount"))
    kept = {label(it.get("ttl")): quantity(it.get("inputTokens")) for it in objs(fields.get("cacheDetails"))}
    write = _first(fields.get("cacheWriteInputTokens"), fields.get("cacheWriteInputTokenCount"), _total(kept.values()))
    asked = None if fresh is None else fresh + (cached or 0) + (write or 0)
    billed: Json = {"tier": _tier(obj(answer.get("serviceTier")).get("type")), "cache_write_long": kept.get("1h")}
    return _usage((asked, said, cached, write), None, billed)


def with_tier(usage: Usage | None, tier: str | None) -> Usage | None:
    """Usage with the tier that a header of the answer names."""
    if usage is None or tier is None or (name := _tier(tier)) is None:
        return usage
    return usage.model_copy(update={"billed": {**(usage.billed or {}), "tier": name}})


# -- ids ---------------------------------------------------------------------------------------------------------------

# vLLM and SGLang answer `return_token_ids` on chat completions and completions: the prompt's ids stand in
# `prompt_token_ids` of the response or of a choice, the generated ones in `token_ids` of a choice. In a stream the
# prompt's come with the first chunk, and each chunk has the ids of its own piece, which may have no text.
# Log-probabilities stand in `logprobs.content[].logprob` (chat) or in `logprobs.token_logprobs` (completions).
#
# Ids are kept as bytes of 32-bit integers: a long conversation has hundreds of thousands of them.

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


# -- tokens one by one, each with its text and log-probability ---------------------------------------------------------

# Chat completions give `logprobs.content` with an entry for each token, completions parallel lists (`tokens`,
# `token_logprobs`). vLLM gives `token_ids` besides, in the same order.


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
        yield text(entry.get("token")), _number(entry.get("logprob"))
    for said, value in zip_longest(arr(logprobs.get("tokens")), arr(logprobs.get("token_logprobs"))):
        yield text(said), _number(value)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


# -- tokens that a provider did not count ------------------------------------------------------------------------------

# Most streams have no usage unless their client asks for it. Token ids, which engines give for models in training, are
# counted: usage like any other. Else there is an estimate, a token for every four bytes of text. It is kept apart from
# usage, enters no sum, and is not trained on. Tokens that nobody counted stay unknown; they are never 0.

BYTES: Final = 4
"""Bytes of text per token, about: of English, of code, of JSON, and of scripts with three bytes a letter."""
SAMPLE: Final = 8 << 10
"""Bytes at the start of an answer whose texts are measured; the rest is assumed to be alike."""
TOKEN_IDS: Final = b'"prompt_token_ids"'
_MEDIA_MARKS: Final = (b";base64,", b'"bytes"', b'"audio"', b'"realtimeInput"', b'"realtime_input"')
"""Marks of a request with images, sound or files, whose texts alone are measured. In any other the whole body counts:
its names and braces make up for what the chat template adds."""
_ASKED = re.compile(rb'"(?:content|text|input|output|instructions|system|prompt|arguments|description)' + STRING)
"""Matches the texts in requests; images and other data are left out."""


def usage_from_token_ids(usage: Usage | None, response: bytes, stream: bool, whole: bool) -> Usage | None:
    """Usage with counts from the token ids of an answer where it has none. `whole`: the answer is complete."""
    if TOKEN_IDS not in response or not lacks_counts(usage):
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
    counted = usage is not None and usage.billed is not None and not UNITS.keys().isdisjoint(usage.billed)
    lacks = not (dialect.media and counted) and lacks_counts(usage, dialect.generates)
    return used and call.kind == "llm" and dialect.uses_tokens and lacks


def lacks_counts(usage: Usage | None, output: bool = True) -> bool:
    """True if a count is missing. `output`: the call generates tokens."""
    return usage is None or usage.input_tokens is None or (output and usage.output_tokens is None)


def estimate_usage(
    usage: Usage | None, request: bytes, response: bytes, texts: re.Pattern[bytes], left_out: int = 0
) -> Estimate:
    """An estimate of the counts that usage lacks. `texts` matches the answer's; `left_out`: bytes of those left out."""
    asked, said = len(request), 0
    if any(map(request.__contains__, _MEDIA_MARKS)):
        asked = sum(map(len, _ASKED.findall(request)))
    if response:
        seen = min(len(response), SAMPLE)
        said = sum(map(len, texts.findall(response, 0, seen))) * len(response) // seen + left_out
    return Estimate(
        input_tokens=-(-asked // BYTES) if usage is None or usage.input_tokens is None else None,
        output_tokens=-(-said // BYTES) if usage is None or usage.output_tokens is None else None,
    )
