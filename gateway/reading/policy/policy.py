"""The decision: the first rule that matches a call decides; where none does, the call may run.

A fact that a rule needs and cannot know does not count as a no. Arguments that cannot be read, or hints that the server
has not given, satisfy a rule that restricts (deny, redact, ask, kernel) and not one that allows. A rule that cannot
read the values that it asks for refuses the call. `dry` rules only mark a call, and the rules after them still decide.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Any, Final, Literal, NamedTuple, cast

from penstock.gateway.model.base import Mode
from penstock.gateway.reading.policy.rules import (
    CallArguments,
    ConditionTest,
    PolicyRule,
    Redaction,
    UnreadableCall,
    change_at,
    compile_condition,
    text_of,
)
from penstock.gateway.wire.dialects.json_scan import compiled_paths
from penstock.gateway.wire.dialects.loose_json import AmbiguousJsonError, unambiguous

Hints = Mapping[str, Any]
HintsOf = Callable[[str, str], Hints | None]
"""Returns the annotations of a server's tool, as last listed; None where they are not known."""
_REMEMBERED: Final = 4096
"""Most tools whose rules are remembered: agents may make up names."""


class Decision(NamedTuple):
    """The decision on one call."""

    verdict: Literal["allow", "deny", "redact", "ask", "kernel"]
    rule: PolicyRule | None = None
    """The rule that decides; None where none matched."""
    problem: str | None = None
    """The part that could not be read, where the call is denied for that."""
    dry: tuple[str, ...] = ()
    """Names of `dry` rules that matched; they only mark the call."""

    @property
    def reason(self) -> str:
        """Why a call is not run, for the agent's model."""
        assert self.rule is not None
        name = f"policy rule {self.rule.name!r}"
        if self.problem is not None:
            return f"{name} must know more of this call than can be read: {self.problem}"
        return f"{name} does not allow it" + (f": {self.rule.message}" if self.rule.message else "")


ALLOWED: Final = Decision("allow")


class _RuleMatcher:
    __slots__ = ("agent", "annotations", "conditions", "modes", "restricts", "rule", "server", "tool")

    def __init__(self, rule: PolicyRule) -> None:
        self.rule = rule
        self.server, self.tool = _matcher(rule.server), _matcher(rule.tool)
        self.agent = _matcher(rule.agent) if rule.agent else None
        self.modes = frozenset(rule.mode)
        self.conditions: list[ConditionTest] = [compile_condition(one) for one in rule.argument]
        self.annotations = dict(rule.annotations)
        self.restricts = rule.verdict not in ("allow", "dry")

    def is_for(self, agent: str | None) -> bool:
        """True if the rule is about calls of this agent. One that is not named may be any."""
        return self.agent is None or (self.restricts if agent is None else self.agent(agent) is not None)

    def fits(self, hints: Hints | None) -> bool:
        """True if the known annotations of a tool satisfy the rule."""
        if not self.annotations:
            return True
        if hints is None:
            return self.rule.verdict != "allow"
        return all(_hint(hints, name) is wanted for name, wanted in self.annotations.items())


def _matcher(globs: Iterable[str]) -> Callable[[str], object]:
    return re.compile("|".join(map(translate, globs))).match


_DEFAULTS: Final = {"readOnlyHint": False, "destructiveHint": True, "idempotentHint": False, "openWorldHint": True}
"""The protocol's values for hints that a listed tool does not give."""


def _hint(hints: Hints, name: str) -> bool:
    value = hints.get(name)
    if isinstance(value, bool):
        return value
    return _DEFAULTS[name] and not (name == "destructiveHint" and hints.get("readOnlyHint") is True)


def _met(conditions: Iterable[ConditionTest], arguments: CallArguments) -> tuple[bool, str | None]:
    """(True if all conditions hold, why that cannot be told). A condition that does not hold settles it."""
    problem = None
    for condition in conditions:
        try:
            if not condition(arguments):
                return False, None
        except UnreadableCall as unreadable:
            problem = problem or str(unreadable)
    return problem is None, problem


