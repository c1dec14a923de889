"""The pinned version stands where the agent's own text stood; every other byte is the agent's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from fakes.odd_json import joined, written
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.model.resource import Template
from penstock.gateway.releases.catalog import RewriteResult, find_resources, write_versions
from penstock.gateway.releases.prompt_recogniser import (
    PlaceholderError,
    Recogniser,
    RegisteredText,
    placeholders,
    sha256,
)
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.request_body import encoded, spans

STABLE = Template.parse("You are an agent.\nCustomer: {customer}\nToday: {date}")
OTHER = Template.parse("Today is {date}. Help {customer} — “at once”.")
TOOL = Template.parse("Finds flights.")
KNOWN = Recogniser([RegisteredText("planner", STABLE), RegisteredText("find-text", TOOL, "find")])
VALUES = {"customer": 'Ann "the {date}"\n', "date": "2026-05-15"}
OWN = STABLE.render(VALUES)


def ask(name: str, text: str) -> Any:
    """A request of a dialect with this system text."""
    user = {"role": "user", "content": text}
    requests: dict[str, Any] = {
        "chat": {"messages": [{"role": "system", "content": text}, user], "model": "m"},
        "responses": {"model": "m", "instructions": text, "input": [user]},
        "messages": {"system": [{"type": "text", "text": text, "cache_control": {}}], "messages": [user]},
        "gemini": {"systemInstruction": {"parts": [{"text": text}]}, "contents": [{"parts": [{"text": text}]}]},
    }
    return requests[name]


def rewrite(
    body: bytes, name: str, recogniser: Recogniser, versions: Mapping[str, Template], explicit: str | None = None
) -> RewriteResult:
    """Finds and writes in one go."""
    return write_versions(body, find_resources(body, by_name(name), recogniser, explicit), versions)


DIALECT_NAMES = ("chat", "responses", "messages", "gemini")


def sent(asked: Any, name: str = "chat", version: Template = OTHER, explicit: str | None = None) -> RewriteResult:
    """A request rewritten with one pinned version."""
    body = asked if isinstance(asked, bytes) else json.dumps(asked, ensure_ascii=False).encode()
    return rewrite(body, name, KNOWN, {"planner": version, "find-text": version}, explicit)


@pytest.mark.parametrize("name", DIALECT_NAMES)
def test_the_pinned_version_is_written_into_every_dialect(name: str) -> None:
    done = sent(ask(name, OWN), name)
    wanted = json.dumps(ask(name, OWN), ensure_ascii=False)
    old, new = (json.dumps(text, ensure_ascii=False) for text in (OWN, OTHER.render(VALUES)))
    assert done.body.decode() == wanted.replace(old, new, 1)
    [use] = done.uses
    assert (use.resource, use.slots, use.sha256, use.matched_by) == ("planner", VALUES, sha256(OWN), "fingerprint")


@pytest.mark.parametrize("name", DIALECT_NAMES)
@settings(deadline=None, max_examples=40)
@given(values=st.fixed_dictionaries({"customer": st.text(max_size=8), "date": st.text(max_size=8)}), seed=st.integers())
def test_the_version_that_the_agent_sent_is_a_no_op(name: str, values: dict[str, str], seed: int) -> None:
    body = written(ask(name, STABLE.render(values)), Random(seed)).encode()
    for version in (STABLE, Template.parse(STABLE.source)):
        assert sent(body, name, version).body is body
    there = sent(body, name)
    if there.uses:
        back = rewrite(there.body, name, Recogniser([RegisteredText("planner", OTHER)]), {"planner": STABLE})
        assert not back.uses or json.loads(back.body) == json.loads(body)


def test_a_version_that_says_the_same_is_a_no_op() -> None:
    body = json.dumps(ask("chat", OWN)).encode()
    renamed = Recogniser([RegisteredText("planner", Template.parse(STABLE.source))])
    assert rewrite(body, "chat", renamed, {"planner": STABLE}).body is body


@pytest.mark.parametrize("text", ["You are another agent.", "", OWN + " "])
def test_what_is_not_registered_passes_untouched(text: str) -> None:
    body = json.dumps(ask("chat", text)).encode()
    done = sent(body)
    assert done.body is body or done.uses[0].slots["date"] == VALUES["date"] + " "
    assert [miss.why for miss in done.misses] == (["miss"] if text == "You are another agent." else [])


def test_an_ambiguous_text_passes_untouched() -> None:
    done = sent(ask("chat", OWN + "\nToday: x"))
    assert [miss.why for miss in done.misses] == ["ambiguous"]
    assert done.uses == []


def test_a_version_with_other_slots_is_not_written() -> None:
    body = json.dumps(ask("chat", OWN)).encode()
    done = sent(body, version=Template.parse("Hello {customer}, {mood}"))
    assert done.body is body
    assert [(miss.why, miss.detail) for miss in done.misses] == [("slots", "planner: missing {mood}, added {date}")]


def test_a_resource_without_a_version_is_unknown() -> None:
    body = json.dumps(ask("chat", OWN)).encode()
    done = rewrite(body, "chat", KNOWN, {})
    assert done.body is body
    assert [(miss.why, miss.detail) for miss in done.misses] == [("unknown", "there is no version of 'planner'")]


def test_several_texts_of_a_request_are_rewritten_at_once() -> None:
    asked = {"instructions": OWN, "input": [{"role": "developer", "content": [{"type": "input_text", "text": OWN}]}]}
    done = sent(asked, "responses")
    new = OTHER.render(VALUES)
    parts = [{"type": "input_text", "text": new}]
    assert json.loads(done.body) == {"instructions": new, "input": [{"role": "developer", "content": parts}]}
    assert len(done.uses) == 2


def test_descriptions_of_tools_are_rewritten_by_name() -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": text, "parameters": {"description": "Finds flights."}},
        }
        for name, text in (("find", "Finds flights."), ("other", "Finds flights."), ("find", "Changed."))
    ]
    done = sent({"messages": [], "tools": tools}, version=Template.parse("Looks for flights."))
    said = [it["function"]["description"] for it in json.loads(done.body)["tools"]]
    assert said == ["Looks for flights.", "Finds flights.", "Changed."]
    assert [it["function"]["parameters"]["description"] for it in json.loads(done.body)["tools"]] == [
        "Finds flights."
    ] * 3
    assert [(miss.why, miss.place.name) for miss in done.misses] == [("miss", "find")]


# -- placeholders and explicit names ---------------------------------------------------------------------------------


def system(done: RewriteResult) -> str:
    """The system text of a rewritten chat request."""
    return json.loads(done.body)["messages"][0]["content"]


def test_a_placeholder_is_replaced_where_it_stands() -> None:
    text = 'First. {{penstock:planner customer="{date} \\"x\\"" date="{{penstock:planner}}"}} Last. {{penstock:nobody}}'
    done = sent(ask("chat", text))
    assert system(done) == (
        "First. "
        + OTHER.render({"customer": '{date} "x"', "date": "{{penstock:planner}}"})
        + " Last. {{penstock:nobody}}"
    )
    assert [use.matched_by for use in done.uses] == ["placeholder"]
    assert [miss.why for miss in done.misses] == ["unknown"]


def test_placeholders_of_users_are_not_looked_at() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "{{penstock:planner}}"}]}).encode()
    done = sent(body, version=Template.parse("Secret prompt."))
    assert done.body is body
    assert (done.uses, done.misses) == ([], [])


def test_a_placeholder_inside_a_value_is_data() -> None:
    values = {"customer": "{{penstock:planner}}", "date": "now"}
    done = sent(ask("chat", STABLE.render(values)))
    assert system(done) == OTHER.render(values)


def test_a_placeholder_without_the_values_that_the_version_needs_stays() -> None:
    done = sent(ask("chat", 'A {{penstock:planner date="x"}}'))
    assert system(done) == 'A {{penstock:planner date="x"}}'
    assert [(miss.why, miss.detail) for miss in done.misses] == [("slots", "planner: missing {customer}")]


@pytest.mark.parametrize(
    "rest", ["", "}}", "a b}}", 'a b="}}', "a b=c}}", 'a b="c"', 'a b="\\q"}}', "ä}}", 'a b="c"d="e"}}']
)
def test_a_placeholder_that_cannot_be_read_is_said_to_be_wrong(rest: str) -> None:
    with pytest.raises(PlaceholderError, match="at character 3: "):
        placeholders("ab {{penstock:" + rest)
    body = json.dumps(ask("chat", "{{penstock:" + rest)).encode()
    done = sent(body)
    assert done.body is body
    assert [miss.why for miss in done.misses] == ["placeholder"]


def test_an_explicit_name_comes_first() -> None:
    fixed = Template.parse("Be brief.")
    both = Recogniser(
        [RegisteredText("a", Template.parse("You are {x}.")), RegisteredText("b", Template.parse("You are an {x}."))]
    )
    body = json.dumps(ask("chat", "You are an owl.")).encode()
    assert rewrite(body, "chat", both, {"b": fixed}).misses[0].why == "ambiguous"
    versions = {"b": Template.parse("Be an {x}!")}
    assert system(rewrite(body, "chat", both, versions, "b")) == "Be an owl!"
    done = sent(ask("chat", "{{penstock:other}} or anything"), version=fixed, explicit="planner")
    assert (system(done), done.uses[0].matched_by) == ("Be brief.", "explicit")
    assert sent(ask("chat", "anything"), explicit="planner").misses[0].why == "slots"


# -- bytes -----------------------------------------------------------------------------------------------------------

ODD = st.text(st.sampled_from('aé漢😀\ud83d\ude00"\\\n/{\x7f\x01') | st.characters(), max_size=6)


@pytest.mark.parametrize("name", DIALECT_NAMES)
@settings(deadline=None, max_examples=60)
@given(values=st.fixed_dictionaries({"customer": ODD, "date": ODD}), seed=st.integers(0, 9999))
def test_only_the_literal_changes(name: str, values: dict[str, str], seed: int) -> None:
    """To the same bytes as if the whole text had been decoded, rendered and encoded."""
    text = joined(STABLE.render(values))
    body, dialect = written(ask(name, text), Random(seed)).encode(), by_name(name)
    done = sent(body, name)
    assert len(done.uses) + len(done.misses) == 1
    for use in done.uses:
        [(start, end)] = spans(body, [use.place])
        assert json.loads(body[start:end]) == use.place.text == text
        assert use.sha256 == sha256(text)
        assert STABLE.render(use.slots) == text
        assert done.body == body[:start] + encoded(OTHER.render(use.slots)) + body[end:]
        [there] = dialect.system_texts(done.body).places
        assert there.text == joined(OTHER.render(use.slots))


@pytest.mark.parametrize("odd", [b"7" * 5000, b"[" * 10_000 + b"]" * 10_000, b"NaN", rb'"\ud83d"'])
def test_a_text_that_stands_twice_is_found_past_what_decoders_refuse(odd: bytes) -> None:
    asked = json.dumps(ask("chat", OWN)).encode()
    plain, done = sent(asked), sent(asked[:-1] + b', "seed": ' + odd + b"}")
    assert plain.uses
    assert done.body == plain.body[:-1] + b', "seed": ' + odd + b"}"
