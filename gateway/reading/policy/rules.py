"""The rules that a person writes: `[[policy]]` in penstock.toml, or in a file of its own. Strict, as all of the
configuration."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from penstock.gateway.model.base import Mode
from penstock.gateway.model.toml import Section
from penstock.gateway.wire.dialects.json_scan import parse_path

Verdict = Literal["allow", "deny", "redact", "ask", "kernel", "dry"]
Hint = Literal["readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint"]
LONGEST_WAIT_S: Final = 86_400.0


def _path(value: str) -> str:
    _ = parse_path(value)
    return value


def _regex(value: str) -> str:
    try:
        _ = re.compile(value)
    except re.error as error:
        raise ValueError(f"it is no regular expression ({error})") from None
    return value


JsonPath = Annotated[str, AfterValidator(_path)]
Regex = Annotated[str, AfterValidator(_regex)]


class Condition(Section):
    """`argument`: something that must hold for the value at a place of the arguments. What is given here must all hold.

    A path to several values holds where one of them does.
    """

    at: JsonPath
    """The path of a value in the arguments."""
    equals: str | int | float | bool | None = None
    """The value itself."""
    glob: str | None = None
    """A pattern for all of it; `*` is any text, also with a `/` in it. What is no text is compared as JSON."""
    regex: Regex | None = None
    """A regular expression that is found in it."""
    absent: bool | None = None
    """`true`: it is not there; `false`: it is."""
    above: float | None = None
    """A number that it is more than."""
    below: float | None = None
    """A number that it is less than."""

    @model_validator(mode="after")
    def _asks_something(self) -> Condition:
        asked = self.model_fields_set - {"at"}
        if not asked:
            raise ValueError(f"{self.at!r} says nothing of its value: add equals, glob, regex, absent, above or below")
        if self.absent and len(asked) > 1:
            raise ValueError(f"{self.at!r} is absent and has a value: leave one of them out")
        return self


class Redaction(Section):
    """`redact`: what is taken out, and where."""

    arguments: list[JsonPath] = Field(default=[])
    """Paths of values in the arguments."""
    results: list[JsonPath] = Field(default=[])
    """Paths of values in the result."""
    pattern: Regex | None = None
    """Only what this regular expression finds in texts and numbers there; without it the whole value."""

    @model_validator(mode="after")
    def _is_somewhere(self) -> Redaction:
        if not self.arguments and not self.results:
            raise ValueError('it names no place: add arguments = ["password"] or results = ["**"]; ** is all of it')
        return self


class PolicyRule(Section):
    """`[[policy]]`: a rule on tool calls. The first that matches decides; where none does, the call may run."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """What spans, errors and reports call it."""
    server: list[str] = Field(default=["*"], min_length=1)
    """The server, or several, or patterns."""
    tool: list[str] = Field(default=["*"], min_length=1)
    """The tool by its server's own name, or several, or patterns."""
    argument: list[Condition] = Field(default=[])
    """What must hold for the arguments, all of it."""
    annotations: dict[Hint, bool] = Field(default={})
    """What the server has said of the tool when it was last listed."""
    mode: list[Mode] = Field(default=[])
    """What the rollout is for; all of them if not given."""
    verdict: Verdict
    """What becomes of the call."""
    message: str | None = Field(default=None, max_length=1000)
    """Why, for the agent's model: what to do instead."""
    redact: Redaction | None = None
    """What is taken out, with the verdict `redact`."""
    kernel: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
    """Who decides, with the verdict `kernel`: a Python object, as `module:name`."""
    wait: float = Field(default=300.0, gt=0, le=LONGEST_WAIT_S)
    """Seconds that a call waits for a person or a kernel, with the verdicts `ask` and `kernel`; then it is refused."""
    hard: bool = False
    """Whether a violation on a release's candidate rolls it back at once."""

    @field_validator("server", "tool", "mode", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _says_how(self) -> PolicyRule:
        if (self.verdict == "redact") != (self.redact is not None):
            what = 'add redact = { results = ["**"] }' if self.redact is None else "leave redact out"
            raise ValueError(f"verdict is {self.verdict!r}: {what}")
        if (self.verdict == "kernel") != (self.kernel is not None):
            what = 'add kernel = "module:name"' if self.kernel is None else "leave kernel out"
            raise ValueError(f"verdict is {self.verdict!r}: {what}")
        return self


def check_names(rules: list[PolicyRule]) -> None:
    """Raise `ValueError` where two rules have one name."""
    names = [rule.name for rule in rules]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"policy names must differ: {', '.join(twice)}")
