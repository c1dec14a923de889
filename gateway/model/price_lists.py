"""Lists of prices from elsewhere: reads them, compares them with one's own, and writes the result. Pure but for reading
the file.

A list is a file in Penstock's format, or LiteLLM's public JSON, whose keys are a kind of token with suffixes in any
order (`input_cost_per_token_above_200k_tokens_priority`). Prices by pages or pixels, and of images by their size, are
left out, and so are rows that repeat another row of the same model (`prices.lookup_names`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

from penstock.gateway.model.base import Noun
from penstock.gateway.model.prices import Price, PriceFile, Rates, hyphened, lookup_names, stem
from penstock.gateway.model.toml import ConfigError, read, validated

LITELLM: Final = "LiteLLM's list"
_KINDS: Final = {
    "input_cost_per_token": "input",
    "output_cost_per_token": "output",
    "cache_read_input_token_cost": "cached",
    "cache_creation_input_token_cost": "cache_write",
    "output_cost_per_reasoning_token": "reasoning",
    "input_cost_per_audio_token": "input_audio",
    "input_cost_per_image_token": "input_image",
    "cache_read_input_audio_token_cost": "cached_audio",
    "cache_read_input_image_token_cost": "cached_image",
    "output_cost_per_audio_token": "output_audio",
    "output_cost_per_image_token": "output_image",
}
_UNITS: Final = {
    "output_cost_per_second": "second",
    "output_cost_per_video_per_second": "second",
    "input_cost_per_second": "second",
    "input_cost_per_character": "character",
    "output_cost_per_image": "image",
    "input_cost_per_image": "image",
}
"""The first of a unit that is not 0 counts: some entries have the price of a second as that of input, some as that of
output, and some as both."""
_MEDIA: Final = ("audio_transcription", "audio_speech", "image_generation", "image_edit", "video_generation")
"""Modes of models that are billed by these units."""
_SIZED: Final = re.compile(r"(?:^|/)\d+-x-\d+/")
_KEY: Final = re.compile(rf"({'|'.join(_KINDS)})((?:_above_\d+hr|_above_\d+k?_tokens|_[a-z]+)*)")
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_SUFFIX: Final = re.compile(r"_above_(\d+)hr|_above_(\d+)(k?)_tokens|_([a-z]+)")
_TIERS: Final = {"batches": "batch", "batch": "batch"} | dict.fromkeys(("flex", "priority", "ultrafast", "balanced"))
_FIRST: Final = (
    "openai", "anthropic", "gemini", "vertex_ai", "xai", "deepseek", "mistral", "moonshot", "cohere", "cohere_chat",
    "dashscope", "voyage", "fireworks_ai", "bedrock",
)  # fmt: skip
"""Providers whose names of models are unique: the prefix is left out."""
_ONE_SIDED: Final = ("embedding", "rerank", "moderation")
_INCLUSIVE: Final = "xai"
"""The provider that bills a prompt of exactly a threshold by the price above it."""
_TOOLS: Final = {
    "xai": {"web_search": 5.0, "x_search": 5.0, "code_interpreter": 5.0, "file_search": 2.5, "live_search": 25.0},
}
"""By provider: tools whose prices are the same for all of its models, and not in LiteLLM's list."""
_MOST: Final = 0.1
"""Most dollars for a token: more than any provider charges."""
_OWN: Final = "it is yours"


class PriceChange(Noun):
    """The effect of an update of the price list on one model."""

    model: str
    """As the list names it."""
    what: Literal["new", "changed", "kept"]
    """`kept`: it is one's own."""
    said: str
    """From what to what, or why it is kept."""


class PriceListUpdate(NamedTuple):
    """A list updated from another one, and their differences."""

    file: PriceFile
    differences: list[PriceChange]


# -- reading ----------------------------------------------------------------------------------------------------------


