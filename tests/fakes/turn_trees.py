"""Random trees of calls: forks, tokens that changed, parallel calls, several choices, a client's retries, errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from fakes.tokens import Made, Talk, message
from hypothesis import strategies as st

ID = st.integers(0, 4)
"""Few ids, so that equal prompts and answers are common."""
IDS = st.lists(ID, max_size=4)


class Step(NamedTuple):
    """One more call."""

    how: str
    of: int
    """The earlier call that it has to do with, counted from any."""
    choice: int
    more: list[int]
    answers: list[list[int]]
    agent: str | None
    about: dict[str, Any]


STEPS = st.lists(
    st.builds(
        Step,
        how=st.sampled_from(["new", "on", "on", "on", "again", "retry", "retokenised", "template"]),
        of=st.integers(0, 50),
        choice=st.integers(0, 2),
        more=IDS,
        answers=st.lists(IDS, min_size=1, max_size=3),
        agent=st.sampled_from([None, None, None, "other"]),
        about=st.sampled_from(
            [*[{}] * 8, {"stream": True}, {"status": "error"}, {"ids": False}, {"logprobs": False}, {"model": "judge"}]
        ),
    ),
    max_size=14,
)


def played(steps: Iterable[Step]) -> tuple[Talk, list[Made]]:
    talk, made = Talk(), list[Made]()
    for step in steps:
        made.append(_one(talk, made, step))
    return talk, made


def _one(talk: Talk, made: list[Made], step: Step) -> Made:
    new = message("user", step.more)
    if not made or step.how == "new":
        return talk.call([*step.more, 1], step.answers, [new], agent=step.agent, **step.about)
    one = made[step.of % len(made)]
    choice = step.choice % len(one.answers)
    if step.how in ("again", "retry"):
        first = one.span.retry_of or one.span.sequence
        retry: dict[str, Any] = {"retry_of": first} if step.how == "retry" else {}
        return talk.call(one.prompt, step.answers, one.messages, agent=one.span.agent, **(step.about | retry))
    tokens = [*one.whole(choice), *step.more]
    if step.how == "retokenised":
        tokens[-1 - len(step.more)] += 1
    elif step.how == "template":
        tokens[0] += 1
    messages = [*one.said(choice), new]
    return talk.call(tokens, step.answers, messages, agent=one.span.agent, **step.about)
