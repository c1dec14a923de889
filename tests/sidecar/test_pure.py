"""The runner's decisions that need neither process nor gateway."""

from __future__ import annotations

import asyncio
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
from fakes.goldens import check_widths
from fakes.runs import PATIENCE
from fakes.waiting import until
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, Group, RenderableType
from rich.text import Text

from penstock.gateway.model.queue import Claim, Event
from penstock.gateway.model.rollout import Attempt, Judgement, Rollout
from penstock.sidecar.run import runner
from penstock.sidecar.run.agent.environment import (
    LARGEST_VARIABLE,
    TaskTemplateError,
    environment,
    fill,
    launch_plan,
    variables,
)
from penstock.sidecar.run.agent.process import LONGEST_LINE, AgentOutput, LineDecoder, parse_json_line
from penstock.sidecar.run.attempt import LARGEST_BATCH, LARGEST_EVENT, Journal
from penstock.sidecar.run.progress import AttemptResult, AttemptTally, TerminalProgress
from penstock.sidecar.run.reward_judge import RewardError, parse_printed_reward
from penstock.sidecar.run.runner import gpus
from penstock.sidecar.run.settings import AgentSettings, UsageError, seconds, variable

ADDRESS = "/rollout/r/attempt/a1/mode/train"
URL = "http://gateway:4747"


def claim(task: Any = None) -> Claim:
    """A claim of a task."""
    return Claim(
        rollout=Rollout(id="r", input=task), attempt=Attempt(rollout="r", id="a1"), address=ADDRESS, token="pst"
    )


# -- templates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{question}", "why?"),
        ("-q={question}!", "-q=why?!"),
        ("{item.id} {item}", '7 {"id":7}'),
        ("{choices.1} {none} {yes}", "b null true"),
        ("{token} {input.token}", "T task's"),
        ('{{question}} {"a": 1} { x }', '{question} {"a": 1} { x }'),
        ("{input.item.id}", "7"),
    ],
)
def test_templates(template: str, expected: str) -> None:
    task = {"question": "why?", "item": {"id": 7}, "choices": ["a", "b"], "none": None, "yes": True, "token": "task's"}
    assert fill(template, task, {"token": "T"}) == expected


@pytest.mark.parametrize(
    ("template", "task", "message"),
    [
        ("{b}", {"a": 1}, "'{b}' asks for 'b', which the task does not have: its fields are a"),
        ("{a.b}", {"a": 1}, "'{a.b}' asks for 'a.b', which the task does not have: there is 1"),
        ("{a.2}", {"a": [1]}, "there is a list of 1"),
        ("{a}", "text", 'there is "text"'),
    ],
)
def test_a_field_that_is_missing_is_named(template: str, task: Any, message: str) -> None:
    with pytest.raises(TaskTemplateError) as error:
        _ = fill(template, task, {})
    assert message in str(error.value)


@given(st.text())
def test_text_without_braces_is_left_alone(text: str) -> None:
    plain = text.replace("{", "").replace("}", "")
    assert fill(plain, {}, {}) == plain


# -- environment -------------------------------------------------------------------------------------------------------


def test_what_agents_inherit() -> None:
    inherited = {
        "PATH": "/bin",
        "PENSTOCK_ADMIN_KEY": "admin",
        "MY_COPY": "admin",
        "OPENAI_API_KEY": "sk-real",
        "OTEL_RESOURCE_ATTRIBUTES": "team=blue",
        "SSL_CERT_FILE": "/ca.pem",
        "CURL_CA_BUNDLE": "/other.pem",
        "HTTPS_PROXY": "http://proxy",
        "NO_PROXY": "internal",
    }
    made = environment(inherited, variables(claim(), URL), "admin")
    assert made["PATH"] == "/bin"
    assert "admin" not in made.values()
    assert made["OPENAI_API_KEY"] == "pst"
    assert made["OTEL_RESOURCE_ATTRIBUTES"] == "team=blue,penstock.rollout_id=r,penstock.attempt_id=a1"
    assert (made["NODE_EXTRA_CA_CERTS"], made["CURL_CA_BUNDLE"]) == ("/ca.pem", "/other.pem")
    assert made["NO_PROXY"] == made["no_proxy"] == "internal,gateway"
    assert made["OTEL_EXPORTER_OTLP_HEADERS"] == "authorization=Bearer%20pst"
    hint = "CLAUDE_CODE_GATEWAY_HINT_HEADERS"
    assert made[hint] == "1"
    assert environment({hint: "0"}, variables(claim(), URL), None)[hint] == "0"
    assert environment({hint: "0"}, {**variables(claim(), URL), hint: "1"}, None)[hint] == "1", "as --env sets it"