def load(path: Path, as_of: date | None = None) -> PriceFile:
    """Read a list in either format. `as_of`: the day of LiteLLM's list, which has none; default: that of the file.
    Raises `ConfigError`, which names row and field."""
    try:
        text = path.read_text(encoding="utf-8")
        day = as_of or datetime.fromtimestamp(path.stat().st_mtime, UTC).date()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not text.lstrip("\ufeff \t\r\n").startswith("{"):
        return validated(PriceFile, read(path), str(path))
    try:
        tree = json.loads(text.lstrip("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    try:
        rows = _rows(cast("dict[str, Any]", tree))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not rows:
        raise ConfigError(f"{path} has no prices of tokens: give a list of Penstock's, or LiteLLM's public JSON")
    return PriceFile(as_of=day, price=rows)


def _rows(tree: dict[str, Any]) -> list[Price]:
    found: dict[str, Price] = {}
    for name, entry in tree.items():
        if name == "sample_spec" or "*" in name:
            continue
        if not isinstance(entry, dict):
            raise ValueError(f"{name}: {entry!r} is no object with prices")
        fields = cast("dict[str, Any]", entry)
        target = tree.get(str(fields.get("alias_of")))
        price = _price(name, cast("dict[str, Any]", target) | fields if isinstance(target, dict) else fields)
        if price is not None:
            # The entry of a bare name counts before the one below a provider's prefix.
            found.setdefault(price.model, price)
            if price.model == name:
                found[name] = price
    return list(_thinned(found))


def _thinned(rows: dict[str, Price]) -> Iterator[Price]:
    """The rows that do not repeat another row of the same model."""
    by_name = {other: price for name, price in rows.items() for other in (name.lower(), hyphened(name))}
    for name, price in rows.items():
        others = [it for other in lookup_names(name) if (it := by_name.get(other)) is not None and it is not price]
        if not others or _told(others[0]) != _told(price):
            yield price


def _told(price: Price) -> dict[str, Any]:
    return price.model_dump(exclude={"model", "since", "source"}, exclude_defaults=True)


def _price(name: str, fields: dict[str, Any]) -> Price | None:
    rates: dict[tuple[str | None, int | None], dict[str, float]] = {}
    for key, value in fields.items():
        if value is not None and (at := _place(key, fields)) is not None:
            tier, above, kind = at
            rates.setdefault((tier, above), {})[kind] = _rate(name, key, value)
    _tiered(name, fields, rates)
    own, units = rates.pop((None, None), {}), _units(name, fields)
    if "input" in own and "output" not in own and fields.get("mode") in _ONE_SIDED:
        own["output"] = 0.0
    if fields.get("mode") in _MEDIA and (units or "input" in own):
        _ = own.setdefault("input", 0.0)
        _ = own.setdefault("output", own.get("output_image", own.get("output_audio", 0.0)))
    if not {"input", "output"} <= own.keys():
        return None
    for of in (own, *rates.values()):
        # Reasoning costs as much as output unless it has a price of its own.
        if of.get("reasoning") == of.get("output"):
            of.pop("reasoning", None)
        if of.get("cache_write") and own.get("cache_write") and "cache_write_long" in own:
            # A tier that prices writes but not long ones raises the price of these as much as the row does.
            long = own["cache_write_long"] * of["cache_write"] / own["cache_write"]
            of.setdefault("cache_write_long", float(f"{long:.10g}"))
    provider, _, rest = name.partition("/")
    special = [{"tier": tier, "above": above} | of for (tier, above), of in sorted(rates.items(), key=str) if of]
    return Price.model_validate(
        own
        | {
            "model": rest if rest and provider in _FIRST else name,
            "source": f"{LITELLM}: {fields.get('source') or fields.get('litellm_provider') or 'no source named'}"[:512],
            "rates": [{key: value for key, value in it.items() if value is not None} for it in special],
            "units": units,
            "tools": _tools(name, fields),
            "factors": _factors(name, fields),
        }
    )


def _place(key: str, fields: dict[str, Any]) -> tuple[str | None, int | None, str] | None:
    """(tier, threshold, kind of token) of a key; None where it is not about tokens."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    tier, above, kind = None, None, _KINDS[found[1]]
    for part in _SUFFIX.finditer(found[2]):
        if part[1]:
            kind += "_long"
        elif part[2]:
            above = int(part[2]) * (1000 if part[3] else 1) - (fields.get("litellm_provider") == _INCLUSIVE)
        elif part[4] in _TIERS:
            tier = _TIERS[part[4]] or part[4]
        else:
            return None
    return (tier, above, kind) if kind in Rates.model_fields else None


def _tiered(name: str, fields: dict[str, Any], rates: dict[tuple[str | None, int | None], dict[str, float]]) -> None:
    """Add a table of ranges: the first one is the model's price. Kinds that a range does not name cost as its input."""
    table = fields.get("tiered_pricing")
    for tier in cast("list[Any]", table) if isinstance(table, list) else ():
        known = cast("dict[str, Any]", tier) if isinstance(tier, dict) else {}
        start = known.get("range", [None])[0] if isinstance(known.get("range"), list) else None
        if start is None:
            continue
        found = {kind: _rate(name, key, known[key]) for key, kind in _KINDS.items() if known.get(key) is not None}
        if "input" in found:
            place = (None, int(_number(name, "tiered_pricing.range", start)) or None)
            rates.setdefault(place, {}).update({"cached": found["input"], "cache_write": found["input"]} | found)


def _tools(name: str, fields: dict[str, Any]) -> dict[str, float]:
    found = dict(_TOOLS.get(str(fields.get("litellm_provider")), {}))
    search = fields.get("search_context_cost_per_query")
    if isinstance(search, dict):
        sizes = cast("dict[str, Any]", search)
        price = sizes.get("search_context_size_medium") or next(iter(sizes.values()), None)
        per_answer = fields.get("web_search_billing_unit") != "per_query"
        google = "gemini" in str(fields.get("litellm_provider")) or "vertex_ai-l" in str(fields.get("litellm_provider"))
        kind = "grounding" if google and per_answer else "web_search"
        if price:
            found[kind] = _rate(name, "search_context_cost_per_query", price, 1e3, math.inf)
    for key, kind in (("file_search_cost_per_1k_calls", "file_search"), ("input_cost_per_request", "call")):
        if fields.get(key):
            found[kind] = _rate(name, key, fields[key], 1e3 if kind == "call" else 1.0, math.inf)
    return found


def _units(name: str, fields: dict[str, Any]) -> dict[str, float]:
    """Prices of a second, a character or an image. Those of images of one size, in entries of their own, are left
    out."""
    found: dict[str, float] = {}
    if fields.get("mode") in _MEDIA and _SIZED.search(name) is None:
        for key, unit in _UNITS.items():
            if fields.get(key) and unit not in found:
                found[unit] = _rate(name, key, fields[key], 1.0, math.inf)
    return found


def _factors(name: str, fields: dict[str, Any]) -> dict[str, float]:
    special = fields.get("provider_specific_entry")
    given = cast("dict[str, Any]", special) if isinstance(special, dict) else {}
    return {
        key: _number(name, f"provider_specific_entry.{key}", given[key]) for key in ("us", "eu", "fast") if key in given
    }


def _rate(name: str, key: str, value: Any, times: float = 1e6, most: float = _MOST) -> float:
    return float(f"{_number(name, key, value, most) * times:.10g}")


def _number(name: str, key: str, value: Any, most: float = math.inf) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= most or math.isinf(number):
        raise ValueError(f"{name}: {key}: {value!r} is no price: a number from 0 to {most:g} is due")
    return number


# -- merging a list into one's own ------------------------------------------------------------------------------------


def merge_price_lists(own: PriceFile, new: PriceFile) -> PriceListUpdate:
    """A list with the prices of another. Rows without a source are its owner's and stay. Where a price has changed, the
    old one is kept, too, because it prices older calls."""
    mine = {stem(one.model.rstrip("*")) for one in own.price if one.source is None}
    rows, said = list(own.price), list[PriceChange]()
    newest = _newest(one for one in own.price if one.source is not None)
    for one in new.price:
        known = newest.get(one.model.lower())
        if stem(one.model) in mine:
            said.append(PriceChange(model=one.model, what="kept", said=_OWN))
        elif known is None:
            rows.append(one)
            said.append(PriceChange(model=one.model, what="new", said=_shown(one)))
        elif _told(known) != _told(one):
            said.append(PriceChange(model=one.model, what="changed", said=f"{_shown(known)} -> {_shown(one, known)}"))
            since = one.since or new.as_of
            if known.since is not None and known.since >= since:
                rows.remove(known)
            rows.append(one.model_copy(update={"since": since}))
    as_of = max(own.as_of, new.as_of)
    return PriceListUpdate(own.model_copy(update={"as_of": as_of, "price": rows}), said)


def _newest(rows: Iterable[Price]) -> dict[str, Price]:
    ordered = sorted(rows, key=lambda one: one.since or date.min)
    return {one.model.lower(): one for one in ordered}


def _shown(price: Price, before: Price | None = None) -> str:
    """The plain rates, with a note if only others have changed."""
    plain = " ".join(f"{name} {getattr(price, name):g}" for name in ("input", "output"))
    same = before is not None and (before.input, before.output) == (price.input, price.output)
    return f"{plain} (others differ)" if same else plain


# -- writing ----------------------------------------------------------------------------------------------------------

_HEAD: Final = """# Prices of models, for a million tokens (docs/finding.md#costs).
# Rows without a source are yours: `penstock prices update` leaves them as they are.
"""


def render_toml(file: PriceFile, head: str = _HEAD) -> str:
    """A list as the text of its file, a line for each key."""
    rows = "".join(f"\n[[price]]\n{_table(one)}" for one in file.price)
    return f'{head}as_of = {file.as_of}\ncurrency = "{file.currency}"\n{rows}'


def _table(price: Price) -> str:
    told = price.model_dump(exclude_none=True)
    first = {name: told.pop(name) for name in ("model", "since", "source") if name in told}
    return "".join(f"{name} = {_value(value)}\n" for name, value in (first | told).items() if value not in ([], {}))


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, Mapping):
        known = cast("Mapping[str, Any]", value)
        return (
            "{ "
            + ", ".join(f"{key if _BARE.fullmatch(key) else _quoted(key)} = {_value(it)}" for key, it in known.items())
            + " }"
        )
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return "[\n" + "".join(f"    {_value(it)},\n" for it in items) + "]"
    return str(value)


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
