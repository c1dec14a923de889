"""Templates say what they are, values stay data, candidates keep their slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.resource import Template, TemplateError, check_candidate

PIECES = st.lists(st.sampled_from(["{a}", "{b_2}", "{{", "}}", "text", "\n", "é"]), max_size=8)


@given(PIECES, st.text(max_size=9), st.text(max_size=9))
def test_a_template_is_its_source_and_renders_to_its_pieces(pieces: list[str], one: str, two: str) -> None:
    template = Template.parse("".join(pieces))
    assert template.source == "".join(pieces)
    assert Template.parse(template.source) == template
    values = {"a": one, "b_2": two}
    said = {"{a}": one, "{b_2}": two, "{{": "{", "}}": "}"}
    given = {slot: values[slot] for slot in template.slots}
    assert template.render(given) == "".join(said.get(piece, piece) for piece in pieces)


@given(st.text())
def test_any_text_is_a_template_or_a_clear_error(source: str) -> None:
    said = ""
    try:
        assert Template.parse(source).source == source
    except TemplateError as error:
        said = str(error)
    assert said.startswith("line ") or not said


def test_values_are_never_expanded_and_must_fit() -> None:
    template = Template.parse("Dear {name}, {name}: {{{text}}}")
    said = template.render({"name": "{text}{{", "text": "{name}}}"})
    assert said == "Dear {text}{{, {text}{{: {{name}}}}"
    with pytest.raises(TemplateError, match=r"^missing \{b\}, added \{c\}$"):
        Template.parse("{a} {b} {a}").render({"a": "", "c": ""})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\nbc{", "line 2, column 3: a single {; a slot is {name}, a literal brace is written {{"),
        ("}", "line 1, column 1: a single }"),
        ("{}", "line 1, column 1: {} is no slot"),
        ("ab {two words}", "line 1, column 4: {two words} is no slot"),
        ('{"key": 1}', "a literal brace is doubled"),
        ("{a\n}", "line 1, column 1: a single {"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(source: str, message: str) -> None:
    with pytest.raises(TemplateError) as error:
        Template.parse(source)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        ("Hi {who}, {who}.", "missing {date}"),
        ("{date} {who} {who} {when}", "added {when}"),
        ("{date} {who}", "missing {who}"),
        ("none", "missing {who}, missing {who}, missing {date}"),
    ],
)
def test_a_candidate_that_loses_or_adds_a_slot_is_refused_with_its_name(candidate: str, message: str) -> None:
    stable = Template.parse("{who} {who} {date}")
    with pytest.raises(TemplateError) as error:
        check_candidate(stable, Template.parse(candidate))
    assert str(error.value) == message
    check_candidate(stable, Template.parse("It is {date}. Hello {who}{who}"))


@pytest.mark.parametrize(
    ("source", "weakness"),
    [
        ("{all}", "it would match almost anything"),
        ("Hi {you}!", "shorter than 6 characters"),
        ("You are {a}{b}.", "nothing stands between {a} and {b}"),
        ("You are {a} {b}.", None),
        ("A prompt.", None),
    ],
)
def test_templates_that_tell_nothing_say_so(source: str, weakness: str | None) -> None:
    found = Template.parse(source).weakness
    assert found is None if weakness is None else weakness in (found or "")
