"""The cost of calls by a list of prices: a file with dates, so that a call has the price of its time.

`prices.toml` beside this module is used where no other list is configured. One function (`Prices.cost`) computes the
cost of a call, for sums, SQL and budgets alike. A cost that the provider reports in the answer counts first.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from functools import cached_property, lru_cache
from itertools import islice
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, NamedTuple

from pydantic import Field, model_validator

from penstock.gateway.model.rollout import Totals
from penstock.gateway.model.span import UNITS, Span, SpanStatus, Usage
from penstock.gateway.model.toml import Section, read, validated

BUILTIN: Final = Path(__file__).with_name("prices.toml")
STALE_DAYS: Final = 60
"""Age in days from which a list may be wrong: models and prices change every month."""
_REMEMBERED: Final = 10_000
_SAID: Final = 1_000
_CALL: Final = "call"
"""The entry among tools for the cost of every call besides its tokens."""

_AS: Final = {
    "input": "", "output": "", "cached": "input", "cache_write": "input", "cache_write_long": "cache_write",
    "reasoning": "output", "input_audio": "input", "input_image": "input", "cached_audio": "cached",
    "cached_image": "cached", "output_audio": "output", "output_image": "output",
}  # fmt: skip
"""Kinds of tokens, each with the kind whose price it has where it has none of its own."""
_MARKS: Final = {
    "tier": (b"service_tier", b"serviceTier", b'"speed"', b"inference_geo"),
    "long": (b'"ttl"', b"_retention"),
    "audio": (b"audio", b"AUDIO"),
}
"""Marks in a request that may be billed by more than text at the usual tier."""
_NO_UNITS: Final[Mapping[str, float]] = MappingProxyType({})
_BY: Final = b"3"
"""The version of the computation: a new number makes indexes anew."""
_AS_OF = re.compile(r"as_of *= *(\d{4}-\d\d-\d\d)")
_log = logging.getLogger("penstock.prices")


class Rates(Section):
    """Prices of a million tokens by kind; None: the price of another kind holds, as each field says."""

    input: float | None = Field(default=None, ge=0)
    """Prompt tokens that are read anew."""
    output: float | None = Field(default=None, ge=0)
    """Generated tokens."""
    cached: float | None = Field(default=None, ge=0)
    """Prompt tokens that are read from the provider's cache; None: like `input`."""
    cache_write: float | None = Field(default=None, ge=0)
    """Prompt tokens that are written to it; None: like `input`."""
    cache_write_long: float | None = Field(default=None, ge=0)
    """Those of them that are kept longer: 1 hour at Anthropic, 12 hours at OpenAI; None: like `cache_write`."""
    reasoning: float | None = Field(default=None, ge=0)
    """Generated tokens that are reasoning; None: like `output`."""
    input_audio: float | None = Field(default=None, ge=0)
    """Audio in the prompt; None: like `input`."""
    input_image: float | None = Field(default=None, ge=0)
    """Images in the prompt; None: like `input`."""
    cached_audio: float | None = Field(default=None, ge=0)
    """Audio from the cache; None: like `cached`."""
    cached_image: float | None = Field(default=None, ge=0)
    """Images from the cache; None: like `cached`."""
    output_audio: float | None = Field(default=None, ge=0)
    """Generated audio; None: like `output`."""
    output_image: float | None = Field(default=None, ge=0)
    """Generated images; None: like `output`."""


class SpecialRates(Rates):
    """Rates in place of a price's own."""

    tier: str | None = Field(default=None, min_length=1, max_length=32)
    """Of calls that this tier served: batch, flex, priority ..."""
    above: int | None = Field(default=None, ge=0)
    """Of calls whose prompt has more tokens than this: all tokens of such a call cost so."""


