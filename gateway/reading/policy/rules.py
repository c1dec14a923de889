"""The rules that a person writes, `[[policy]]` in penstock.toml or in a file of its own (strict, as all of the
configuration), and whether their conditions hold for arguments, or that this cannot be told.

A value of another type than the rule's is not simply another value: many servers take `"true"` for true and `"5"` for
5. So it is `UnreadableCall` where a server could take it for the rule's value, and rules treat it as such.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from fnmatch import translate
from typing import Annotated, Any, Final, Literal, cast

from pydantic import AfterValidator, Field, field_validator, model_validator

from penstock.gateway.model.base import Mode
from penstock.gateway.model.toml import Section
from penstock.gateway.wire.dialects.json_scan import JsonPaths, compiled_paths, parse_path

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
    """Name in spans, errors and reports."""
    server: list[str] = Field(default=["*"], min_length=1)
    """Names or patterns of servers."""
    tool: list[str] = Field(default=["*"], min_length=1)
    """Names, as the server has them, or patterns of tools."""
    argument: list[Condition] = Field(default=[])
    """Conditions on the arguments; all must hold."""
    annotations: dict[Hint, bool] = Field(default={})
    """Annotations that the server listed for the tool."""
    mode: list[Mode] = Field(default=[])
    """Modes of the rollout; all by default."""
    agent: list[str] = Field(default=[])
    """Names or patterns of agents; all by default. A call without an agent's name fits only a rule that restricts."""
    verdict: Verdict
    """What happens to the call."""
    message: str | None = Field(default=None, max_length=1000)
    """Reason for the agent's model, such as what to do instead."""
    redact: Redaction | None = None
    """What to remove, with the verdict `redact`."""
    kernel: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
    """Python object that decides, with the verdict `kernel`."""
    wait: float = Field(default=300.0, gt=0, le=LONGEST_WAIT_S)
    """Seconds to wait for a person (`ask`) or a kernel (`kernel`); then the call is refused."""
    hard: bool = False
    """Whether a violation on a release's candidate rolls it back at once."""

    @field_validator("server", "tool", "mode", "agent", mode="before")
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


# -- the values at paths (`gateway.wire.dialects.json_scan`) in the arguments or the result of a call -----------------
#
# A key that is written in another case than the path's makes a value uncertain: some servers read it as the same key.

MOST_VALUES: Final = 10_000
"""Most values that paths may find."""


class UnreadableCall(ValueError):
    """The call cannot be read so that a rule could decide; the message says why."""


def values_at(value: Any, paths: JsonPaths) -> list[Any]:
    """The values at some paths, in order; `**` is the whole value. Raises `UnreadableCall`."""
    if paths.begin & paths.end:
        return [value]
    for name in paths.stem:
        if not isinstance(value, dict):
            _refuse_number(value, name)
            return []
        outer = cast(dict[str, Any], value)
        _refuse_twin(outer, name)
        if name not in outer:
            return []
        value = outer[name]
    if paths.behind_stem == paths.end:
        return [value]
    found, waiting = list[Any](), [(value, paths.behind_stem)]
    while waiting:
        one, bits = waiting.pop()
        if bits & paths.end:
            found.append(one)
            if len(found) > MOST_VALUES:
                raise UnreadableCall(f"it has more than {MOST_VALUES:,} values at {', '.join(paths.written)}")
        if isinstance(one, dict | list):
            inner = [(value, bits) for _, value, bits in _below(cast("dict[str, Any] | list[Any]", one), paths, bits)]
            waiting += reversed(inner)
    return found


def _below(value: dict[str, Any] | list[Any], paths: JsonPaths, bits: int) -> Iterator[tuple[Any, Any, int]]:
    """(key or index, value, steps that come next) of each member or element that a path leads to or through."""
    named = paths.next_steps(bits)
    if isinstance(value, dict):
        for name in named.names:
            _refuse_twin(value, name)
        for index in named.indexes:
            if str(index) in value:
                raise UnreadableCall(
                    f"it has the key '{index}', which some servers read as the element {index} of a list"
                )
        keys: Any = value if named.any_member else [name for name in named.names if name in value]
        yield from _steps(value, keys, paths, bits)
        return
    for name in named.names:
        _refuse_number(value, name)
    if named.any_element and not named.indexes:
        after = paths.into(bits, 0)
        yield from [(at, inner, after) for at, inner in enumerate(value)]
        return
    places = range(len(value)) if named.any_element else [at for at in sorted(named.indexes) if at < len(value)]
    yield from _steps(value, places, paths, bits)


def _steps(value: Any, keys: Iterable[str | int], paths: JsonPaths, bits: int) -> Iterator[tuple[Any, Any, int]]:
    for key in keys:
        after = paths.into(bits, key)
        if after:
            yield key, value[key], after


