"""Values that change by their nature are told from wording, and discovery makes slots of them."""

from __future__ import annotations

import json
import string
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import trajectories
from penstock.gateway.model.resource import Template
from penstock.gateway.releases.prompt_induction import PromptSample, find_volatile_values, kind_of, propose
from penstock.gateway.releases.prompt_recogniser import match

MOMENTS = st.datetimes(datetime(2001, 1, 1), datetime(2038, 1, 1), timezones=st.just(UTC))
DATES = (
    "%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y", "%m/%d/%Y", "%m/%d/%y", "%B %d, %Y", "%b %d, %Y", "%d %B %Y", "%A, %B %d, %Y",
    "%a %b %d %H:%M:%S UTC %Y", "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S.%f+00:00",
    "%B %d, %Y at %I:%M %p", "%Y年%m月%d日", "%d. %B %Y", "%a, %d %b %Y %H:%M:%S GMT", "%B %Y", "%Y-%m",
)  # fmt: skip
NAMES = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=8)
PATHS = st.lists(NAMES, min_size=2, max_size=5)
TIMES = ("%H:%M", "%H:%M:%S", "%I:%M %p", "%H:%M UTC")
MODELS = (
    "claude-opus-4-5-20251101", "claude-opus-4-5-20251101[1m]", "gpt-4o", "gpt-4o-mini-2024-07-18", "gpt-5.1-codex-max",
    "o3-mini", "gemini-2.5-pro", "Qwen/Qwen2.5-7B-Instruct", "us.anthropic.claude-sonnet-4-20250514-v1:0", "Opus 4.5",
    "Claude 3.5 Sonnet", "Claude Sonnet 4.5", "GPT-5", "Llama 3.3 70B Instruct", "deepseek-v3.2",
)  # fmt: skip


def path(names: list[str], how: str) -> str:
    """A path of a system."""
    return "C:\\" + "\\".join(names) if how == "C:" else how.replace("X", "/".join(names))


def version(major: int, minor: int, patch: int, end: str) -> str:
    """A version; small numbers alone could be a date."""
    return f"{major}.{minor}.{patch}{end}"


VALUES: dict[str, st.SearchStrategy[str]] = {
    "date": st.builds(datetime.strftime, MOMENTS, st.sampled_from(DATES)),
    "time": st.builds(datetime.strftime, MOMENTS, st.sampled_from(TIMES)),
    "path": st.builds(path, PATHS, st.sampled_from(("/X", "~/X", "/X/", "C:"))),
    "version": st.builds(
        version, st.integers(0, 99), st.integers(100, 999), st.integers(0, 99), st.sampled_from(("", "-rc1", "-49-amd"))
    ),
    "id": st.one_of(
        st.uuids().map(str),
        st.integers(10**8, 10**15).map(str),
        st.binary(min_size=20, max_size=20).map(lambda it: f"a1{it.hex()}"),
    ),
    "model": st.sampled_from(MODELS),
}


@pytest.mark.parametrize("kind", VALUES)
@settings(deadline=None)
@given(data=st.data())
def test_a_value_is_told_as_a_whole(kind: str, data: st.DataObject) -> None:
    value = data.draw(VALUES[kind])
    for before, after in (
        ("Use ", " from now on."),
        ("It is ", "."),
        ('The value "', '" counts'),
        ("Of the call: ", ""),
    ):
        text = before + value + after
        assert kind_of(text, len(before) - 1, len(text) - len(after), find_volatile_values(text)) == kind
        # What stands after a name of a path may belong to it; nothing else is taken along, and all of the value is.
        assert any(
            it.begin == len(before) and it.end == len(before) + len(value) for it in find_volatile_values(text)
        ), text


@pytest.mark.parametrize(
    "text",
    [
        "1.2.3 Refunds\n## 2.3.1 Bags\n- 5.1.2 Seats\nSee Section 3.1.2.",
        "At most 24 hours, $3.11, 0.75, 100000 tokens, a ratio of 3/4, and/or 50 %. 1. Never promise it.",
        "Answer /help with: Get help. </example> src/services/process.ts:712 file_path:line_number **/*.py",
        "https://docs.example.com/en/docs/overview and ftp://example.com/a/b",
        "You are Claude Code, the command line of Anthropic. Write haiku about philosophy and superb command.",
        "We close on Sunday. May I help? In March they march.",
        "utf-8, sha-256, x86_64, covid-19, 1st, 2nd, B2B, decade, defaced",
    ],
)
def test_wording_is_left_alone(text: str) -> None:
    assert find_volatile_values(text) == []


@given(st.text(max_size=60), st.sampled_from(["2026-11-22", "/home/ann/shop", "gpt-4o", "10:30", ": ", "/", "1.2.3"]))
def test_values_are_in_order_and_apart(text: str, piece: str) -> None:
    at = 0
    for one in find_volatile_values(f"{text}{piece}{text}"):
        assert at <= one.begin < one.end
        at = one.end