class Price(Rates):
    """The prices of a model from a day on; those of tokens are for a million."""

    known_by: ClassVar[str] = "model"

    model: str = Field(min_length=1, max_length=256)
    """A name, or a pattern with `*` and `?`, whatever its case."""
    since: date | None = None
    """The first day, in UTC; None: ever."""
    source: str | None = Field(default=None, max_length=512)
    """Where the price is from. A row of one's own has none, and no update changes it."""
    rates: list[SpecialRates] = Field(default_factory=list[SpecialRates])
    """What tiers and long prompts cost."""
    tools: dict[str, float] = Field(default_factory=dict[str, float])
    """What a thousand runs of the provider's tools cost; `call`: what a thousand calls cost besides."""
    units: dict[Literal["second", "character", "image"], float] = Field(
        default_factory=dict[Literal["second", "character", "image"], float]
    )
    """What a second of sound or video, a spoken character, or an image costs, of calls whose answer has no tokens."""
    factors: dict[str, float] = Field(default_factory=dict[str, float])
    """What tokens cost more by the place (`us`) and the speed (`fast`) that served a call: the two multiply."""

    @model_validator(mode="after")
    def _whole(self) -> Price:
        missing = next((name for name in ("input", "output") if getattr(self, name) is None), None)
        if missing:
            raise ValueError(f"{self.model!r} has no price for {missing}: give it, 0 where it costs nothing")
        given: list[tuple[str, float]] = [*self.tools.items(), *self.factors.items(), *self.units.items()]
        wrong = next((name for name, it in given if not 0 <= it < 1e6), None)
        if wrong:
            raise ValueError(f"{self.model!r} has a price or factor for {wrong!r} that is below 0 or above a million")
        return self

    def unit_cost(self, units: Mapping[str, float]) -> float | None:
        """The cost of a call that has no tokens; None if there is no price of its units."""
        known = [self.units[it] * units[name] for name, it in UNITS.items() if name in units and it in self.units]
        return sum(known) + self._run(None) if known else None

    def cost(self, tokens: TokenCounts) -> float:
        """The cost of these tokens and tools, without the parts of the call that have another price."""
        billed: Mapping[str, Any] = tokens.billed or {}
        asked, said = tokens.input or 0, tokens.output or 0
        rates = self._rates(billed.get("tier"), asked)
        read, written = tokens.cached or 0, tokens.cache_write or 0
        long = min(written, billed.get("cache_write_long", 0))
        heard, seen = (min(read, billed.get(f"cached_{kind}", 0)) for kind in ("audio", "image"))
        media = (("audio", heard), ("image", seen))
        audio, image = (max(0, billed.get(f"input_{kind}", 0) - held) for kind, held in media)
        fresh = max(0, asked - read - written)
        audio = min(audio, fresh)
        image = min(image, fresh - audio)
        spoken = min(billed.get("output_audio", 0), said)
        drawn = min(billed.get("output_image", 0), said - spoken)
        thought = min(tokens.reasoning or 0, said - spoken - drawn)
        millions = (
            (fresh - audio - image) * rates["input"] + audio * rates["input_audio"] + image * rates["input_image"]
            + max(0, read - heard - seen) * rates["cached"] + heard * rates["cached_audio"]
            + seen * rates["cached_image"] + (written - long) * rates["cache_write"]
            + long * rates["cache_write_long"] + (said - spoken - drawn - thought) * rates["output"]
            + thought * rates["reasoning"] + spoken * rates["output_audio"] + drawn * rates["output_image"]
        )  # fmt: skip
        return millions / 1e6 * self._factor(billed.get("geo"), billed.get("speed")) + self._run(billed.get("calls"))

    def most(self, prompt: int, answer: int, body: bytes, units: Mapping[str, float] = MappingProxyType({})) -> float:
        """The highest cost of a call that asks for so many tokens, runs of tools apart. `body`: its request: tiers,
        long storage and audio are reserved for where it names them. `units`: of a call with media the most seconds,
        characters and images."""
        named = {name for name, marks in _MARKS.items() if any(mark in body for mark in marks)}
        if units:
            named.add("audio")
        some = [it for it in self.rates if (it.tier is None or "tier" in named) and (it.above or 0) <= prompt]
        found = [self._plain, *(self._resolved([it, self]) for it in some)]
        kinds = [name for name in _AS if "audio" not in name or "audio" in named]
        reads = [name for name in kinds if "output" not in name and name != "reasoning"]
        reads = [name for name in reads if name != "cache_write_long" or "long" in named]
        read = max(rates[name] for rates in found for name in reads)
        made = max(rates[name] for rates in found for name in kinds if name not in reads and name != "cache_write_long")
        # A place and a speed may both count, and multiply.
        factor = prod(sorted([1.0, 1.0, *self.factors.values()])[-2:]) if "tier" in named else 1.0
        of_tokens = (prompt * read + answer * made) / 1e6 * factor + self._run(None)
        return max(of_tokens, self.unit_cost(units) or 0.0) if units else of_tokens

    def _rates(self, tier: str | None, prompt: int) -> Mapping[str, float]:
        """The rates of a call: those of its tier and its length count first."""
        long = [it for it in self.rates if it.above is not None and it.above < prompt and it.tier in (tier, None)]
        long.sort(key=lambda it: (it.tier is None, -(it.above or 0)))
        usual = [it for it in self.rates if it.above is None and it.tier == tier and tier]
        return self._resolved([*long, *usual, self]) if long or usual else self._plain

    @cached_property
    def _plain(self) -> Mapping[str, float]:
        return self._resolved([self])

    def _resolved(self, chain: Sequence[Rates]) -> Mapping[str, float]:
        """Each rate by the first of these that names it, else as the rate that stands for it."""
        found: dict[str, float] = {}
        for name, other in _AS.items():
            # A price of all output is one of reasoning too.
            named = (name, "output") if name == "reasoning" else (name,)
            own = next((rate for it in chain for one in named if (rate := getattr(it, one)) is not None), None)
            found[name] = found.get(other, 0.0) if own is None else own
        return found

    def _factor(self, *names: str | None) -> float:
        factor = 1.0
        for name in names:
            factor *= self.factors.get(name, 1.0) if name else 1.0
        return factor

    def _run(self, calls: Mapping[str, int] | None) -> float:
        if not self.tools:
            return 0.0
        ran = {_CALL: 1} | dict(calls or {})
        return sum(self.tools.get(name, 0.0) * times for name, times in ran.items()) / 1e3


