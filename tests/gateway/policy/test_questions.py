"""A question ends once, however it ends."""

from __future__ import annotations

from penstock.gateway.policy.questions import End, PolicyAnswer, Question, Questions


def question(id: str, until_ns: int = 10) -> Question:
    return Question(
        id=id, rule="r", server="s", tool="t", arguments="{}", rollout="r1", attempt="a1", asked_ns=0, until_ns=until_ns
    )


def test_each_ends_once() -> None:
    questions, ends = Questions(), list[tuple[str, End]]()
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