def _refuse_number(value: Any, name: str) -> None:
    """Raises `UnreadableCall` where a path names a member by digits, and there is a list that has such an element."""
    is_number = name.isascii() and name.isdigit() and len(name) < 10
    if is_number and isinstance(value, list) and int(name) < len(cast("list[Any]", value)):
        raise UnreadableCall(f"it has a list, of which some servers read the element {name} as the member {name!r}")


def _refuse_twin(value: dict[str, Any], name: str) -> None:
    if name in value and len(value) == 1:
        return
    folded = name.casefold()
    twin = next((key for key in value if key != name and key.casefold() == folded), None)
    if twin is not None:
        raise UnreadableCall(f"it has the key {twin[:64]!r}, which some servers read as {name!r}")


def change_at(value: Any, paths: JsonPaths, change: Callable[[Any], Any], bits: int | None = None) -> Any:
    """The value with those at some paths changed; the same object when none was. Raises `UnreadableCall`."""
    bits = paths.begin if bits is None else bits
    if bits & paths.end:
        return change(value)
    made: Any = value
    if isinstance(value, dict | list):
        for place, inner, after in _below(cast("dict[str, Any] | list[Any]", value), paths, bits):
            new = change_at(inner, paths, change, after)
            if new is not inner:
                made = made if made is not value else copy(made)
                made[place] = new
    return made


ValueTest = Callable[[Any], bool]
"""True if a value passes the test; raises `UnreadableCall`."""


class CallArguments:
    """The arguments of one call, with the values found so far: many rules ask for the same paths."""

    __slots__ = ("_arguments", "_found")

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments
        self._found: dict[JsonPaths, list[Any] | UnreadableCall] = {}

    def at(self, path: JsonPaths) -> list[Any]:
        """The values at a path; raises `UnreadableCall`."""
        values = self._found.get(path)
        if values is None:
            values = self._found[path] = self._look(path)
        if isinstance(values, UnreadableCall):
            raise values
        return values

    def _look(self, path: JsonPaths) -> list[Any] | UnreadableCall:
        arguments = self._arguments
        if not isinstance(arguments, dict):
            return UnreadableCall("its arguments are no object")
        try:
            return values_at(cast(dict[str, Any], arguments), path)
        except UnreadableCall as unreadable:
            return unreadable


ConditionTest = Callable[[CallArguments], bool]
"""True if a condition holds; raises `UnreadableCall`."""


def compile_condition(condition: Condition) -> ConditionTest:
    """Compile a condition into a function."""
    path, tests, absent = compiled_paths(condition.at), _tests(condition), condition.absent

    def check(arguments: CallArguments) -> bool:
        values = arguments.at(path)
        if absent is not None and not values:
            return absent
        if absent:
            return False
        # Loops, not generators: this runs for every rule of every call.
        for value in values:
            for test in tests:
                if not test(value):
                    break
            else:
                return True
        return False

    return check


def _tests(condition: Condition) -> list[ValueTest]:
    made: list[ValueTest] = []
    if condition.equals is not None:
        made.append(_equals(condition.at, condition.equals))
    if condition.glob is not None:
        made.append(_text(re.compile(translate(condition.glob)).match))
    if condition.regex is not None:
        made.append(_text(re.compile(condition.regex).search))
    if condition.above is not None:
        made.append(_bound(condition.at, condition.above, 1))
    if condition.below is not None:
        made.append(_bound(condition.at, condition.below, -1))
    return made


def text_of(value: Any) -> str:
    """A text itself, or any other value's JSON. Raises `UnreadableCall` for a value that is nested too deep."""
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise UnreadableCall("it is nested too deep") from None


def _text(matches: Callable[[str], object]) -> ValueTest:
    return lambda value: matches(text_of(value)) is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _equals(at: str, wanted: str | float | bool) -> ValueTest:
    kind = type(wanted)

    def test(value: Any) -> bool:
        if type(value) is kind or (_is_number(value) and _is_number(wanted)):
            return value == wanted
        unlike = isinstance(wanted, bool) or text_of(value).strip().casefold() == text_of(wanted).casefold()
        if value is not None and (unlike or (_is_number(wanted) and _reads_as(value, wanted))):
            raise UnreadableCall(f"{text_of(value)[:64]} at {at} is another type than {text_of(wanted)[:64]}")
        return False

    return test


def _reads_as(value: Any, number: str | float | bool) -> bool:
    try:
        return isinstance(value, str) and float(value) == number
    except ValueError:
        return False


def _bound(at: str, bound: float, side: int) -> ValueTest:
    def test(value: Any) -> bool:
        if value is None:
            return False
        if not _is_number(value):
            raise UnreadableCall(f"{text_of(value)[:64]} at {at} is no number")
        return value > bound if side > 0 else value < bound

    return test