class PriceFile(Section):
    """A list of prices as it is written."""

    as_of: date
    """The day by which it was right."""
    currency: Literal["USD"] = "USD"
    """What its numbers are: US dollars, as the costs are that providers report."""
    price: list[Price]

    @model_validator(mode="after")
    def _differ(self) -> PriceFile:
        seen = set[tuple[str, date | None, bool]]()
        for one in self.price:
            # A row of one's own may stand beside the one that it overrides.
            if (key := (one.model.lower(), one.since, one.source is None)) in seen:
                raise ValueError(f"there are two prices of {one.model!r} since {one.since}: leave one out")
            seen.add(key)
        return self


class TokenCounts(NamedTuple):
    """The tokens of a call, as a span's usage has them; None where nobody has counted."""

    input: int | None
    """Prompt tokens, cached and written ones included."""
    output: int | None
    cached: int | None = None
    cache_write: int | None = None
    reasoning: int | None = None
    billed: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, usage: Usage | None) -> TokenCounts:
        """The tokens of a usage; all None where there is none."""
        u = usage or Usage()
        return cls(u.input_tokens, u.output_tokens, u.cached_tokens, u.cache_write_tokens, u.reasoning_tokens, u.billed)

    @property
    def units(self) -> Mapping[str, float]:
        """Seconds, characters and images of a call with media, if it has no tokens."""
        billed = self.billed if self.input is None and self.output is None else None
        return {name: billed[name] for name in UNITS if name in billed} if billed else _NO_UNITS

    @property
    def own_cost(self) -> float | None:
        """The cost that the provider itself reports; None where it reports none."""
        return (self.billed or {}).get("cost")

    def minus(self, parts: Sequence[TokenCounts]) -> TokenCounts:
        """The tokens without those of these parts."""
        asked = max(0, (self.input or 0) - sum(it.input or 0 for it in parts))
        said = max(0, (self.output or 0) - sum(it.output or 0 for it in parts))
        cached = max(0, (self.cached or 0) - sum(it.cached or 0 for it in parts))
        written = max(0, (self.cache_write or 0) - sum(it.cache_write or 0 for it in parts))
        long = sum((it.billed or {}).get("cache_write_long", 0) for it in parts)
        billed = dict(self.billed or {})
        billed["cache_write_long"] = max(0, billed.get("cache_write_long", 0) - long)
        return TokenCounts(asked, said, cached, written, self.reasoning, billed)

    def parts(self) -> Iterator[tuple[str | None, TokenCounts]]:
        """(the model where it is another one, tokens) of each part of the call with a price of its own. Tools ran in
        the call itself."""
        billed = self.billed or {}
        of = {name: value for name, value in billed.items() if name in ("tier", "speed", "geo")}
        for model, asked, said, cached, written, long in billed.get("parts", ()):
            yield model, TokenCounts(asked, said, cached, written, None, of | {"cache_write_long": long or 0})