class ToolPolicy:
    """All rules, in order, compiled once."""

    def __init__(self, rules: Sequence[PolicyRule], hints_of: HintsOf = lambda server, tool: None) -> None:
        self.rules = list(rules)
        self._compiled = [_RuleMatcher(rule) for rule in rules]
        self._hints_of = hints_of
        self._for_server: dict[tuple[str, Mode], list[_RuleMatcher]] = {}
        self._for_tool: dict[tuple[str, Mode, str], list[_RuleMatcher]] = {}

    def concerns(self, server: str, mode: Mode) -> bool:
        """True if any rule is about calls of this server in rollouts of this mode."""
        return bool(self._of_server(server, mode))

    def redacts_results(self, server: str) -> bool:
        """True if a rule may take something out of results of this server."""
        redactions = (one for one in self._compiled if one.rule.redact is not None and one.rule.redact.results)
        return any(one.server(server) for one in redactions)

    def decide(self, server: str, mode: Mode, call: ToolCall, agent: str | None = None) -> Decision:
        """Decide on a call of a tool of this server, in a rollout of this mode. `agent`: the name of the agent that
        calls it; None if nobody says."""
        dry: tuple[str, ...] = ()
        arguments = CallArguments(call.arguments)
        for one in self._of_tool(server, mode, call.tool):
            if one.agent is not None and not one.is_for(agent):
                continue
            if one.annotations and not one.fits(self._hints_of(server, call.tool)):
                continue
            met, problem = _met(one.conditions, arguments) if one.conditions else (True, None)
            if not met and problem is None:
                continue
            if one.rule.verdict == "dry":
                dry = (*dry, one.rule.name)
            elif met:
                return Decision(one.rule.verdict, one.rule, None, dry)
            elif one.restricts:
                return Decision("deny", one.rule, problem, dry)
        return Decision("allow", dry=dry) if dry else ALLOWED

    def violated_rule(self, mode: Mode, tool: str, arguments: str, agent: str | None = None) -> str | None:
        """The name of the rule that would not simply allow a tool that has run inside the agent, where nobody can stop
        it; None if none. Only rules about any server count. `arguments`: as the model has written them."""
        try:
            call = ToolCall(tool, strict(arguments.encode() or b"{}"), {})
            found = self.decide("", mode, call, agent)
        except (UnreadableCall, UnicodeEncodeError):
            found = self.decide_unreadable("", mode, "its arguments cannot be read", agent)
        return found.rule.name if found.rule is not None and found.verdict != "allow" else None

    def decide_unreadable(self, server: str, mode: Mode, problem: str, agent: str | None = None) -> Decision:
        """Decide on a message that cannot be read: it may be a call of any tool of its server."""
        concerned = [one for one in self._of_server(server, mode) if one.is_for(agent)]
        rule = next((one.rule for one in concerned if one.restricts), None)
        dry = tuple(one.rule.name for one in concerned if one.rule.verdict == "dry")
        return Decision("allow", dry=dry) if rule is None else Decision("deny", rule, problem, dry)

    def _of_server(self, server: str, mode: Mode) -> list[_RuleMatcher]:
        found = self._for_server.get((server, mode))
        if found is None:
            modes = (one for one in self._compiled if not one.modes or mode in one.modes)
            found = self._for_server[server, mode] = [one for one in modes if one.server(server)]
        return found

    def _of_tool(self, server: str, mode: Mode, tool: str) -> list[_RuleMatcher]:
        key = server, mode, tool
        found = self._for_tool.get(key)
        if found is None:
            if len(self._for_tool) >= _REMEMBERED:
                self._for_tool.clear()
            found = self._for_tool[key] = [one for one in self._of_server(server, mode) if one.tool(tool)]
        return found


# -- messages, read so strictly that no server can read another call out of the same bytes ----------------------------
#
# JSON readers differ in how they take repeated keys, keys in another case, invalid numbers, and bytes that are no
# UTF-8. A message that has any of these is `UnreadableCall`.

