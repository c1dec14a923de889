"""What rules say to calls: the first that matches, and what follows where something cannot be told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.process import ROOT
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from penstock.gateway.api.openapi import field_docs
from penstock.gateway.config import load
from penstock.gateway.model.base import Mode
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.reading.policy.policy import (
    ALLOWED,
    CALL,
    Decision,
    ToolCall,
    ToolPolicy,
    encode_messages,
    redacted,
    tool_call,
    tool_calls,
)
from penstock.gateway.reading.policy.questions import PolicyAnswer, Question, QuestionEnd, QuestionQueue
from penstock.gateway.reading.policy.rules import (
    Condition,
    PolicyRule,
    Redaction,
    UnreadableCall,
    Verdict,
    change_at,
    values_at,
)
from penstock.gateway.wire.dialects.json_scan import compiled_paths


def rule(verdict: str = "deny", **given: Any) -> PolicyRule:
    """A rule; its name is its verdict if it has none."""
    if verdict == "redact":
        given.setdefault("redact", {"results": ["**"]})
    return PolicyRule.model_validate({"name": verdict, "verdict": verdict} | given)


def call(tool: str = "write", **arguments: Any) -> ToolCall:
    made = tool_call({"method": "tools/call", "params": {"name": tool, "arguments": arguments}})
    assert made is not None
    return made


def decide(made: ToolCall, *rules: PolicyRule, server: str = "files", mode: Mode = "online") -> Decision:
    return ToolPolicy(rules).decide(server, mode, made)


def test_the_first_rule_that_matches_decides() -> None:
    """Without one a call may run."""
    assert decide(call(), rule(tool="delete")) is ALLOWED
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


@pytest.mark.parametrize(
    ("verdict", "agent", "matches"),
    [
        ("deny", "Explore", True), ("deny", "Plan", False), ("deny", "", False), ("deny", None, True),
        ("allow", "Explore", True), ("allow", "Plan", False), ("allow", None, False),
    ],
)  # fmt: skip
def test_a_call_that_names_no_agent_may_be_any_agents(verdict: Verdict, agent: str | None, matches: bool) -> None:
    policy = ToolPolicy([rule(verdict, agent=["Expl*", "custom"]), rule("ask", name="rest")])
    found = policy.decide("files", "online", call(), agent)
    assert (found.verdict == verdict) == matches
    assert (policy.decide_unreadable("files", "online", "?", agent).rule == policy.rules[0]) == (
        matches and verdict == "deny"
    )


ARGUMENTS: dict[str, Any] = {"path": "/etc/passwd", "n": 5, "flag": True, "none": None}
ARGUMENTS["deep"] = {"a/b": [{"c": "x"}, {"c": "y"}]}


@pytest.mark.parametrize(
    ("condition", "matches"),
    [
        ({"at": "path", "equals": "/etc/passwd"}, True),
        ({"at": "path", "equals": "/etc"}, False),
        ({"at": "path", "glob": "/etc/*"}, True),
        ({"at": "path", "glob": "/etc"}, False),
        ({"at": "path", "regex": "pass(wd|word)"}, True),
        ({"at": "path", "regex": "^pass"}, False),
        ({"at": "path", "absent": True}, False),
        ({"at": "path", "absent": False}, True),
        ({"at": "nothing", "absent": True}, True),
        ({"at": "nothing", "absent": False}, False),
        ({"at": "nothing", "glob": "*"}, False),
        ({"at": "n", "above": 4.5}, True),
        ({"at": "n", "above": 5}, False),
        ({"at": "n", "above": 4, "below": 5}, False),
        ({"at": "n", "above": 4, "below": 6}, True),
        ({"at": "n", "equals": 5.0}, True),
        ({"at": "n", "glob": "5"}, True),
        ({"at": "none", "above": 1}, False),
        ({"at": "flag", "equals": True}, True),
        ({"at": "flag", "equals": False}, False),
        ({"at": 'deep["a/b"].*.c', "equals": "y"}, True),
        ({"at": 'deep["a/b"][0].c', "equals": "y"}, False),
        ({"at": 'deep["a/b"][2].c', "absent": True}, True),
        ({"at": "**", "regex": "passwd"}, True),
    ],
)
def test_conditions_on_arguments(condition: Any, matches: bool) -> None:
    made = decide(call(**ARGUMENTS), rule(argument=[condition]))
    assert (made.verdict == "deny", made.problem) == (matches, None)


def test_all_conditions_must_hold_and_one_that_does_not_settles_it() -> None:
    both = [{"at": "flag", "equals": "true"}, {"at": "n", "above": 10}]
    assert decide(call(n=5, flag=True), rule(argument=both)) is ALLOWED
    assert decide(call(n=50, flag=True), rule(argument=both)).problem is not None
    assert decide(call(n=50, flag="true"), rule(argument=both)).problem is None


@pytest.mark.parametrize(
    ("condition", "arguments"),
    [
        ({"at": "amount", "above": 100}, {"amount": "5000"}),
        ({"at": "amount", "above": 100}, {"amount": True}),
        ({"at": "force", "equals": True}, {"force": "true"}),
        ({"at": "force", "equals": True}, {"force": 1}),
        ({"at": "n", "equals": 5}, {"n": " 5 "}),
        ({"at": "n", "equals": 5}, {"n": "5.0"}),
        ({"at": "id", "equals": "7"}, {"id": 7}),
        ({"at": "path", "glob": "/etc/*"}, {"Path": "/etc/passwd"}),
        ({"at": "path", "glob": "/etc/*"}, {"path": "/tmp", "PATH": "/etc/passwd"}),
        ({"at": "path", "absent": True}, {"PATH": 1}),
        ({"at": "edits[0].path", "glob": "/etc/*"}, {"edits": {"0": {"path": "/etc/passwd"}}}),
        ({"at": "edits[0].path", "absent": True}, {"edits": {"0": {"path": "/etc/passwd"}}}),
        ({"at": "prices.1.amount", "above": 100}, {"prices": [{"amount": 500}, {"amount": 500}]}),
        ({"at": 'a.*["1"]', "absent": True}, {"a": [[1, 2]]}),
    ],
)
def test_what_a_server_may_read_otherwise_is_refused(condition: Any, arguments: Any) -> None:
    made = decide(call(**arguments), rule(argument=[condition], message="use less"))
    assert made.verdict == "deny"
    assert made.problem is not None
    assert "more of this call than can be read" in made.reason
    # Who only allows what he knows does not know this.
    rest = rule("deny", name="rest")
    assert decide(call(**arguments), rule("allow", argument=[condition]), rest).rule == rest
    assert decide(call(**arguments), rule("dry", argument=[condition])) == Decision("allow", dry=("dry",))


def test_arguments_that_are_no_object_are_refused_where_a_rule_asks_about_them() -> None:
    made = tool_call({"method": "tools/call", "params": {"name": "write", "arguments": ["/etc"]}})
    assert made is not None
    assert decide(made, rule(argument=[{"at": "path", "glob": "/etc*"}])).problem == "its arguments are no object"
    assert decide(made, rule(tool="other", argument=[{"at": "path", "glob": "/etc*"}])) is ALLOWED


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
    policy = ToolPolicy([rule(verdict, annotations=annotations)], lambda server, tool: HINTS.get(tool))
    found = {tool for tool in HINTS if policy.decide("files", "online", call(tool)).rule is not None}
    assert found == tools


def test_an_unknown_annotation_restricts_and_allows_nothing() -> None:
    wanted = {"annotations": {"readOnlyHint": True}}
    assert decide(call(), rule("allow", **wanted), rule("deny", name="rest")).verdict == "deny"
    for verdict in ("deny", "ask", "redact"):
        assert decide(call(), rule(verdict, **wanted)).verdict == verdict
    assert decide(call(), rule("dry", **wanted)).dry == ("dry",)


def test_a_dry_rule_marks_and_those_behind_it_decide() -> None:
    reason = decide(call(), rule(message="Ask for a refund instead.")).reason
    assert reason == "policy rule 'deny' does not allow it: Ask for a refund instead."
    made = decide(call(), rule("dry"), rule("dry", name="more"), rule("ask"))
    assert (made.verdict, made.dry) == ("ask", ("dry", "more"))


def test_what_cannot_be_read_at_all_is_refused_by_the_first_rule_that_it_could_be_about() -> None:
    policy = ToolPolicy([rule("allow"), rule("dry"), rule("ask", tool="pay"), rule("deny", server="other")])
    made = policy.decide_unreadable("files", "online", "it is not JSON")
    assert (made.verdict, made.rule and made.rule.name, made.dry) == ("deny", "ask", ("dry",))
    assert ToolPolicy([rule("allow"), rule("dry")]).decide_unreadable("files", "online", "x") == Decision(
        "allow", dry=("dry",)
    )
    assert not ToolPolicy([rule(server="other")]).concerns("files", "online")
    assert not ToolPolicy([rule(mode="train")]).concerns("files", "online")


def test_what_can_be_read_and_not_be_written_again_is_refused() -> None:
    """How deep that is depends on who asks: at each depth it is one or the other."""
    rule = PolicyRule.model_validate(
        {"name": "r", "verdict": "deny", "argument": [{"at": "x", "regex": "etc"}, {"at": "x", "equals": "etc"}]}
    )
    policy, said = ToolPolicy([rule]), list[str | None]()
    for depth in range(800, 1000):
        arguments = '{"x": ' + "[" * depth + "]" * depth + "}"
        body = f'{{"method": "tools/call", "params": {{"name": "t", "arguments": {arguments}}}}}'
        try:
            (call,) = tool_calls(body.encode())
            assert call is not None
            said.append(policy.decide("s", "online", call).problem)
            _ = encode_messages([call.message], several=False)
        except UnreadableCall as error:
            said.append(str(error))
    assert (said[0], said[-1]) == (None, "it is nested too deep")


def test_what_runs_inside_the_agent_meets_the_rules_about_any_server() -> None:
    of_a_server, utc = rule(server="files", tool="clock", name="of-a-server"), [{"at": "zone", "equals": "UTC"}]
    policy = ToolPolicy([of_a_server, rule("allow", tool="clock", argument=utc), rule("ask", tool="clock")])
    assert policy.violated_rule("online", "clock", '{"zone": "UTC"}') is None
    assert policy.violated_rule("online", "clock", "") == "ask"
    assert policy.violated_rule("online", "other", "{}") is None
    assert policy.violated_rule("online", "clock", '{"zone": "UTC", "zone": 1}') == "ask"
    assert policy.violated_rule("online", "clock", '{"\ud800": 1') == "ask"


def test_names_that_an_agent_makes_up_are_not_remembered_for_ever() -> None:
    policy = ToolPolicy([rule(tool="x*")])
    for number in range(10_000):
        assert (policy.decide("files", "online", call(f"x{number}")).verdict) == "deny"
    assert len(policy._for_tool) <= 4096


# -- rules are strict: what is wrong names the field, the value and the way out ----------------------------------------


def rules(tmp_path: Path, text: str) -> list[PolicyRule]:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return load(path).policy


def test_a_rule_says_what_it_matches_and_what_follows(tmp_path: Path) -> None:
    (one,) = rules(
        tmp_path,
        '[[policy]]\nname = "pay"\nserver = "bank"\ntool = ["pay_*", "send"]\nmode = "online"\nverdict = "ask"\n'
        'wait = 60.0\nannotations = { readOnlyHint = false }\n[[policy.argument]]\nat = "amount"\nabove = 100\n',
    )
    assert (one.server, one.tool, one.mode) == (["bank"], ["pay_*", "send"], ["online"])
    assert (one.verdict, one.wait) == ("ask", 60)
    assert (one.argument[0].at, one.argument[0].above, one.annotations) == ("amount", 100, {"readOnlyHint": False})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('verdict = "no"', "policy 'r': verdict: 'no' is not 'allow', 'deny', 'redact', 'ask', 'kernel' or 'dry'"),
        ('verdict = "deny"\nargument = [{ at = "/a/*/b~1c/0", glob = "*" }]', 'no path: write a.*["b/c"][0]'),
        ('verdict = "deny"\nredact = { results = [""] }', "results 1: '' is a JSON pointer and no path: write **"),
        ('verdict = "deny"\nredact = { results = ["/a/0"] }', 'write a[0], or ["0"] for [0] where that is the name'),
        ('verdict = "deny"\nargument = [{ at = "a", regex = "(" }]', "argument 1: regex: it is no regular expression"),
        ('verdict = "deny"\nargument = [{ at = "a" }]', "'a' says nothing of its value: add equals, glob"),
        ('verdict = "deny"\nargument = [{ at = "a", absent = true, above = 1 }]', "'a' is absent and has a value"),
        ('verdict = "redact"', "verdict is 'redact': add redact ="),
        ('verdict = "deny"\nredact = { results = ["**"] }', "verdict is 'deny': leave redact out"),
        ('verdict = "redact"\nredact = { pattern = "a" }', "policy 'r': redact: it names no place: add arguments"),
        ('verdict = "kernel"', """verdict is 'kernel': add kernel = "module:name\""""),
        ('verdict = "kernel"\nkernel = "module"', "policy 'r': kernel: 'module' is not module:name"),
        ('verdict = "ask"\nkernel = "a:b"', "verdict is 'ask': leave kernel out"),
        ('verdict = "deny"\ntol = "a"', "policy 'r': tol: unknown key; did you mean 'tool'?"),
        ('verdict = "deny"\nargument = [{ at = "a", globb = "*" }]', "globb: unknown key; did you mean 'glob'?"),
        ('verdict = "deny"\nannotations = { readonly = true }', "policy 'r': annotations"),
        ('verdict = "deny"\n[[policy]]\nname = "r"\nverdict = "deny"', "policy names must differ: r"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _ = rules(tmp_path, f'[[policy]]\nname = "r"\n{line}\n')
    assert said in str(caught.value)


@pytest.mark.parametrize(("model", "heading"), [(Condition, "Arguments"), (Redaction, "Redaction")])
def test_every_key_of_a_table_within_a_rule_is_documented(model: type[BaseModel], heading: str) -> None:
    page = (ROOT / "docs" / "policies.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert {row[0].strip("`"): row[2] for row in rows} == field_docs(model)


# -- messages that two readers could understand in two ways are not understood -----------------------------------------


GOOD = {"jsonrpc": "2.0", "id": 1, "method": CALL, "params": {"name": "write", "arguments": {"Name": 1, "name": 2}}}


def test_a_call_and_what_is_none() -> None:
    one, other = tool_calls(json.dumps([GOOD, {"jsonrpc": "2.0", "id": 2, "method": "ping"}]).encode())
    assert one is not None
    assert (one.tool, one.arguments, one.message, one.as_task) == ("write", {"Name": 1, "name": 2}, GOOD, False)
    assert other is None
    for without in (b'{"name":"x"}', b'{"name":"x","arguments":null}'):
        (one,) = tool_calls(b'{"method":"tools/call","params":%b}' % without)
        assert one is not None
        assert one.arguments == {}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"method":"ping","method":"tools/call","params":{"name":"x"}}', "the key 'method' stands twice"),
        (b'{"method":"ping","m\\u0065thod":"tools/call"}', "the key 'method' stands twice"),
        (b'{"method":"tools/call","params":{"name":"a","name":"b"}}', "the key 'name' stands twice"),
        (b'{"method":"tools/call","params":{"name":"a","arguments":{"p":1,"p":2}}}', "the key 'p' stands twice"),
        (b'{"Method":"tools/call","params":{"name":"a"}}', "'Method', which some servers read as 'method'"),
        (b'{"method":"ping","METHOD":"tools/call"}', "'METHOD', which some servers read as 'method'"),
        ('{"method":"tools/call","param\u017f":{"name":"a"},"params":{"name":"b"}}'.encode(), "read as 'params'"),
        (b'{"method":"tools/call","params":{"name":"a","Arguments":{}}}', "'Arguments', which some servers read"),
        (b'{"method":"tools/call","params":{"name":7}}', "its params.name is not text"),
        (b'{"method":"tools/call","params":[]}', "it has no params"),
        (b'{"method":"tools/call","params":{"name":"a","arguments":{"n":NaN}}}', "NaN is no JSON"),
        (b"\xef\xbb\xbf{}", "it is not JSON"),
        ('{"method":"tools/call"}'.encode("utf-16"), "it is not UTF-8"),
        (b'{"method":"tools/call","params":{"name":"\xff"}}', "it is not UTF-8"),
        (b'{"method":"tools/call"} {}', "it is not JSON"),
        (b'"tools/call"', "it is no object"),
        (b'[{"method":"ping"}, 7]', "it is no object"),
        (b"[" * 100_000 + b"]" * 100_000, "it is nested too deep"),
        (b"", "it is not JSON"),
    ],
)  # fmt: skip
def test_what_cannot_be_read(body: bytes, said: str) -> None:
    with pytest.raises(UnreadableCall) as caught:
        _ = tool_calls(body)
    assert said in str(caught.value)


def test_what_is_written_again_says_the_same() -> None:
    value = {"a": 1.0, "b": 12345678901234567890123, "c": "\ud800 \u20ac", "d": [True, None, 1e-7]}
    assert json.loads(encode_messages([value], several=False)) == value
    assert json.loads(encode_messages([value, 1], several=True)) == [value, 1]
    with pytest.raises(UnreadableCall, match="too large"):
        _ = encode_messages([json.loads("1e999")], several=False)


def test_paths() -> None:
    value: Any = {"a": [{"b": 1}, {"b": 2}], "x/y": {"~": 3}, "": 4, "1": {"b": 5}}
    for path, expected in {
        "a[*].b": [1, 2], "a.*.b": [1, 2], "a[1].b": [2], "**.b": [1, 2, 5], "1.b": [5], "[2].b": [], '["x/y"].~': [3],
        '[""]': [4], "a.b.c": [], "a[2]": [],
    }.items():  # fmt: skip
        assert values_at(value, compiled_paths(path)) == expected
    [whole] = values_at(value, compiled_paths("**"))
    assert whole is value
    assert values_at({"a": [1] * 20_000}, compiled_paths("**.b")) == []
    assert values_at({"a": {"a": 1}}, compiled_paths("**.a")) == [{"a": 1}, 1]
    with pytest.raises(UnreadableCall, match="more than"):
        _ = values_at([0] * 20_000, compiled_paths("*"))


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none(), lambda it: st.lists(it, max_size=3) | st.dictionaries(st.sampled_from("ab1"), it), max_leaves=12
)
STEPS = st.sampled_from([".a", ".b", ".*", ".**.a", "[*]", "[1]", '["1"]'])


@given(value=VALUES, written=st.lists(st.lists(STEPS, min_size=1, max_size=4).map("".join), min_size=1, max_size=2))
def test_policies_change_what_masking_rules_mask(value: Any, written: list[str]) -> None:
    paths, gone = compiled_paths(*(one.removeprefix(".") for one in written)), object()

    def compare(one: Any, made: Any, path: tuple[str | int, ...]) -> None:
        assert (made is gone) == paths.lead_to(path)
        inside: Any = cast("dict[str, Any]", one).items() if isinstance(one, dict) else enumerate(one or ())
        for key, inner in inside:
            compare(inner, gone if made is gone else made[key], (*path, key))

    try:
        made = change_at(value, paths, lambda _: gone)
    except UnreadableCall:
        # Masking rules follow bytes for the tape; a policy must not guess what a server takes a number for.
        assert re.search(r"\[1\]|\[\"1\"\]", " ".join(written))
    else:
        compare(value, made, ())


def test_only_what_is_changed_is_copied() -> None:
    value: Any = {"a": [{"b": 1}, {"b": 2}], "c": {}}
    made = change_at(value, compiled_paths("a[*].b"), lambda one: 9 if one == 2 else one)
    assert made == {"a": [{"b": 1}, {"b": 9}], "c": {}}
    assert value == {"a": [{"b": 1}, {"b": 2}], "c": {}}
    assert made["a"][0] is value["a"][0]
    assert change_at(value, compiled_paths("a[*].b"), lambda one: one) is value
    assert change_at(value, compiled_paths("z"), lambda one: 9) is value
    assert change_at(value, compiled_paths("**.a", "a[0].b"), lambda one: 9) == {"a": 9, "c": {}}


# -- what is taken out of arguments and results, and what stays --------------------------------------------------------


RESULT: dict[str, Any] = {
    "content": [{"type": "text", "text": "mail a@b.de or c@d.de"}, {"type": "image", "data": "xx"}],
    "structuredContent": {"mail": "a@b.de", "card": 4111111111111111, "ok": True, "none": None},
}


def test_whole_values() -> None:
    made = redacted(RESULT, ["structuredContent.mail", "content[*].data"], Redaction(results=["**"]))
    assert made["structuredContent"] == RESULT["structuredContent"] | {"mail": "[redacted]"}
    assert made["content"] == [RESULT["content"][0], {"type": "image", "data": "[redacted]"}]


def test_what_a_pattern_finds_anywhere_below() -> None:
    made = redacted(RESULT, ["**"], Redaction(results=["**"], pattern=r"[\w.]+@[\w.]+|4[0-9]{15}"))
    assert made["content"][0]["text"] == "mail [redacted] or [redacted]"
    assert made["structuredContent"] == {"mail": "[redacted]", "card": "[redacted]", "ok": True, "none": None}


def test_nothing_to_take_out_is_the_same_object() -> None:
    for paths, pattern in ((["nothing"], None), (["**"], "zzz")):
        assert redacted(RESULT, paths, Redaction(results=["**"], pattern=pattern)) is RESULT


def test_what_cannot_be_told_is_an_error() -> None:
    with pytest.raises(UnreadableCall, match="some servers read as 'mail'"):
        _ = redacted({"Mail": 1}, ["mail"], Redaction(results=["**"]))
    deep: Any = "a@b.de"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UnreadableCall, match="too deep"):
        _ = redacted(deep, ["**"], Redaction(results=["**"], pattern="@"))


# -- a question ends once, however it ends -----------------------------------------------------------------------------


def question(id: str, until_ns: int = 10) -> Question:
    about = {"rule": "r", "server": "s", "tool": "t", "arguments": "{}", "rollout": "r1", "attempt": "a1"}
    return Question(id=id, asked_ns=0, until_ns=until_ns, **about)


def test_each_ends_once() -> None:
    questions, ends = QuestionQueue(), list[tuple[str, QuestionEnd]]()
    for id in ("a", "b", "c", "d"):
        questions.ask(question(id, 10 if id == "b" else 99), lambda end, id=id: ends.append((id, end)))
    assert [one.id for one in questions.waiting] == ["a", "b", "c", "d"]
    said = PolicyAnswer(verdict="approve", who="me")
    assert questions.answer("a", said) == question("a", 99)
    assert questions.answer("a", said) is None
    questions.sweep(9)
    questions.sweep(10)
    questions.sweep(10)
    assert questions.take_back("c")
    assert not questions.take_back("c")
    questions.close()
    questions.close()
    assert ends == [("a", said), ("b", "timeout"), ("d", "stopped")]
    assert questions.waiting == []