class Prices:
    """A list of prices, by which calls are priced. Safe to share: its only state is a cache."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises `ConfigError` where the file cannot be read or is wrong. The list that comes with Penstock is read at
        the first use: no start waits for it."""
        self.path = path or BUILTIN
        self._found = dict[str, list[tuple[int, Price]]]()
        self._missed = set[str]()
        if self.path != BUILTIN:
            _ = self.file

    @cached_property
    def file(self) -> PriceFile:
        """The content of the list."""
        return validated(PriceFile, read(self.path), str(self.path))

    @cached_property
    def digest(self) -> str:
        """A hash of the list and the version of the computation."""
        return hashlib.blake2b(_BY + self.file.model_dump_json().encode(), digest_size=8).hexdigest()

    @cached_property
    def _rows(self) -> tuple[dict[str, list[Price]], list[tuple[ModelPattern, Price]]]:
        """(rows by name, rows by pattern), the longest pattern first, and of one pattern's prices the newest."""
        ordered = sorted(self.file.price, key=lambda one: (len(one.model), one.since or date.min), reverse=True)
        named, patterns = dict[str, list[Price]](), list[tuple[ModelPattern, Price]]()
        for one in ordered:
            if "*" in one.model or "?" in one.model:
                patterns.append((ModelPattern(one.model), one))
            else:
                for name in dict.fromkeys((one.model.lower(), hyphened(one.model))):
                    named.setdefault(name, []).append(one)
        return named, patterns

    def staleness_warning(self, now_ns: int) -> str | None:
        """A warning if the list is old, with what to do; else None."""
        with self.path.open(encoding="utf-8") as lines:
            # A start reads no more of the list than this.
            found = next((it for line in islice(lines, 64) if (it := _AS_OF.match(line))), None)
        as_of = self.file.as_of if found is None else date.fromisoformat(found[1])
        return staleness_warning(as_of, now_ns)

    def charge(self, span: Span) -> None:
        """Set `cost` and `unpriced` of a span, if it is a model call that has ended."""
        if span.kind == "llm" and span.status != SpanStatus.OPEN:
            tokens = TokenCounts.of(span.usage)
            span.cost = self.cost(span.model_served, span.model, span.start_ns, tokens)
            span.unpriced = span.cost is None and (tokens[:2] != (None, None) or bool(tokens.units))

    def add(self, totals: Totals, span: Span) -> None:
        """Set the cost of a span, and add it to sums."""
        self.charge(span)
        totals.unpriced += span.unpriced
        if span.cost is not None:
            totals.cost = (totals.cost or 0.0) + span.cost
            totals.reported += TokenCounts.of(span.usage).own_cost is not None

    def cost(self, served: str | None, asked: str | None, start_ns: int, tokens: TokenCounts) -> float | None:
        """The cost of a call: the provider's figure, else by the price of the model that answered, else of the
        requested one. None where nobody has counted its tokens, or where there is no price."""
        if tokens.own_cost is not None:
            return tokens.own_cost
        units = tokens.units
        if tokens.input is None and tokens.output is None and not units:
            return None
        price = self.price(served, start_ns)
        if price is None and not _succeeds(served, asked):
            price = self.price(asked, start_ns)
        if price is None or (units and price.unit_cost(units) is None):
            self._miss(served or asked)
            return None
        if units:
            return price.unit_cost(units)
        if not (tokens.billed and tokens.billed.get("parts")):
            return price.cost(tokens)
        parts = list(tokens.parts())
        priced = [(self.price(model, start_ns) if model else price, part) for model, part in parts]
        if unknown := next(
            (model for (model, _), (found, _) in zip(parts, priced, strict=True) if found is None), None
        ):
            self._miss(unknown)
            return None
        left = price.cost(tokens.minus([part for _, part in parts]))
        return left + sum(found.cost(part) for found, part in priced if found is not None)

    def price(self, model: str | None, at_ns: int) -> Price | None:
        """The price of a model at that time; None if there is none."""
        if not model:
            return None
        known = self._found.get(model)
        if known is None:
            if len(self._found) >= _REMEMBERED:
                self._found.clear()
            known = self._found[model] = [(_ns(one.since), one) for one in self._listed(model)]
        return next((one for since, one in known if since <= at_ns), None)

    def _listed(self, model: str) -> list[Price]:
        called, (named, patterns) = list(lookup_names(model)), self._rows
        found = [one for name in called for one in named.get(name, ())]
        found += [one for pattern, one in patterns if any(map(pattern.matches, called))]
        # A row of one's own counts before those of an update.
        return sorted(found, key=lambda one: one.source is not None)

    def _miss(self, model: str | None) -> None:
        """Log once for each model that it has no price; lists and `penstock prices` say so to people."""
        if model and model not in self._missed and len(self._missed) < _SAID:
            self._missed.add(model)
            _log.debug("model %r has no price in %s: its calls are in no cost (`penstock prices`)", model, self.path)


def staleness_warning(as_of: date, now_ns: int) -> str | None:
    """A warning if a list of that day is old, with what to do; else None."""
    days = (datetime.fromtimestamp(now_ns / 1e9, UTC).date() - as_of).days
    if days <= STALE_DAYS:
        return None
    return f"the list of prices is of {as_of}, {days} days old: `penstock prices update FILE` takes a newer one"


