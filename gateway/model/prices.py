"""What calls cost, by a list of prices: a file with dates in it, so that a call costs what was right when it was made.

`prices.toml` beside this module is the list that is used where no other is configured.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from pydantic import Field, model_validator

from penstock.gateway.model.toml import Section, read, validated

BUILTIN: Final = Path(__file__).with_name("prices.toml")
_REMEMBERED: Final = 10_000


class Price(Section):
    """What the tokens of some models cost from a day on; for a million."""

    known_by: ClassVar[str] = "model"

    model: str = Field(min_length=1, max_length=256)
    """A name, or a pattern with `*` and `?`, whatever its case."""
    since: date
    """The first day, in UTC."""
    input: float = Field(ge=0)
    """Prompt tokens that are read anew."""
    output: float = Field(ge=0)
    """Generated tokens, reasoning included."""
    cached: float | None = Field(default=None, ge=0)
    """Prompt tokens that are read from the provider's cache; None: like `input`."""
    cache_write: float | None = Field(default=None, ge=0)
    """Prompt tokens that are written to it; None: like `input`."""


class PriceFile(Section):
    """A list of prices as it is written."""

    as_of: date
    """The day by which it was right."""
    currency: str = Field(default="USD", min_length=1, max_length=8)
    """What its numbers are."""
    price: list[Price]

    @model_validator(mode="after")
    def _differ(self) -> PriceFile:
        seen = set[tuple[str, date]]()
        for one in self.price:
            if (key := (one.model.lower(), one.since)) in seen:
                raise ValueError(f"there are two prices of {one.model!r} since {one.since}: leave one out")
            seen.add(key)
        return self


class Tokens(NamedTuple):
    """Those of a call; None where nobody has counted."""

    input: int | None
    """Prompt tokens, cached and written ones included."""
    output: int | None
    cached: int | None = None
    cache_write: int | None = None


class Prices:
    """A list of prices that calls are asked of. Safe to share: all it does is remember."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises `ConfigError` where the file cannot be read or is wrong."""
        self.path = path or BUILTIN
        tree = read(self.path)
        self.file = validated(PriceFile, tree, str(self.path))
        self.digest = hashlib.blake2b(self.file.model_dump_json().encode(), digest_size=8).hexdigest()
        """Tells it from any other list."""
        # The longest pattern counts, and of its prices the newest that was there already.
        ordered = sorted(self.file.price, key=lambda one: (len(one.model), one.since), reverse=True)
        self._ordered = [(one.model.lower(), _ns(one.since), one) for one in ordered]
        self._found = dict[str, list[tuple[int, Price]]]()

    def cost(self, served: str | None, asked: str | None, start_ns: int, tokens: Tokens) -> float | None:
        """What a call costs, by the model that answered, or else the one that was asked for. None where nobody has
        counted its tokens, or where there is no price for it."""
        if tokens.input is None and tokens.output is None:
            return None
        price = self.price(served, start_ns) or self.price(asked, start_ns)
        if price is None:
            return None
        read, written = tokens.cached or 0, tokens.cache_write or 0
        fresh = max(0, (tokens.input or 0) - read - written)
        cached = price.input if price.cached is None else price.cached
        cache_write = price.input if price.cache_write is None else price.cache_write
        millions = fresh * price.input + read * cached + written * cache_write + (tokens.output or 0) * price.output
        return millions / 1e6

    def price(self, model: str | None, at_ns: int) -> Price | None:
        """The price of a model at that time."""
        if not model:
            return None
        known = self._found.get(model)
        if known is None:
            if len(self._found) >= _REMEMBERED:
                self._found.clear()
            name = model.lower()
            known = self._found[model] = [
                (since, one) for pattern, since, one in self._ordered if fnmatchcase(name, pattern.replace("[", "[[]"))
            ]
        return next((one for since, one in known if since <= at_ns), None)


def _ns(day: date) -> int:
    return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 10**9