CALL: Final = "tools/call"
_ENVELOPE: Final = ("jsonrpc", "id", "method", "params", "result", "error")
_PARAMS: Final = ("name", "arguments", "_meta", "task")
_FOLDED: Final = {name: {key.casefold(): key for key in keys} for name, keys in (("", _ENVELOPE), ("params", _PARAMS))}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A `tools/call`, as its server reads it."""

    tool: str
    arguments: Any
    """The arguments as they are in the message; an empty object where there are none."""
    message: dict[str, Any]
    """The whole message."""

    @property
    def as_task(self) -> bool:
        """True if the result is to come later, as the answer to another request."""
        return self.message["params"].get("task") is not None


def strict(raw: bytes) -> Any:
    """Decode JSON; raises `UnreadableCall` where readers could differ."""
    try:
        return unambiguous(raw)
    except AmbiguousJsonError as ambiguous:
        raise UnreadableCall(str(ambiguous)) from None


def tool_calls(body: bytes) -> list[ToolCall | None]:
    """The tool calls among the messages of a body; None for a message that runs no tool. Raises `UnreadableCall`."""
    value = strict(body)
    several = cast(list[Any], value) if isinstance(value, list) else [value]
    return [tool_call(one) for one in several]


def tool_call(value: Any) -> ToolCall | None:
    """A message that was read strictly; None if it runs no tool. Raises `UnreadableCall`."""
    if not isinstance(value, dict):
        raise UnreadableCall("it is no object")
    message = cast(dict[str, Any], value)
    _check_names(message, "")
    if message.get("method") != CALL:
        return None
    params = message.get("params")
    if not isinstance(params, dict):
        raise UnreadableCall("it has no params")
    named = cast(dict[str, Any], params)
    _check_names(named, "params")
    tool, arguments = named.get("name"), named.get("arguments")
    if not isinstance(tool, str):
        raise UnreadableCall("its params.name is not text")
    return ToolCall(tool, {} if arguments is None else arguments, message)


def _check_names(value: dict[str, Any], where: str) -> None:
    folded = _FOLDED[where]
    for name in value:
        meant = folded.get(name) or folded.get(name.casefold())
        if meant is not None and meant != name:
            raise UnreadableCall(f"it has the key {name[:64]!r}, which some servers read as {meant!r}")


def encode_messages(messages: Sequence[Any], several: bool) -> bytes:
    """A body of these messages; raises `UnreadableCall` for a number that JSON cannot hold."""
    try:
        return json.dumps(messages if several else messages[0], separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        raise UnreadableCall("it has a number that is too large to be written again") from None
    except RecursionError:
        raise UnreadableCall("it is nested too deep") from None


# -- the values that a rule redacts, taken out of arguments and results -----------------------------------------------

TAKEN_OUT: Final = "[redacted]"
"""Stands in place of a value that was taken out."""


def redacted(value: Any, paths: list[str], rule: Redaction) -> Any:
    """The value with the rule's matches at these paths replaced; the same object when there are none. Raises
    `UnreadableCall`."""
    replace = _whole if rule.pattern is None else _within(re.compile(rule.pattern))
    try:
        return change_at(value, compiled_paths(*paths), replace)
    except RecursionError:
        raise UnreadableCall("it is nested too deep") from None


def _whole(value: Any) -> Any:
    return TAKEN_OUT


def _within(pattern: re.Pattern[str]) -> Callable[[Any], Any]:
    def replace(value: Any) -> Any:
        if isinstance(value, dict | list):
            return _each(cast("dict[str, Any] | list[Any]", value), replace)
        if value is None or isinstance(value, bool):
            return value
        text = text_of(value)
        made = pattern.sub(TAKEN_OUT, text)
        return value if made == text else made

    return replace


def _each(value: dict[str, Any] | list[Any], replace: Callable[[Any], Any]) -> Any:
    made: Any = value
    for place in list(value) if isinstance(value, dict) else range(len(value)):
        inner: Any = value[cast(Any, place)]
        new = replace(inner)
        if new is not inner:
            made = made if made is not value else value.copy()
            made[place] = new
    return made