@lru_cache(_REMEMBERED)
def _succeeds(served: str | None, asked: str | None) -> bool:
    """True if the model that answered is another version of the requested one: it does not get the older one's
    price."""
    if not served or not asked:
        return False
    rest = stem(served).rpartition("/")[2].partition(stem(asked).rpartition("/")[2])
    return not rest[0] and rest[2][:1] in ("", "-", "_", ":", "@", ".")


def _ns(day: date | None) -> int:
    return 0 if day is None else int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 10**9


# The names of a model in lists: which mean the same one, and which a pattern covers.
#
# Names that differ in a provider's prefix, a region, or the day of a snapshot mean the same model: `openai/gpt-5`,
# `gpt-5-2025-08-07` and `gpt-5` are one, and so are `us.anthropic.claude-opus-4-5-20251101-v1:0` and
# `anthropic/claude-opus-4.5`. Another version or another size is another model, so that a newer one never has an
# older one's price.

_STATE: Final = re.compile(r"(?:[-@]20\d\d-?[01]\d-?[0-3]\d(?:-v\d+)?|-v\d+|@default|-00\d)(?::\d+)?$")
"""Matches the suffix of a model's name for one state of it: a day, or a number."""
_NEWEST: Final = "-latest"
_HOSTS: Final = re.compile(
    r"(?:[a-z0-9_.-]+/)*(?:openai|anthropic|google|gemini|vertex_ai|models|mistralai|mistral|deepseek|xai|x-ai|moonshotai|"
    r"moonshot|qwen|dashscope|cohere|amazon|bedrock|converse|azure|azure_ai|voyage|openrouter|foundation-model|"
    r"inference-profile|[a-z]{2}(?:-[a-z]+)+-\d)/"
)
_REGION: Final = re.compile(r"(?:us|eu|apac|global|jp|au|ca|sa|me|us-gov)\.")
_VENDOR: Final = re.compile(r"(?:anthropic|amazon|mistral|cohere|openai)\.(?=[a-z])")
_POINT: Final = re.compile(r"(?<=\d)\.(?=\d)")
_SIZE: Final = re.compile(r"(?:0-)?\d+[bmk](?![a-z0-9])")
_SEPARATORS: Final = "-_:@/"


def hyphened(name: str) -> str:
    """A name in lower case with hyphens in its version."""
    return _POINT.sub("-", name.lower())


def stem(name: str) -> str:
    """The hyphened name without the state of the model."""
    name = hyphened(name)
    while (cut := _STATE.sub("", name)) != name:
        name = cut
    cut = name.removesuffix(_NEWEST)
    # A `-latest` without a version is a different model every year.
    return cut if any(map(str.isdigit, cut)) else name


def lookup_names(name: str) -> Iterator[str]:
    """The names under which a model may be listed, the most specific first: its own name, without the state, without
    the server, without the region and the vendor."""
    name = name.strip().lower()
    if name.startswith("arn:"):
        name = name.rpartition("/")[2]
    elif name.startswith("ft:"):
        name = ":".join(name.split(":")[:2])
    known = dict.fromkeys((name, hyphened(name), stem(name)))
    for prefix in (_HOSTS, _REGION, _VENDOR):
        known |= dict.fromkeys(one[found.end() :] for one in list(known) if (found := prefix.match(one)))
    yield from known


class ModelPattern:
    """A name with `*` and `?`. Where the text before a `*` has a version in it, the `*` stands for states of that
    model, or after a separator for the rest of its name, but for no other version."""

    def __init__(self, text: str) -> None:
        # A bracket is a part of the name.
        pieces = [re.escape(piece).replace(r"\?", ".") for piece in hyphened(text).split("*")]
        self._find = re.compile("(.*?)".join(pieces), re.DOTALL)
        self._stars = len(pieces)

    def matches(self, name: str) -> bool:
        """True if a name, in lower case, is one of the model."""
        name = hyphened(name)
        found = self._find.fullmatch(name)
        stars = range(1, self._stars)
        return found is not None and all(_goes_on(name[: found.start(at)], found[at]) for at in stars)


def _goes_on(before: str, rest: str) -> bool:
    """True if the name with the rest is still the model that the text before it names."""
    named = before.rpartition("/")[2]
    if not rest or not any(map(str.isdigit, named)):
        return True
    separated = before[-1] in _SEPARATORS
    if stem(f"0{before[-1] if separated else ''}{rest}") == "0":
        return True
    return separated and (not rest[0].isdigit() or _SIZE.match(rest) is not None)