def test_large_tasks_go_into_a_file() -> None:
    small, large = (
        launch_plan(claim("x" * n), URL, AgentSettings(command=("a",)), Path("/f")) for n in (10, LARGEST_VARIABLE)
    )
    assert (small.own["PENSTOCK_INPUT"], small.file) == (f'"{"x" * 10}"', None)
    assert large.file == Path("/f")
    assert "PENSTOCK_INPUT" not in large.own
    assert large.stdin == large.task.encode() + b"\n"


# -- output ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=20)), st.data())
def test_lines_are_the_same_however_they_come(lines: list[bytes], data: st.DataObject) -> None:
    clean = [line.replace(b"\n", b"").replace(b"\r", b"") for line in lines]
    text = b"".join(line + b"\n" for line in clean) + b"end"
    cut = data.draw(st.integers(0, len(text)))
    found = LineDecoder()
    got = [*found.feed(text[:cut]), *found.feed(text[cut:]), *found.close()]
    assert got == [line.decode(errors="replace") for line in clean] + ["end"]


def test_a_line_without_an_end_takes_no_more_memory_than_it_may() -> None:
    found = LineDecoder()
    assert [len(line) for line in found.feed(b"x" * (2 * LONGEST_LINE + 5))] == [LONGEST_LINE] * 2
    assert found.close() == ["xxxxx"]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        (" 0.5 ", 0.5),
        ("[1]", [1]),
        ("done", None),
        ("NaN", None),
        ("{'a': 1}", None),
        ("", None),
        (r'{"cut": "\ud83d", "whole": "\ud83d\ude00"}', {"cut": "?", "whole": "\U0001f600"}),
        ("[" * 102 + "]" * 102, None),
        ("9" * 5000, None),
    ],
)
def test_what_is_json(line: str, value: Any) -> None:
    assert parse_json_line(line) == value


def test_the_last_json_line_is_the_output() -> None:
    outputs = AgentOutput(lambda stream, line: None)
    outputs.feed("stdout", b'{"step": 1}\nthinking\n{"answer": 4}\nbye')
    outputs.feed("stdout", b"")
    outputs.feed("stderr", b"first\nlast words\n\n")
    assert (outputs.result, outputs.last_words) == ({"answer": 4}, "last words")


# -- the journal -------------------------------------------------------------------------------------------------------


