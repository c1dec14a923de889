"""What `penstock samples` holds in memory: one rollout, or what was said in those of one group, however long the tape
is. Nothing waits for the garbage collector: a few objects with many megabytes do not make it look."""

from __future__ import annotations

import gc
import io
import json
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable
from pathlib import Path
from typing import get_args
from weakref import ref

import pytest
from fakes.memory_tape import MemoryTape, serving
from fakes.shell import Shell
from fakes.tokens import Talk, message

from penstock.adapters.chat import ChatConversation, conversations
from penstock.adapters.episode import Episode, EpisodeCall
from penstock.adapters.export import Form, Row, preferences, rows, sink
from penstock.adapters.selection import Options, SampleReport
from penstock.adapters.source import by_group
from penstock.gateway.model.rollout import RolloutSummary
from penstock.gateway.model.turn import Exchange

FORMS: tuple[Form, ...] = get_args(Form)
LARGE = "water " * 80_000
"""What a user says in a large rollout."""
ROLLOUTS, CALLS = 24, 3
MOST_GROWN = 16 << 20
"""By so much more memory all of them may need than one does: much less than the bytes of all, and about as much as one
more would take as objects."""
MEASURED = """
import sys
from pathlib import Path
from penstock.console.main import main
try:
    main(sys.argv[1:])
finally:
    status = Path("/proc/self/status").read_text()
    print(status.partition("VmHWM:")[2].split()[0], file=sys.stderr)
"""
"""Runs the command and says the most memory that it had, in KiB, in its last line."""


def talk(rollout: str, group: str | None, reward: float, said: str = "") -> Talk:
    """A conversation of several calls that is continued, forked, and of which a call is left out."""
    made = Talk(rollout=rollout, group=group, reward=reward)
    one = made.call([1], [(2,)], [message("user", [1]), {"role": "user", "content": said}])
    for turn in range(CALLS - 2):
        one = made.call([*one.whole(), 3], [(4 + turn,)], [*one.said(), message("user", [3])])
    _ = made.call([*one.whole(), 3], [(9, 8), (9, 7)], [*one.said(), message("user", [3])])
    made.call([9], [(7,)], status="error")
    return made


@pytest.fixture
def uncollected() -> Generator[None]:
    """Rings of objects stay."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def watched(talks: Iterable[Talk], alive: list[int]) -> AsyncGenerator[Episode]:
    """Their episodes; `alive`: how many calls of earlier ones there are whenever the next is asked for."""
    calls: list[ref[EpisodeCall]] = []
    for one in talks:
        episode = one.episode()
        calls += [ref(call) for it in episode.attempts for call in it.calls]
        yield episode
        del episode
        alive.append(sum(call() is not None for call in calls))


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("form", FORMS)
async def test_a_rollout_is_let_go_of_before_the_next_one_comes(form: Form) -> None:
    talks, alive = [talk(f"r{n}", f"g{n // 2}", n % 2) for n in range(6)], list[int]()
    out, report = sink(io.BytesIO(), form, "jsonl"), SampleReport()
    async for row in rows(watched(talks, alive), form, Options(), 0.0, report):
        out.write(row)
    assert alive == [0] * len(talks)
    assert (report.rollouts, report.dropped, report.reasons) == (len(talks), [], {"error": len(talks)})


@pytest.mark.usefixtures("uncollected")
async def test_what_was_said_in_a_group_is_let_go_of_before_the_next_one_comes() -> None:
    talks = [talk(f"r{n}", f"g{n // 2}", n % 2) for n in range(8)]
    held: list[int] = []
    async for _ in rows(watched(talks, []), "preferences", Options(), 0.0, SampleReport()):
        held.append(sum(isinstance(one, ChatConversation) for one in gc.get_objects()))
    # The pair, and all that was said in the rollout which began the next group.
    assert max(held) <= 4
    assert len(held) == 4


async def test_pairs_are_the_same_when_all_is_in_memory() -> None:
    """The groups come one after the other, whatever the order of the rollouts on the tape."""
    named = [("a1", "a", 0), ("b1", "b", 1), ("c", None, 1), ("a2", "a", 1), ("b2", "b", 1), ("a3", "a", 0.5)]
    talks = {name: talk(name, group, reward) for name, group, reward in named}
    together, apart = SampleReport(), SampleReport()
    held = [one for it in talks.values() for one in conversations(it.episode())[0]]
    expected = preferences(held, 0.25, together)

    async def listed() -> AsyncIterator[RolloutSummary]:
        for name, group, _ in named:
            yield RolloutSummary(id=name, group=group)

    names = await by_group(listed())
    assert names == ["a1", "a2", "a3", "b1", "b2", "c"]
    found: list[Row] = []
    async for row in rows(watched((talks[name] for name in names), []), "preferences", Options(), 0.25, apart):
        found.append(row)
    assert found == expected
    assert [(row["chosen_rollout"], row["rejected_rollout"]) for row in found] == [("a2", "a1")]
    assert (apart.pairs, apart.unpaired, apart.hints) == (together.pairs, together.unpaired, together.hints)
    assert apart.unpaired == Counter({"branch": 6, "equal": 1, "alone": 1})
    assert apart.hints[0].startswith("the rewards of 1 groups are all equal: ")
    assert "more often than 2 times" in apart.hints[0]


async def peak(shell: Shell, *arguments: str) -> tuple[int, int]:
    """Most memory of a command, and the rows that it wrote."""
    done = await shell.run("samples", *arguments)
    assert done.code == 0, done.err
    return 1024 * int(done.err.splitlines()[-1]), len(done.text.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
async def test_memory_does_not_grow_with_the_tape(form: Form, tmp_path: Path) -> None:
    tape = MemoryTape()
    for number in range(ROLLOUTS):
        one = talk(f"r{number}", f"g{number % (ROLLOUTS // 2)}", 1.0, LARGE)
        for span in one.heads:
            request, response = one.bodies[span.attempt, span.sequence]
            exchange = Exchange(
                url="u", request_headers=[], request_body=request, response_headers=[], response_body=response
            )
            tape.add(span, exchange, group=one.group, mode="train")
    async with serving(tape) as running:
        shell = Shell(running.url, tmp_path, (sys.executable, "-c", MEASURED))
        asked = ("--form", form, "--allow", "no_reward", "--allow", "unfinished")
        (one, few), (all_, many) = await peak(shell, *asked, "rollout:r1"), await peak(shell, *asked)
    assert form == "preferences" or many == ROLLOUTS * few > 0
    assert all_ - one < MOST_GROWN, f"{(all_ - one) >> 20} MB more"
    assert ROLLOUTS * CALLS * len(json.dumps(LARGE)) > 2 * MOST_GROWN
