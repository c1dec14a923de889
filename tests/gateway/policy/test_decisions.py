"""What rules say to calls: the first that matches, and what follows where something cannot be told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.gateway.model.base import Mode
from penstock.gateway.policy.pointer import Unreadable
from penstock.gateway.policy.policy import ALLOWED, Decision, Policy
from penstock.gateway.policy.reading import ToolCall, tool_call, tool_calls, written
from penstock.gateway.policy.rules import PolicyRule


def rule(verdict: str = "deny", **given: Any) -> PolicyRule:
    """A rule; its name is its verdict if it has none."""
    if verdict == "redact":
        given.setdefault("redact", {"results": [""]})
    return PolicyRule.model_validate({"name": verdict, "verdict": verdict} | given)


def call(tool: str = "write", **arguments: Any) -> ToolCall:
    made = tool_call({"method": "tools/call", "params": {"name": tool, "arguments": arguments}})
    assert made is not None
    return made


def decide(made: ToolCall, *rules: PolicyRule, server: str = "files", mode: Mode = "online") -> Decision:
    return Policy(rules).decide(server, mode, made)


def test_without_a_rule_a_call_may_run() -> None:
    assert decide(call(), rule(tool="delete")) is ALLOWED


def test_the_first_rule_that_matches_decides() -> None:
    rules = rule("allow", tool="write"), rule("deny")
    assert [decide(call(tool), *rules).verdict for tool in ("write", "delete")] == ["allow", "deny"]


@pytest.mark.parametrize(
    ("given", "matches"),
    [
        ({"server": "files"}, True),
        ({"server": ["git*", "fi?es"]}, True),
        ({"server": "file"}, False),
        ({"tool": "wr*"}, True),
        ({"tool": "WRITE"}, False),
        ({"mode": ["train", "online"]}, True),
        ({"mode": "train"}, False),
    ],
)
def test_server_tool_and_mode(given: Any, matches: bool) -> None:
    assert (decide(call(), rule(**given)).verdict == "deny") == matches


ARGUMENTS: dict[str, Any] = {
    "path": "/etc/passwd",
    "n": 5,
    "deep": {"a/b": [{"c": "x"}, {"c": "y"}]},
    "flag": True,
    "none": None,
}


@pytest.mark.parametrize(
    ("condition", "matches"),
    [
        ({"at": "/path", "equals": "/etc/passwd"}, True),
        ({"at": "/path", "equals": "/etc"}, False),
        ({"at": "/path", "glob": "/etc/*"}, True),
        ({"at": "/path", "glob": "/etc"}, False),
        ({"at": "/path", "regex": "pass(wd|word)"}, True),
        ({"at": "/path", "regex": "^pass"}, False),
        ({"at": "/path", "absent": True}, False),
        ({"at": "/path", "absent": False}, True),
        ({"at": "/nothing", "absent": True}, True),
        ({"at": "/nothing", "absent": False}, False),
        ({"at": "/nothing", "glob": "*"}, False),
        ({"at": "/n", "above": 4.5}, True),
        ({"at": "/n", "above": 5}, False),
        ({"at": "/n", "above": 4, "below": 5}, False),
        ({"at": "/n", "above": 4, "below": 6}, True),
        ({"at": "/n", "equals": 5.0}, True),
        ({"at": "/n", "glob": "5"}, True),
        ({"at": "/none", "above": 1}, False),
        ({"at": "/flag", "equals": True}, True),
        ({"at": "/flag", "equals": False}, False),
        ({"at": "/deep/a~1b/*/c", "equals": "y"}, True),
        ({"at": "/deep/a~1b/0/c", "equals": "y"}, False),
        ({"at": "/deep/a~1b/2/c", "absent": True}, True),
        ({"at": "", "regex": "passwd"}, True),
    ],
)
def test_conditions_on_arguments(condition: Any, matches: bool) -> None:
    made = decide(call(**ARGUMENTS), rule(argument=[condition]))
    assert (made.verdict == "deny", made.problem) == (matches, None)


def test_all_conditions_must_hold_and_one_that_does_not_settles_it() -> None:
    both = [{"at": "/flag", "equals": "true"}, {"at": "/n", "above": 10}]
    assert decide(call(n=5, flag=True), rule(argument=both)) is ALLOWED
    assert decide(call(n=50, flag=True), rule(argument=both)).problem is not None
    assert decide(call(n=50, flag="true"), rule(argument=both)).problem is None


@pytest.mark.parametrize(
    ("condition", "arguments"),
    [
        ({"at": "/amount", "above": 100}, {"amount": "5000"}),
        ({"at": "/amount", "above": 100}, {"amount": True}),
        ({"at": "/force", "equals": True}, {"force": "true"}),
        ({"at": "/force", "equals": True}, {"force": 1}),
        ({"at": "/n", "equals": 5}, {"n": " 5 "}),
        ({"at": "/n", "equals": 5}, {"n": "5.0"}),
        ({"at": "/id", "equals": "7"}, {"id": 7}),
        ({"at": "/path", "glob": "/etc/*"}, {"Path": "/etc/passwd"}),
        ({"at": "/path", "glob": "/etc/*"}, {"path": "/tmp", "PATH": "/etc/passwd"}),
        ({"at": "/path", "absent": True}, {"PATH": 1}),
    ],
)
def test_what_a_server_may_read_otherwise_is_refused(condition: Any, arguments: Any) -> None:
    made = decide(call(**arguments), rule(argument=[condition], message="use less"))
    assert made.verdict == "deny"
    assert made.problem is not None
    assert "must know more of this call than can be read" in made.reason
    # Who only allows what he knows does not know this.
    assert decide(call(**arguments), rule("allow", argument=[condition]), rule("deny", name="rest")).rule == rule(
        "deny", name="rest"
    )
    assert decide(call(**arguments), rule("dry", argument=[condition])) == Decision("allow", dry=("dry",))


def test_arguments_that_are_no_object_are_refused_where_a_rule_asks_about_them() -> None:
    made = tool_call({"method": "tools/call", "params": {"name": "write", "arguments": ["/etc"]}})
    assert made is not None
    assert decide(made, rule(argument=[{"at": "/path", "glob": "/etc*"}])).problem == "its arguments are no object"
    assert decide(made, rule(tool="other", argument=[{"at": "/path", "glob": "/etc*"}])) is ALLOWED


HINTS: dict[str, Any] = {"reads": {"readOnlyHint": True}, "plain": {}, "kills": {"destructiveHint": True}}


@pytest.mark.parametrize(
    ("annotations", "tools"),
    [
        ({"readOnlyHint": True}, {"reads"}),
        ({"readOnlyHint": False}, {"plain", "kills"}),
        ({"destructiveHint": True}, {"plain", "kills"}),
        ({"destructiveHint": False}, {"reads"}),
        ({"openWorldHint": True}, {"reads", "plain", "kills"}),
        ({"readOnlyHint": False, "idempotentHint": True}, set[str]()),
    ],
)
@pytest.mark.parametrize("verdict", ["deny", "allow"])
def test_annotations_are_as_listed_and_the_protocol_says_what_is_usual(
    verdict: str, annotations: Any, tools: set[str]
) -> None:
    policy = Policy([rule(verdict, annotations=annotations)], lambda server, tool: HINTS.get(tool))
    found = {tool for tool in HINTS if policy.decide("files", "online", call(tool)).rule is not None}
    assert found == tools


def test_an_unknown_annotation_restricts_and_allows_nothing() -> None:
    wanted = {"annotations": {"readOnlyHint": True}}
    assert decide(call(), rule("allow", **wanted), rule("deny", name="rest")).verdict == "deny"
    for verdict in ("deny", "ask", "redact"):
        assert decide(call(), rule(verdict, **wanted)).verdict == verdict
    assert decide(call(), rule("dry", **wanted)).dry == ("dry",)


def test_a_dry_rule_marks_and_those_behind_it_decide() -> None:
    made = decide(call(), rule("dry"), rule("dry", name="more"), rule("ask"))
    assert (made.verdict, made.dry) == ("ask", ("dry", "more"))


def test_what_cannot_be_read_at_all_is_refused_by_the_first_rule_that_it_could_be_about() -> None:
    policy = Policy([rule("allow"), rule("dry"), rule("ask", tool="pay"), rule("deny", server="other")])
    made = policy.unreadable("files", "online", "it is not JSON")
    assert (made.verdict, made.rule and made.rule.name, made.dry) == ("deny", "ask", ("dry",))
    assert Policy([rule("allow"), rule("dry")]).unreadable("files", "online", "x") == Decision("allow", dry=("dry",))
    assert not Policy([rule(server="other")]).concerns("files", "online")
    assert not Policy([rule(mode="train")]).concerns("files", "online")


def test_what_can_be_read_and_not_be_written_again_is_refused() -> None:
    """How deep that is depends on who asks: at each depth it is one or the other."""
    rule = PolicyRule.model_validate(
        {"name": "r", "verdict": "deny", "argument": [{"at": "/x", "regex": "etc"}, {"at": "/x", "equals": "etc"}]}
    )
    policy, said = Policy([rule]), list[str | None]()
    for depth in range(800, 1000):
        arguments = '{"x": ' + "[" * depth + "]" * depth + "}"
        body = f'{{"method": "tools/call", "params": {{"name": "t", "arguments": {arguments}}}}}'
        try:
            (call,) = tool_calls(body.encode())
            assert call is not None
            said.append(policy.decide("s", "online", call).problem)
            _ = written([call.message], several=False)
        except Unreadable as error:
            said.append(str(error))
    assert (said[0], said[-1]) == (None, "it is nested too deep")


def test_what_runs_inside_the_agent_meets_the_rules_about_any_server() -> None:
    policy = Policy(
        [
            rule(server="files", tool="clock", name="of-a-server"),
            rule("allow", tool="clock", argument=[{"at": "/zone", "equals": "UTC"}]),
            rule("ask", tool="clock"),
        ]
    )
    assert policy.inside("online", "clock", '{"zone": "UTC"}') is None
    assert policy.inside("online", "clock", "") == "ask"
    assert policy.inside("online", "other", "{}") is None
    assert policy.inside("online", "clock", '{"zone": "UTC", "zone": 1}') == "ask"
    assert policy.inside("online", "clock", '{"\ud800": 1') == "ask"


def test_names_that_an_agent_makes_up_are_not_remembered_for_ever() -> None:
    policy = Policy([rule(tool="x*")])
    for number in range(10_000):
        assert (policy.decide("files", "online", call(f"x{number}")).verdict) == "deny"
    assert len(policy._for_tool) <= 4096


def test_a_reason_tells_the_model_what_to_do() -> None:
    made = decide(call(), rule(message="Ask for a refund instead."))
    assert made.reason == "policy rule 'deny' does not allow it: Ask for a refund instead."
    assert json.dumps(made.reason)
