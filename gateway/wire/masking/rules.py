"""The settings `[[masking]]` in penstock.toml. Strict, as the whole configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from penstock.gateway.model.toml import Section, names_differ
from penstock.gateway.wire.json_paths import EVERYTHING, parse_path


def _path(value: str) -> str:
    if value == EVERYTHING:
        raise ValueError("the path of a masking rule names a member: write **.email, or * for all of them")
    if not value or value.startswith("/"):
        said = f'write ["{value}"] for a member of this name' if value else "write the name of a member"
        raise ValueError(f"{value!r} is no path: {said}")
    _ = parse_path(value)
    return value


MemberPath = Annotated[str, AfterValidator(_path)]


class MaskingRule(Section):
    """`[[masking]]`: what is replaced by asterisks before a call is written to the tape."""

    name: str = Field(pattern=r"^[^\x00-\x1f\x7f]{1,64}$")
    """What spans, metrics and messages call it."""
    pattern: str | None = None
    """A regular expression of RE2: what it finds in a text is masked."""
    paths: list[MemberPath] = Field(default=[])
    """Paths of JSON members, whose values are masked whole."""

    @model_validator(mode="after")
    def _looks_for_one_thing(self) -> MaskingRule:
        if self.pattern is None and not self.paths:
            raise ValueError(f'{self.name!r} masks nothing: add a pattern, or paths = ["**.email"]')
        if self.pattern is not None and self.paths:
            raise ValueError(f"{self.name!r} has a pattern and paths: make a rule of each")
        return self


def check_names(rules: list[MaskingRule]) -> None:
    """Raises `ValueError` where two rules have one name."""
    names_differ([rule.name for rule in rules], "rules")
