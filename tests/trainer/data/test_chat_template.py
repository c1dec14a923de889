"""Conversations become examples in the words of the model's own template, and answers are told from prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes.tiny_model import make_tokenizer

from examples.lookup_model import TEMPLATE
from penstock.trainer.data.training_examples import tokenise
from penstock.trainer.mathematics.batch import TokenExample

CALL = {"id": "1", "type": "function", "function": {"name": "wheel", "arguments": '{"water": "the mill"}'}}
QUESTION = {"role": "user", "content": "how is the wheel?"}
DEEP = "[" * 100_000
TOLD = {"role": "tool", "tool_call_id": "1", "content": "it turns"}


@dataclass
class Chat:
    messages: list[dict[str, Any]]
    rollout: str = "r1"
    attempt: str = "a1"
    tools: list[Any] = field(default_factory=list[Any])


def asked(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "weight": 1} | more


def called(arguments: str) -> dict[str, Any]:
    return {**CALL, "function": {"name": "wheel", "arguments": arguments}}


def spelled(one: TokenExample, tokenizer: Any) -> list[tuple[str, bool]]:
    """The response as runs of text, True where it is trained."""
    runs: list[tuple[list[int], bool]] = []
    for token, trained in zip(one.response.tolist(), one.mask.tolist(), strict=True):
        if not runs or runs[-1][1] != trained:
            runs.append(([], trained))
        runs[-1][0].append(token)
    return [(tokenizer.decode(ids), trained) for ids, trained in runs]


def test_a_conversation_with_tools_is_one_sequence() -> None:
    tokenizer = make_tokenizer()
    messages = [QUESTION, asked(None, tool_calls=[CALL]), TOLD, asked("it turns.")]
    (made,), left = tokenise([Chat(messages)], tokenizer)
    assert not left
    assert tokenizer.decode(made.prompt) == "<|im_start|>user\nhow is the wheel?<|im_end|>\n<|im_start|>assistant\n"
    assert spelled(made, tokenizer) == [
        ('<tool_call>\n{"name": "wheel", "arguments": {"water": "the mill"}}\n</tool_call><|im_end|>', True),
        ("\n<|im_start|>tool\nit turns<|im_end|>\n<|im_start|>assistant\n", False),
        ("it turns.<|im_end|>", True),
        ("\n", False),
    ]
    # The whole is what the template makes of it at once.
    whole = tokenizer.decode([*made.prompt.tolist(), *made.response.tolist()])
    opened = {**CALL, "function": {"name": "wheel", "arguments": {"water": "the mill"}}}
    plain = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [opened]}, TOLD, messages[3]]
    assert whole == tokenizer.apply_chat_template(plain, tokenize=False)
    assert made.owner == ("r1", "a1")
    assert sorted(set(made.sequences[made.mask].tolist())) == [0, 1]


def test_answers_without_weight_are_context() -> None:
    tokenizer = make_tokenizer()
    messages = [QUESTION, asked("wrong", weight=0), QUESTION, asked("right")]
    (made,), _ = tokenise([Chat(messages)], tokenizer)
    assert spelled(made, tokenizer) == [("right<|im_end|>", True), ("\n", False)]
    assert "wrong" in tokenizer.decode(made.prompt)


THINKING = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n"
    "{%- if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "<|im_end|>{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


def test_a_template_that_drops_reasoning_makes_an_example_of_each_answer() -> None:
    """What was thought is gone when the next answer is given: each is trained on in the context it had."""
    tokenizer = make_tokenizer(THINKING)
    messages = [
        QUESTION,
        asked("one", reasoning_content="the water"),
        QUESTION,
        asked("two", reasoning_content="the mill"),
    ]
    made, left = tokenise([Chat(messages)], tokenizer)
    assert not left
    assert [spelled(one, tokenizer) for one in made] == [
        [("<think>the water</think>one<|im_end|>", True)],
        [("<think>the mill</think>two<|im_end|>", True)],
    ]
    assert "the water" not in tokenizer.decode(made[1].prompt)


MARKED = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n"
    "{%- if m.role == 'assistant' -%}{%- generation -%}{{ m.content }}<|im_end|>{%- endgeneration -%}"
    "{%- else -%}{{ m.content }}<|im_end|>{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


def test_marks_of_a_template_that_has_them_agree() -> None:
    """`{% generation %}` says the same; it is not needed."""
    tokenizer = make_tokenizer(MARKED)
    messages = [QUESTION, asked("the wheel"), QUESTION, asked("the water")]
    (made,), _ = tokenise([Chat(messages)], tokenizer)
    theirs = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    assert [*made.prompt.tolist(), *made.response.tolist()] == theirs["input_ids"]
    assert [*[0] * len(made.prompt), *made.mask.astype(int).tolist()] == theirs["assistant_masks"]


@pytest.mark.parametrize(
    ("template", "messages", "reason", "detail"),
    [
        (TEMPLATE, [QUESTION], "unmarked", "none of its answers"),
        (TEMPLATE, [QUESTION, asked("x", weight=0)], "unmarked", "none of its answers"),
        (
            TEMPLATE,
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, asked("x")],
            "content",
            "the type 'image_url'; only text",
        ),
        (TEMPLATE, [QUESTION, asked(None, tool_calls=[{"id": "1"}])], "content", "not as OpenAI writes it: KeyError"),
        (TEMPLATE, [{"role": "user", "content": ["x"]}, asked("x")], "content", "not as OpenAI writes it"),
        (TEMPLATE, [QUESTION, asked(None, tool_calls=[called('{"water": "\\ud83d"}')])], "content", "half a character"),
        # It asks with an open thought and renders answers without one.
        (TEMPLATE.replace("assistant\n{%", "assistant\n<think>{%"), [QUESTION, asked("x")], "template", "message 1"),
        ("{{ raise_exception('system first') }}", [QUESTION, asked("x")], "template", "system first"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_reported(template: str, messages: list[Any], reason: str, detail: str) -> None:
    fine = Chat([QUESTION, asked("the wheel")], rollout="r2")
    made, (left,) = tokenise([Chat(messages), fine][: 1 + (template == TEMPLATE)], make_tokenizer(template))
    assert (left.owner, left.reason) == (("r1", "a1"), reason)
    assert detail in left.detail
    assert len(made) == (template == TEMPLATE)


def test_text_in_parts_and_broken_arguments_are_rendered_as_engines_do() -> None:
    tokenizer = make_tokenizer()
    broken = called('{"water"')
    parts = {"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "mill"}]}
    (made,), left = tokenise([Chat([parts, asked("", tool_calls=[broken])])], tokenizer)
    assert not left
    assert "the\nmill" in tokenizer.decode(made.prompt)
    assert '"arguments": "{\\"water\\""}' in spelled(made, tokenizer)[0][0]


def test_arguments_that_are_nested_too_deep_are_the_text_that_they_are() -> None:
    tokenizer = make_tokenizer()
    (made,), left = tokenise([Chat([QUESTION, asked(None, tool_calls=[called(DEEP)])])], tokenizer)
    assert not left
    assert f'"arguments": "{DEEP}"' in spelled(made, tokenizer)[0][0]
