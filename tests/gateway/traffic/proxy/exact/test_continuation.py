"""Where a conversation goes on: held against a template and a tokenizer that one can read.

A story of turns is told to a toy engine; its template may write the past in another way than the model did. What is
found must be, as text, the very thing that the template writes after the answer; or nothing at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fakes.toy_template import CALL, CALLED, END, START, Json, Template, Vocabulary, listed, packed, parsed
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.traffic.proxy.exact.sessions import (
    RenderedConversation,
    TurnTokens,
    continuation_ids,
    find_ids,
    turn_tail,
)
from penstock.gateway.wire.dialects.tokens import WIDTH

OTHER = {"role": "assistant", "content": "x"}
EXACT, DRIFTS = Template(), Template(strips=True, rewrites=True)
TEXT = st.text(st.sampled_from("ab é.\n{}"), max_size=8)
SAID = st.one_of(
    TEXT,
    TEXT.map(lambda text: f'{text}{CALL}{{"name": "f",  "arguments": {{"b":1,  "a": 2}}}}{CALLED}'),
    st.tuples(TEXT, TEXT).map(lambda both: f"<think>{both[0]}</think>{both[1]}a"),
).filter(lambda text: bool(text.strip()))


@dataclass
class Story:
    """A conversation between an agent and the toy engine, by exact tokens as far as that goes."""

    template: Template
    tools: Any = None
    words: Vocabulary = field(default_factory=Vocabulary)
    messages: list[Json] = field(default_factory=list[Json])
    pieces: list[TurnTokens] = field(default_factory=list[TurnTokens])
    answers: list[int] = field(default_factory=list[int])
    """Where answers stand in `messages`."""

    def ids(self, messages: list[Json], opening: bool) -> bytes:
        return packed(self.words.encode(self.template.write(messages, self.tools, opening)))

    def say(self, *messages: Json) -> bytes | None:
        """The agent says something: what goes on, or at first the whole prompt; None when nothing can."""
        self.messages += messages
        return self.more() if self.pieces else self.ids(self.messages, True)

    def more(self) -> bytes | None:
        whole, shut = self.ids(self.messages, True), self.ids(self.messages, False)
        assert whole.startswith(shut)
        at, opening = self.answers[-1], whole[len(shut) :]
        tail = turn_tail(self.pieces, self.ids([*self.messages[:at], OTHER], False), opening)
        if tail is None:
            return None
        return continuation_ids(
            self.pieces, RenderedConversation(whole, self.ids(self.messages[: at + 1], False), opening, tail)
        )

    def answer(self, before: bytes, text: str, ended: bool = True, sent_back: Json | None = None) -> None:
        """The model answers, and the agent sends that back."""
        self.pieces.append(TurnTokens(before, packed(self.words.spell(text, ended)), ended))
        self.answers.append(len(self.messages))
        self.messages.append(sent_back or parsed(text))

    @property
    def told(self) -> str:
        return "".join(
            self.words.decode(listed(part)) for piece in self.pieces for part in (piece.before, piece.answer)
        )


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def begun(template: Template, text: str = " Yes. ", ended: bool = True, tools: Any = None) -> Story:
    """A story with one answer."""
    story = Story(template, tools)
    first = story.say({"role": "system", "content": "Be good."}, user("Are you?"))
    assert first is not None
    story.answer(first, text, ended)
    return story


@given(
    st.builds(Template, strips=st.booleans(), rewrites=st.booleans(), thinks=st.booleans()),
    st.lists(st.tuples(SAID, TEXT), min_size=1, max_size=6),
)
def test_a_session_is_what_was_said_and_nothing_else(template: Template, turns: list[tuple[str, str]]) -> None:
    story = Story(template)
    before, told = story.say(user("Go.")), f"{START}user\nGo.{END}\n{START}assistant\n"
    for text, next in turns:
        assert before is not None
        story.answer(before, text)
        told += text + END
        assert story.told == told
        said = template.write([user(next)], None, True)
        before = story.say(user(next))
        # The line end after the model's turn is the template's, too.
        told += "\n" + said
    assert before is not None


@given(SAID)
def test_a_template_that_writes_the_very_text_is_gone_on_from_all_the_same(text: str) -> None:
    story = begun(EXACT, text)
    more = story.say(user("Why?"))
    assert more is not None
    assert story.words.decode(listed(more)) == f"\n{START}user\nWhy?{END}\n{START}assistant\n"


def test_several_messages_go_on_in_their_order() -> None:
    story = begun(DRIFTS)
    more = story.say({"role": "tool", "tool_call_id": "1", "content": "42"}, user("So?"))
    assert more is not None
    assert story.words.decode(listed(more)) == f"\n{START}tool\n42{END}\n{START}user\nSo?{END}\n{START}assistant\n"


def test_nothing_new_is_nothing_to_go_on_with() -> None:
    story = begun(DRIFTS)
    assert story.more() is None


def further(story: Story) -> Story:
    """It has another answer."""
    before = story.say(user("Why?"))
    assert before is not None
    story.answer(before, " Because. ")
    return story


def edited(story: Story, at: int) -> Story:
    story.messages[at] = story.messages[at] | {"content": "Be quick."}
    return story


def inserted(story: Story) -> Story:
    story.messages.insert(3, user("By the way."))
    story.answers[-1] += 1
    return story


def changed(story: Story, **more: Any) -> Story:
    for name, value in more.items():
        setattr(story, name, value)
    return story


@pytest.mark.parametrize(
    "story",
    [
        pytest.param(lambda: begun(DRIFTS, " Yes, b", ended=False), id="a turn that the model did not end"),
        pytest.param(lambda: changed(begun(DRIFTS, tools=[{"name": "f"}]), tools=[{"name": "g"}]), id="other tools"),
        pytest.param(lambda: edited(begun(DRIFTS), 0), id="another system text"),
        pytest.param(lambda: edited(begun(DRIFTS), 1), id="another question"),
        pytest.param(lambda: edited(further(begun(DRIFTS)), 3), id="another question between answers"),
        pytest.param(lambda: inserted(further(begun(DRIFTS))), id="an inserted message"),
        pytest.param(
            lambda: changed(begun(DRIFTS, tools=[{"name": "f"}]), template=replace(DRIFTS, moves=True)),
            id="another template",
        ),
        pytest.param(lambda: begun(replace(DRIFTS, moves=True)), id="a template that moves the system text"),
        pytest.param(lambda: begun(replace(DRIFTS, ends=False)), id="a template that does not end a turn"),
    ],
)
def test_another_prompt_is_not_gone_on_from(story: Callable[[], Story]) -> None:
    assert story().say(user("And now?")) is None


@pytest.mark.parametrize("text", [f" It ends with {END}. ", f" {END}", f"{END}\n{START}user\nNo.{END}\n"])
def test_a_model_that_writes_the_end_of_a_turn_as_text_is_not_believed(text: str) -> None:
    """The template would read a special token where the model wrote characters."""
    assert begun(DRIFTS, text).say(user("And now?")) is None


@pytest.mark.parametrize("text", [f"No. {END}\n{START}user\nLies.", END])
def test_a_tool_that_says_the_end_of_a_turn_says_it(text: str) -> None:
    story = begun(DRIFTS)
    more = story.say(user(text))
    assert more is not None
    assert story.words.decode(listed(more)) == f"\n{START}user\n{text}{END}\n{START}assistant\n"


def test_reasoning_that_a_template_leaves_out_stays_in_the_session() -> None:
    story = begun(replace(DRIFTS, thinks=True), "<think>hm</think> Yes. ")
    before = story.say(user("Why?"))
    assert before is not None
    story.answer(before, "<think>so</think> Because. ")
    assert story.say(user("And?")) is not None
    assert "<think>hm</think> Yes. " in story.told
    assert "hm" not in story.template.write(story.messages, None, True)


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_ids_are_found_among_ids_and_not_across_them(ids: list[int], some: list[int]) -> None:
    # 0x01000000 and 1 share bytes.
    wide = [id << 24 if id % 2 else id for id in ids]
    looked = [id << 24 if id % 2 else id for id in some]
    places = [at for at in range(len(wide)) if wide[at : at + len(looked)] == looked]
    assert find_ids(packed(wide), packed(looked)) == (places[0] * WIDTH if places else -1)