@pytest.mark.parametrize("piece", [
    "a1", "/", "/a", "1-", "2026-", "May ", "gpt-", "a.", "model ", ": /", "\\\\a\\", " ",
    "=/a", ".", "-.", "gpt..", "model:a", "opus ", "a/", "= /a b", "1.",
])  # fmt: skip
def test_a_long_line_is_read_soon(piece: str) -> None:
    """It would take minutes, or hours, if it were read anew from each of its places."""
    _ = find_volatile_values(piece * (60_000 // len(piece)) + '"x')


# -- what discovery makes of them ------------------------------------------------------------------------------------


def template_of(*texts: str) -> Template:
    """The one prompt in these texts, each sent by many rollouts."""
    [found] = propose([PromptSample(text, rollout=f"{at}-{text}") for at in range(20) for text in texts])
    assert found.coverage == 1
    return found.template


@settings(deadline=None, max_examples=40)
@given(data=st.data(), kind=st.sampled_from(sorted(VALUES)))
def test_what_all_messages_agree_on_is_a_slot_where_it_changes(data: st.DataObject, kind: str) -> None:
    """Found with one value, the template recognises every other."""
    one, other = data.draw(VALUES[kind]), data.draw(VALUES[kind])
    said = "You are a helpful agent for our customers.\nAbout this call: {}\nBe kind, and never promise a refund."
    template = template_of(said.format(one))
    assert template.source == said.format("{about_this_call}")
    found = match(template, said.format(other))
    assert found == {"about_this_call": other}


def test_a_slot_without_a_label_is_called_after_what_it_is() -> None:
    assert template_of("Today is 2026-11-22. You are a helpful agent.").source == (
        "Today is {date}. You are a helpful agent."
    )


CODING = """You are an interactive CLI tool that helps users with software engineering tasks.
- /help: Get help. Refer to code as file_path:line_number, as in src/services/process.ts:712.
- Never use a version below 2.0, and at most 3 tools at once.

<env>
Working directory: {cwd}
Is directory a git repo: Yes
Platform: linux
OS Version: Linux {kernel}
Today's date: {date}
</env>
You are powered by the model named {model}. The exact model ID is {id}.

Assistant knowledge cutoff is {cutoff}.
"""
"""As coding agents write their surroundings into their prompt."""
HERE = {
    "cwd": "/home/ann/shop", "kernel": "6.8.0-49-generic", "date": "2026-11-22", "model": "Opus 4.5",
    "id": "claude-opus-4-5-20251101", "cutoff": "January 2025",
}  # fmt: skip
THERE = {
    "cwd": "/Users/Bob Smith/My Project/api", "kernel": "5.15.167.4-microsoft-standard", "date": "2026-11-23",
    "model": "Claude Sonnet 4.5", "id": "claude-sonnet-4-5-20250929[1m]", "cutoff": "July 2025",
}  # fmt: skip


@pytest.mark.parametrize("changed", [*HERE, "all", "one name of a path"])
def test_a_coding_agent_in_another_place_on_another_day_is_recognised(changed: str) -> None:
    template = template_of(CODING.format(**HERE))
    assert template.slots == ("working_directory", "version", "date", "model", "model_2", "date_2")
    values = HERE | (THERE if changed == "all" else {"cwd": "/app"})
    text = CODING.format(**(values if changed not in HERE else HERE | {changed: THERE[changed]}))
    found = match(template, text)
    assert not isinstance(found, str)
    assert template.render(found) == text


NAMES_OF_CUSTOMERS = ("", "Ann", "Bob Smith", "Carl ")


@pytest.mark.parametrize("absent", [(), ("",), ("", "Carl ")])
def test_the_spaces_around_a_value_stay_in_the_prompt(absent: tuple[str, ...]) -> None:
    """Also where some values are empty, or end with a space."""
    names = [name for name in NAMES_OF_CUSTOMERS if name not in absent]
    template = template_of(*(f"You are an agent. Speak to {name} politely." for name in names))
    assert template.source == "You are an agent. Speak to {slot1} politely."


@pytest.mark.skipif(not trajectories.DATA.exists(), reason="no trajectories at ../shared/data")
def test_the_prompt_of_real_agents_is_recognised_at_another_time() -> None:
    """`The current time is 2024-05-15 15:00:00 EST.` stands in each of them."""
    request, _ = next(iter(next(iter(trajectories.agents()))))
    text = json.loads(request)["messages"][0]["content"]
    template = template_of(text)
    assert "The current time is {date}." in template.source
    found = match(template, text.replace("2024-05-15 15:00:00 EST", "2026-11-22 09:30:11 CET"))
    assert found == {"date": "2026-11-22 09:30:11 CET"}