class Tape:
    """Takes events, when it is let."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.open = asyncio.Event()

    async def send(self, events: list[Event]) -> bool:
        """One batch."""
        _ = await self.open.wait()
        self.events += events
        return True


async def test_while_the_gateway_is_away_a_bounded_part_is_kept() -> None:
    tape = Tape()
    journal = Journal(tape.send, 1000)
    running = asyncio.ensure_future(journal.run())
    for number in range(10_000):
        journal.line("stdout", str(number))
    journal.event("exit", {})
    tape.open.set()
    journal.close()
    await running
    tape.events += await journal.last()
    texts = "\n".join(str(event.attributes["text"]) for event in tape.events if event.name == "stdout")
    numbers = list(map(int, texts.split()))
    assert numbers == sorted(numbers)
    assert (numbers[0], numbers[-1]) == (0, 9999)
    assert len(texts) <= 1000
    assert [event.attributes["piece"] for event in tape.events] == list(range(1, len(tape.events) + 1))
    assert "output_dropped" in [event.name for event in tape.events]


async def test_the_last_batch_is_left_to_the_caller() -> None:
    tape = Tape()
    tape.open.set()
    journal = Journal(tape.send, 4 * LARGEST_BATCH)
    running = asyncio.ensure_future(journal.run())
    journal.line("stdout", "one")
    journal.line("stderr", "two")
    journal.line("stderr", "three")
    journal.line("stdout", "x" * (LARGEST_EVENT + 1))
    journal.close()
    await running
    last = await journal.last()
    assert not tape.events
    assert [(event.name, len(str(event.attributes["text"]))) for event in last] == [
        ("stdout", 3), ("stderr", 9), ("stdout", LARGEST_EVENT), ("stdout", 1),
    ]  # fmt: skip
    assert await journal.last() == []


async def test_what_does_not_fit_in_the_last_batch_is_sent_before() -> None:
    tape = Tape()
    tape.open.set()
    journal = Journal(tape.send, 4 * LARGEST_BATCH)
    for number in range(LARGEST_BATCH // LARGEST_EVENT + 1):
        journal.event(f"e{number}", {"text": "x" * LARGEST_EVENT})
    journal.close()
    assert [event.name for event in await journal.last()] == [f"e{LARGEST_BATCH // LARGEST_EVENT}"]
    assert len(tape.events) == LARGEST_BATCH // LARGEST_EVENT


async def test_what_is_refused_is_sent_no_more() -> None:
    async def refuse(events: list[Event]) -> bool:
        refused.append(len(events))
        return False

    refused: list[int] = []
    journal = Journal(refuse, 4 * LARGEST_BATCH)
    for number in range(3):
        journal.event(f"e{number}", {"text": "x" * LARGEST_BATCH})
    journal.close()
    assert await journal.last() == []
    assert refused == [1]


# -- rewards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ({"answer": 1}, []),
        ([1], []),
        (0.5, []),
        ({"reward": None}, []),
        ({"reward": 1}, [Judgement(value=1.0, source="runner", key="runner-output")]),
        (
            {"reward": 0.5, "rewards": {"style": 1}, "reason": "ok", "other": "x"},
            [Judgement(value=0.5, dimensions={"style": 1}, reason="ok", source="runner", key="runner-output")],
        ),
    ],
)
def test_rewards_in_an_output(output: Any, expected: list[Judgement]) -> None:
    assert parse_printed_reward(output, judged=False) == expected
    assert {judgement.source for judgement in parse_printed_reward(output, judged=True)} <= {"agent"}


@pytest.mark.parametrize("output", [{"reward": "high"}, {"reward": 1e999}, {"rewards": [1]}, {"rewards": {"a": "b"}}])
def test_what_is_no_reward_is_refused(output: Any) -> None:
    with pytest.raises(RewardError):
        _ = parse_printed_reward(output, judged=False)


# -- options and figures -----------------------------------------------------------------------------------------------


def test_options() -> None:
    assert [seconds("--timeout", text) for text in ("90s", "1.5h", "250ms")] == [90, 5400, 0.25]
    assert variable("A=b=c") == ("A", "b=c")
    for wrong in (lambda: seconds("-t", "0s"), lambda: variable("1A=b")):
        with pytest.raises(UsageError):
            _ = wrong()


@pytest.mark.slow
async def test_an_nvidia_smi_that_hangs_keeps_no_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho x >> {tmp_path}/asked\nsleep 600\necho 1, 1\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(runner, "SMI_S", 0.3)
    meter = runner.Meter()
    async with asyncio.timeout(PATIENCE):
        assert (await meter.read([os.getpid()])).gpu_percent is None
        await until((tmp_path / "asked").exists)
        # One that has ended meanwhile is followed by another.
        while (tmp_path / "asked").read_text() == "x\n":
            assert (await meter.read([])).gpu_percent is None
            await asyncio.sleep(0.01)


def test_what_nvidia_smi_prints() -> None:
    assert gpus("97, 1024\n3, 512\n") == (97.0, 1536 << 20)
    assert gpus("[N/A], [N/A]\n") == (None, None)
    assert gpus("No devices were found\n") == (None, None)


def test_a_tally_reads_as_a_sentence() -> None:
    tally = AttemptTally()
    tally.ends.update(succeeded=2, lost=1)
    tally.rewarded, tally.reward = 2, 1.5
    assert str(tally) == "2 succeeded, 0 failed, 1 lost, mean reward 0.750 of 2"


def test_progress_fits_any_terminal() -> None:
    shown = TerminalProgress(echo=False, most=200, clock=lambda: 100.0)
    tally = AttemptTally(rewarded=188, reward=98.4)
    tally.ends.update(succeeded=188, failed=9, timeout=2)
    pieces: list[RenderableType] = [*shown.picture(), Text()]
    for _ in range(199):
        shown.on_begin(claim(), waiting=1)
        shown.on_end(AttemptResult("q1.0", "a1", "w", "succeeded", 1.0), tally)
    check_widths("run-progress", Group(*pieces, *shown.picture()))


def test_progress_says_what_goes_on_and_leaves_the_tally_to_the_command() -> None:
    """Nothing waits while agents run, and the last line would stand twice on a terminal."""

    def said() -> list[str]:
        return [str(piece) for piece in shown.picture() if isinstance(piece, Text)]

    with TerminalProgress(echo=False, most=None, clock=lambda: 100.0) as shown:
        assert said() == ["asking for work"]
        shown.on_begin(claim(), waiting=1)
        shown.on_begin(claim(), waiting=0)
        assert said() == ["2 running"]
        shown.on_end(AttemptResult("q1.0", "a1", "w", "succeeded", 1.0), AttemptTally())
    assert said() == []


def test_what_an_agent_prints_goes_where_it_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where stderr is a terminal, and has the bar."""
    name = "/".join((claim().rollout.id, claim().attempt.id))
    with TerminalProgress(echo=True, most=None, clock=lambda: 100.0) as shown:
        shown.line(claim(), "stdout", "to a file")
        shown.line(claim(), "stderr", "to the terminal")
    said = capsys.readouterr()
    assert said.out == f"{name} | to a file\n"
    assert "to the terminal" in said.err
    assert "to a file" not in said.err


@pytest.mark.parametrize(("most", "length"), [(None, 3), (10, 10)])
def test_what_is_given_back_is_not_done(most: int | None, length: int) -> None:
    """Its rollout waits again, and the bar is as long as before."""
    tally = AttemptTally()
    with TerminalProgress(echo=False, most=most, clock=lambda: 100.0) as shown:

        def ends(end: str) -> str:
            shown.on_begin(claim(), waiting=2 - tally.done)
            result = AttemptResult("q1.0", "a1", "w", end, 1.0)  # pyright: ignore[reportArgumentType]
            tally.add(result)
            shown.on_end(result, tally)
            return bar()

        def bar() -> str:
            written = io.StringIO()
            Console(width=80, file=written).print(*shown.picture())
            (found,) = re.findall(r"(\d+/\d+) ", written.getvalue())
            return found

        assert ends("succeeded") == f"1/{length}"
        assert ends("environment") == ends("returned") == f"1/{length}"
        assert ends("failed") == f"2/{length}"
        # What the runner takes back later, because agents could not work.
        tally.hand_back(AttemptResult("q1.0", "a1", "w", "failed", 1.0))
        shown.on_hand_back(tally)
        assert bar() == f"1/{length}"
        assert ends("succeeded") == f"2/{length}"


def test_a_summary_says_why_attempts_have_no_reward() -> None:
    tally = AttemptTally()
    failed = AttemptResult("f", "a1", "w", "failed", 1.0)
    wrong = AttemptResult("q", "a1", "w", "succeeded", 1.0, no_reward="KeyError:\n 'x'")
    for result in (failed, failed, failed, wrong, AttemptResult("n", "a1", "w", "succeeded", 1.0)):
        tally.add(result)
    tally.hand_back(failed)
    tally.add(AttemptResult("r", "a1", "w", "returned", 1.0))
    ends = "2 succeeded, 2 failed, 1 given back, 1 handed back"
    missing = "4 without a reward (2 failed; 1 got none: KeyError: 'x'; 1 got none)"
    assert (tally.summary(judged=False), tally.summary(judged=True)) == (ends, f"{ends}, {missing}")
    tally.add(AttemptResult("q", "a1", "w", "succeeded", 1.0, 0.5))
    assert tally.summary(judged=False).endswith(f"mean reward 0.500 of 1, {missing}")


def test_nothing_to_do_is_told() -> None:
    assert str(AttemptTally()) == "no attempt was made; `penstock queue` says what waits"
