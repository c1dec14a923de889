"""The commands of resources, prompts and releases, as people run them, against a real gateway; and what they show."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import lmdb
import pytest
from fakes.experiment import CANDIDATE, SKIP, STABLE, Traffic, policy, prompt
from fakes.local import Local, locally
from fakes.mistakes import tells
from fakes.process import PATIENCE, Gateway, upstreams
from fakes.provider import serving
from fakes.shell import Shell
from fakes.tape import Tape

from penstock.console.commands import resources, watch
from penstock.console.commands.verify import verify_release
from penstock.console.main import main
from penstock.gateway.client.client import Client
from penstock.gateway.client.connection import ClientError
from penstock.gateway.client.console import CommandError
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.release import (
    Assignment,
    AssignmentEvidence,
    AuditTrailEntry,
    NewRelease,
    Release,
    ReleaseView,
)
from penstock.gateway.model.release_policy import CanaryStage
from penstock.gateway.model.resource import Audience, Template
from penstock.gateway.model.span import Span
from penstock.gateway.releases.prompt_induction import FEWEST, PromptProposal
from penstock.gateway.tape.store.environment import DATABASES

SHORT = (
    "\n".join(f'{stage} = "skip"' for stage in SKIP)
    + "\nmargin_absolute = 0.1\nguards.margin = 0.3\nholdback.rollouts = 0\n[[stages]]\nsplit = 0.5\nrollouts = 3\n"
)


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(STABLE)
    (tmp_path / "two.txt").write_text(CANDIDATE)
    (tmp_path / "short.toml").write_text(SHORT)


@pytest.fixture
async def traffic(local: Local, client: Client, http: aiohttp.ClientSession) -> Traffic:
    return await registered(local.url, client, http)


async def registered(url: str, client: Client, http: aiohttp.ClientSession) -> Traffic:
    """Agents of a registered prompt that has a second version."""
    _ = await client.add_version("travel", prompt(STABLE, sent=True))
    _ = await client.add_version("travel", prompt(CANDIDATE))
    return Traffic(url, http, client)


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


# --- resources ---


@pytest.mark.slow
async def test_versions_are_added_shown_and_compared(shell: Shell) -> None:
    first = await shell.run("resource", "add", "travel", "--file", "one.txt", "--sent", "--author", "ann")
    assert (first.err, first.text) == ("", "travel@v1 is registered with the slots date.\n")
    again = await shell.run("resource", "add", "travel", "--file", "-", "--sent", stdin=STABLE.encode())
    assert tells(again.text, "travel@v1", "already")
    second = ("resource", "add", "travel", "--file", "two.txt", "--parent", "v1", "--version", "careful")
    (made,) = (await shell.run(*second, "--note", "ask first", "--json")).rows
    assert (made["version"], made["parent"], made["note"], made["content"]["text"]) == (
        "careful", "v1", "ask first", CANDIDATE,
    )  # fmt: skip
    assert made["author"] == (await shell.run("resource", "show", "travel@careful", "--json")).rows[0]["author"] != ""
    listed, piped, shown, one, diff = await asyncio.gather(
        shell.run("resource", "list"),
        shell.run("resource", "show", "travel@v1", "--text"),
        shell.run("resource", "show", "travel"),
        shell.run("resource", "show", "travel@v1"),
        shell.run("resource", "diff", "travel", "v1", "careful"),
    )
    assert words(listed.text)[1][:5] == ["travel", "prompt", "v1", "careful", "2"]
    assert [line[0] for line in words(shown.text)] == ["travel", "version", "v1", "careful"]
    assert piped.text == STABLE, "not byte for byte: an edited copy would not be recognised as the same prompt"
    assert "author  ann\n" in one.text
    assert one.text.endswith(f"\n\n{STABLE}\n")
    assert diff.text.splitlines()[:2] == ["--- travel@v1", "+++ travel@careful"]
    assert f"-{STABLE}\n+You are a careful travel agent of Acme Air. It is {{date}}.\n" in diff.text


@pytest.mark.slow
async def test_models_and_tools_are_resources_too(shell: Shell) -> None:
    model = ("resource", "add", "policy", "--upstream", "fake-openai", "--base", "m", "--adapter")
    (one,) = (await shell.run(*model, "/a/1", "--version", "v12", "--json")).rows
    assert (one["kind"], one["content"]) == ("model", {"upstream": "fake-openai", "base": "m", "adapter": "/a/1"})
    await shell.run(*model, "/a/2", "--served", "fresh")
    fields = await shell.run("resource", "diff", "policy", "v12", "v2")
    assert "-adapter: /a/1\n+adapter: /a/2\n+served: fresh\n" in fields.text
    (tool,) = (await shell.run("resource", "add", "find", "--tool", "find", "--file", "one.txt", "--json")).rows
    assert (tool["kind"], tool["content"]["tool"]) == ("tool-text", "find")


WRONG: list[tuple[tuple[str, ...], int, str]] = [
    (("resource", "add", "x"), 2, "say what it is: --file TEXT for a prompt"),
    (("resource", "add", "x", "--file", "none.txt"), 1, "none.txt: No such file or directory"),
    (("resource", "add", "x", "--file", "odd.txt"), 1, "odd.txt is not UTF-8: byte 3"),
    (("resource", "add", "x", "--file", "brace.txt"), 2, "brace.txt: line 2, column 3: a single {"),
    (("resource", "add", "x", "--base", "m"), 2, "a model needs --upstream"),
    (("resource", "add", "x", "--upstream", "u", "--file", "one.txt"), 2, "--upstream is for a model"),
    (("resource", "add", "x", "--upstream", "u", "--base", "m", "--adapter", "a"), 2, "content.adapter: "),
    (("resource", "add", "a b", "--file", "one.txt"), 1, "resource: 'a b' is not an id"),
    (
        ("resource", "add", "travel", "--file", "slotless.txt"),
        1,
        "slotless.txt: its slots are not those of travel@v1: missing {date}",
    ),
    (("resource", "show", "none"), 1, "there is no resource 'none'; `penstock resource list`"),
    (("resource", "show", "travel@v9"), 1, "'travel' has no version 'v9'; it has v1, v2"),
    (("resource", "show", "travel", "--text"), 2, "--text prints one version: travel@VERSION --text, without --json"),
    (("resource", "diff", "travel", "v1", "v9"), 1, "'travel' has no version 'v9'"),
    (("prompts", "check", "slotless.txt"), 1, "slotless.txt: no registered prompt"),
    (("prompts", "check", "two.txt"), 1, "two.txt: a version of travel that agents do not send"),
    (("prompts", "discover", "--register", "x"), 1, "no prompt was found, and so none is registered"),
    (("prompts", "discover", "statsu:x"), 1, "did you mean 'status'?"),
    (("release", "start", "travel"), 2, "--candidate is missing."),
    (("release", "start", "travel", "--candidate", "v9", "--hold-split"), 1, "'travel' has no version 'v9'"),
    (("release", "start", "travel", "--candidate", "v2"), 1, "no reward of it has been recorded"),
    (("release", "start", "none", "--candidate", "v2", "--hold-split"), 1, "there is no resource 'none'"),
    (("release", "start", "travel", "--candidate", "v2", "--policy", "no.toml"), 1, "no.toml: No such file"),
    (("release", "start", "travel", "--candidate", "v2", "--policy", "bad.toml"), 1, "did you mean 'margin'?"),
    (("release", "start", "travel", "--candidate", "v2", "--only", "agnet=a"), 2, "--only: 'agnet=a' is not"),
    (("release", "start", "travel", "--candidate", "v2", "--only", "mode=x"), 2, "--only mode: 'x' is not 'train'"),
    (("release", "start", "travel", "--candidate", "v2", "--who", "gateway"), 2, "give the name of a person"),
    (("release", "status", "none"), 1, "there is no release 'none'"),
    (("release", "bogus"), 2, 'Unknown command "bogus"'),
    (("release", "status", "--gateway", "http://127.0.0.1:1", "x"), 1, "is `penstock serve` running?"),
]


async def test_errors_are_one_line(
    shell: Shell, traffic: Traffic, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (shell.folder / "odd.txt").write_bytes(b"ab\xff")
    (shell.folder / "brace.txt").write_text("Hello\nyo{u\n")
    (shell.folder / "slotless.txt").write_text("Nothing to fill in.")
    (shell.folder / "bad.toml").write_text("margi = 0.1\n")
    monkeypatch.chdir(shell.folder)
    monkeypatch.setenv("PENSTOCK_GATEWAY", traffic.url)
    for arguments, code, message in WRONG:
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(main, list(arguments))
        out, err = capsys.readouterr()
        assert (ended.value.code, out if "discover" not in arguments else "") == (code, ""), arguments
        assert message in err, arguments
        assert err.startswith("penstock: ")
        assert err.count("\n") == 1, arguments


# --- prompts ---


async def asked(traffic: Traffic, count: int) -> None:
    """Agents that send a prompt with another day each."""
    for number in range(count):
        await traffic.call(f"d{number}", STABLE.replace("{date}", f"day {number} of the month"))
    await Tape(traffic.url, traffic.http).written()


@pytest.mark.slow
async def test_a_prompt_is_discovered_registered_and_told(
    shell: Shell, local: Local, client: Client, http: aiohttp.ClientSession
) -> None:
    await asked(Traffic(local.url, http, client), 25)
    shown = await shell.run("prompts", "discover")
    assert shown.text.startswith("1 prompt in 25 calls.\n\n1.  25 messages  coverage 100.0%  no agent named")
    assert "not registered yet\nYou are a travel agent" in shown.text
    assert await client.resources() == []
    registered = await shell.run("prompts", "discover", "--register", "travel", "--author", "ann")
    assert "travel@v1 is registered with the slots slot1.\n" in registered.text
    (version,) = (await client.resource("travel")).versions
    assert (version.author, version.content["sent"]) == ("ann", True)
    assert tells(version.note, "25 messages", "100.0%")
    (found,) = (await shell.run("prompts", "discover", "status:ok", "--json")).rows
    assert (found["registered"], found["messages"], found["template"]) == ("travel", 25, version.content["text"])
    text = STABLE.replace("{date}", "day 99 of the month").encode()
    (told,) = (await shell.run("prompts", "check", "-", "--json", stdin=text)).rows
    assert (told["resource"], list(told["slots"])) == ("travel", ["slot1"])
    assert (await shell.run("prompts", "check", "-", stdin=text)).text.startswith("This is travel.\nslot ")
    assert (await shell.run("prompts", "check", "-", "--tool", "find", stdin=text)).code == 1


@pytest.mark.slow
async def test_what_a_release_has_written_is_not_discovered(
    shell: Shell, local: Local, client: Client, http: aiohttp.ClientSession
) -> None:
    """Nor what the gateway asked by itself: only what agents send is theirs."""
    traffic = Traffic(local.url, http, client)
    await asked(traffic, 3)
    few = await shell.run("prompts", "discover")
    first, reason = few.text.splitlines()
    assert (first, tells(reason, "20 rollouts", "3 rollouts")) == ("0 prompts in 3 calls.", True), reason
    await client.add_version("travel", prompt(STABLE, sent=True))
    await client.add_version("travel", prompt(CANDIDATE))
    how = policy(0.5, replayed="report", shadowed="report", shadow={"share": 1.0, "calls": 25})
    release = await client.start_release("travel", NewRelease(candidate="v2", policy=how))
    await traffic.when(release.id, lambda view: view.doing == "shadow" and view.total == 25)
    for number in count():
        if (await client.release(release.id)).doing != "shadow":
            break
        await traffic.call(f"s{number}")
    await traffic.when(release.id, lambda view: view.release.stage == "canary")
    await client.decide(release.id, "promote", ActionRequest(who="ann"))
    for number in range(25):
        await traffic.call(f"n{number}", STABLE.replace("{date}", f"day {number} of next month"))
    await Tape(local.url, http).written()
    found = (await shell.run("prompts", "discover", "--json")).rows
    assert [(one["registered"], one["template"]) for one in found] == [("travel", found[0]["template"])]
    assert "careful" not in found[0]["template"]
    shown, stats = await shell.run("prompts", "discover"), await client.stats()
    asked_by_itself, rewritten = stats.by_kind["llm"] - stats.totals.calls, 25
    assert asked_by_itself >= 25
    said = f"{asked_by_itself + rewritten} calls left out: the gateway wrote their text, or made them itself.\n"
    assert said in shown.text


FOUND: list[tuple[PromptProposal, str | None]] = [
    (PromptProposal(Template((f"You are {who}. ", ""), ("rest",)), 20, 1.0, {}, None, who), None)
    for who in ("one", "two")
]


@pytest.mark.parametrize("number", [0, 3, -1])
def test_a_number_that_is_not_shown_registers_nothing(number: int) -> None:
    assert resources._chosen(FOUND, 2) is FOUND[1][0]
    with pytest.raises(CommandError, match=f"--number: {number} is not 1 to 2"):
        resources._chosen(FOUND, number)


def test_who_ends_the_questions_registers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    resources._offer("http://127.0.0.1:9", FOUND, "ann")


@pytest.mark.slow
async def test_half_of_a_surrogate_pair_is_shown(shell: Shell, local: Local, http: aiohttp.ClientSession) -> None:
    """What JavaScript makes of a text that it cuts in the middle of a character."""
    for number in range(FEWEST):
        said = f'"You are the order desk of Acme. Be brief. Customer: {number} \\ud83d"'
        body = f'{{"model":"m","messages":[{{"role":"system","content":{said}}},{{"role":"user","content":"hi"}}]}}'
        headers = {"Content-Type": "application/json"}
        async with http.post(f"{local.openai(f'r{number}')}/chat/completions", data=body, headers=headers) as answer:
            _ = await answer.read()
    await Tape(local.url, http).written()
    found = await shell.run("prompts", "discover", "--json")
    assert (found.code, found.err) == (0, "")
    assert "\\ud83d" in found.text


@pytest.mark.slow
async def test_a_terminal_is_asked(shell: Shell, local: Local, client: Client, http: aiohttp.ClientSession) -> None:
    await asked(Traffic(local.url, http, client), 25)
    said = await shell.typed(b"booking\n", "prompts", "discover")
    assert "Register prompt 1? " in said
    assert "booking@v1 is registered" in said
    assert [one.name for one in await client.resources()] == ["booking"]
    assert "Register prompt" not in await shell.typed(b"", "prompts", "discover")


# --- releases ---


@pytest.mark.slow
async def test_a_release_is_started_watched_and_verified(shell: Shell, traffic: Traffic, client: Client) -> None:
    started = await shell.run(
        "release", "start", "travel", "--candidate", "v2", "--policy", "short.toml", "--who", "ann", "--why", "kinder",
        "--only", "mode=online", "--only", "model=m", "--only", "model=n*",
    )  # fmt: skip
    first, forecast = started.text.splitlines()
    assert tells(first, "travel-1", "v1 → v2", "penstock release watch travel-1")
    assert tells(forecast, "No forecast", "too few rollouts")
    release = (await traffic.when("travel-1", lambda view: view.release.stage == "canary")).release
    assert (release.author, release.only) == ("ann", Audience(models=["m", "n*"], modes=["online"]))
    html = shell.folder / "travel.html"
    watching = await shell.start("release", "watch", "travel", "--html", "travel.html")
    assert watching.stdout is not None
    first = (await asyncio.wait_for(watching.stdout.readline(), PATIENCE)).decode()
    assert "start → draft  by ann (unverified)  kinder" in first
    assert "<h1>travel-1: canary</h1>" in html.read_text()
    _ = await traffic.run(names("r", 30), lambda arm: 1.0)
    await traffic.call("awaited")
    view = await traffic.when("travel-1", lambda view: view.release.counted == 30 or not view.release.live)
    status = await shell.run("release", "status", "travel", COLUMNS="80")
    shown = {line[0]: line for line in words(status.text) if len(line) == 3}
    assert sum(map(int, shown["counted"][1:])) == view.release.counted
    assert sum(map(int, shown["assigned"][1:])) == view.release.assigned
    assert max(map(len, status.text.splitlines())) <= 80
    (told,) = (await shell.run("release", "status", "travel-1", "--json")).rows
    assert told["figures"] == view.figures
    verified = await shell.run("release", "verify", "travel")
    assert (verified.code, verified.err) == (0, "")
    assert verified.text.startswith("travel-1 is verified: ")
    assert f"{view.release.counted} observations, {view.release.counted} rewards as on the tape, " in verified.text
    ended = await shell.run("release", "rollback", "travel", "--who", "bob", "--why", "it is rude")
    assert ended.text == "travel-1  rolled back  it is rude\n"
    rest, err = await shell.end_of(watching)
    assert (watching.returncode, err) == (0, b"")
    assert tells(rest.decode(), "rollback → rolled back", "by bob (unverified)", "it is rude")
    assert "<h1>travel-1: rolled back</h1>" in html.read_text()
    assert f"<td>{int(view.figures['candidate.assigned']):,}</td>" in html.read_text()
    assert ">Evidence</title>" in html.read_text()
    assert f'<th scope="row">{view.release.counted}</th>' in html.read_text()
    assert [name for name in os.listdir(shell.folder) if name.startswith(".")] == []


async def test_watching_goes_on_when_the_gateway_is_restarted(
    gateway: Gateway, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    shell = Shell(gateway.url, tmp_path)
    async with Client(gateway.url) as client:
        traffic = await registered(gateway.url, client, http)
        release = await traffic.start("travel", "v2", policy(0.5))
        watching = await shell.start("release", "watch", "travel")
        assert watching.stdout is not None
        while "canary → canary" not in (await asyncio.wait_for(watching.stdout.readline(), PATIENCE)).decode():
            pass
        await gateway.kill()
        await gateway.start(gateway.port)
        await client.decide(release.id, "abort", ActionRequest(who="ann", why="enough"))
        rest, err = await shell.end_of(watching)
    assert (watching.returncode, err) == (0, b"")
    assert "abort → aborted  by ann (unverified)  enough\n" in rest.decode()


class Faltering(Client):
    """A connection that is lost some times."""

    lost = 0

    async def release(self, name: str) -> ReleaseView:
        if self.lost:
            self.lost -= 1
            raise ClientError("nothing answers there")
        return await super().release(name)


async def test_a_look_that_fails_is_taken_again_unless_it_is_the_first(
    traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PREPARING_S", 0.01)
    monkeypatch.setattr(watch, "AWAY_S", 0.01)
    how = policy(0.5, shadowed="required")
    release = await traffic.client.start_release("travel", NewRelease(candidate="v2", policy=how))
    await traffic.when(release.id, lambda view: view.doing == "shadow")
    async with Faltering(traffic.url) as client, asyncio.timeout(PATIENCE):
        client.lost = 1
        with pytest.raises(ClientError, match="nothing answers"):
            await anext(watch.release_snapshots(client, release.id, whole=False))
        async with aclosing(watch.release_snapshots(client, release.id, whole=False)) as looks:
            assert (await anext(looks)).view.doing == "shadow"
            client.lost = 3
            assert (await anext(looks)).view.doing == "shadow"
            assert client.lost == 0
            await traffic.client.decide(release.id, "abort", ActionRequest())
            ends = [look.view.release.stage async for look in looks]
    assert ends[-1] == "aborted"


@pytest.mark.slow
async def test_people_decide(shell: Shell, traffic: Traffic, client: Client) -> None:
    await traffic.start("travel", "v2", policy(0.5))
    said: list[tuple[str, ...]] = [("hold", "held"), ("resume", "canary"), ("promote", "promoted")]
    for action, stage in said:
        (release,) = (await shell.run("release", action, "travel", "--why", f"to {action} it", "--json")).rows
        assert (release["stage"], release["reason"]) == (stage, f"to {action} it")
    assert (await client.resource("travel")).stable.version == "v2"
    over = await shell.run("release", "abort", "travel-1")
    assert (over.code, "has ended" in over.err) == (1, True)
    listed, live, history, entries = await asyncio.gather(
        shell.run("release", "list"),
        shell.run("release", "list", "--live", "--json"),
        shell.run("release", "history", "travel"),
        shell.run("release", "history", "travel", "--json"),
    )
    assert words(listed.text)[1][:4] == ["travel-1", "promoted", "v1", "v2"]
    assert live.rows == []
    assert [entry["action"] for entry in entries.rows][-3:] == ["hold", "resume", "promote"]
    assert entries.rows[-1]["who"] != ""
    assert history.text.splitlines()[0] == "travel-1  promoted"
    assert (await shell.run("release", "verify", "travel")).code == 0


@pytest.mark.slow
async def test_an_approval_is_waited_for_and_given(shell: Shell, traffic: Traffic) -> None:
    careful = policy(0.3, 0.6).model_copy(
        update={"stages": [CanaryStage(split=0.3, rollouts=2, approval=True), CanaryStage(split=0.6)]}
    )
    await traffic.start("travel", "v2", careful)
    _ = await traffic.run(names("r", 60), lambda arm: 1.0)
    _ = await traffic.when("travel-1", lambda view: view.release.waits == "approval")
    status = await shell.run("release", "status", "travel")
    assert tells(status.text, "waits for", "penstock release approve travel-1")
    _ = await shell.run("release", "approve", "travel", "--who", "ann")
    view = await traffic.when("travel-1", lambda view: view.release.step == 1)
    assert view.release.waits is None
    assert (await shell.run("release", "verify", "travel")).code == 0


@pytest.mark.slow
async def test_a_plain_experiment_needs_no_rewards_before(shell: Shell, client: Client, traffic: Traffic) -> None:
    _ = await shell.run("release", "start", "travel", "--candidate", "v2", "--hold-split", "--why", "to see")
    (release,) = await client.releases()
    assert (release.policy.hold_split, release.margin, release.stage) == (True, 0.0, release.stage)


@pytest.mark.slow
async def test_watching_as_json_and_until_interrupted(shell: Shell, traffic: Traffic) -> None:
    await traffic.start("travel", "v2", policy(0.5))
    process = await shell.start("release", "watch", "travel", "--json")
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        view = json.loads(await process.stdout.readline())
        assert (view["release"]["id"], view["release"]["counted"]) == ("travel-1", 0)
        _ = await traffic.rollout("r1", lambda arm: 1.0)
        while view["release"]["counted"] < 1:
            view = json.loads(await process.stdout.readline())
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert (process.returncode, err) == (130, b"")


@pytest.mark.slow
async def test_a_terminal_is_drawn_over_until_the_end(shell: Shell, traffic: Traffic, client: Client) -> None:
    await traffic.start("travel", "v2", policy(0.5))
    drawing = asyncio.ensure_future(shell.typed(b"", "release", "watch", "travel", TERM="xterm"))
    _ = await traffic.run(names("r", 5), lambda arm: 1.0)
    _ = await shell.run("release", "abort", "travel", "--why", "enough")
    said = await drawing
    assert "\x1b[1A" in said
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.rpartition("\x1b[1A")[2])
    assert "travel-1  aborted  v1 → v2" in last
    assert tells(last, "by", "enough")


@pytest.mark.slow
async def test_a_page_that_cannot_be_written_is_said(shell: Shell, traffic: Traffic) -> None:
    await traffic.start("travel", "v2", policy(0.5))
    done = await shell.run("release", "watch", "travel", "--html", "no/such/page.html")
    assert (done.code, done.err) == (1, "penstock: no/such/page.html: No such file or directory\n")


# --- verifying ---


class Forged(Client):
    """A gateway that answers of one assignment something else than what was seen of it."""

    def __init__(self, url: str, number: int, update: dict[str, Any]) -> None:
        super().__init__(url)
        self._number, self._update = number, update

    async def assignments(
        self, name: str, after: int = 0
    ) -> AsyncIterator[tuple[Assignment, AssignmentEvidence | None]]:
        async for assignment, seen in super().assignments(name, after):
            if seen is not None and seen.number == self._number:
                seen = seen.model_copy(update=self._update)
            yield assignment, seen


async def counted(traffic: Traffic, rollouts: int) -> None:
    await traffic.start("travel", "v2", policy(0.5, rollouts=100))
    _ = await traffic.run(names("r", rollouts), lambda arm: 1.0)
    _ = await traffic.when("travel-1", lambda view: view.release.counted == rollouts)


FORGED: list[tuple[dict[str, Any], str]] = [
    ({"raw_reward": 0.25, "reward": 0.25}, "was counted with the reward 0.25, a1#3 on the tape says 1.0"),
    ({"reward": 0.5}, "a reward of 1 is a goodness of 1, not 0.5"),
    ({"span": "a1#9"}, "names the reward a1#9, which is not on the tape"),
    ({"span": "a1#1"}, "names a1#1 as its reward, which is a span of kind llm"),
    ({"span": None}, "has the goodness 1 and names no reward"),
]


async def test_a_reward_that_is_not_on_the_tape_is_found(local: Local, traffic: Traffic) -> None:
    await counted(traffic, 6)
    async with Forged(local.url, 4, {}) as honest:
        assert (await verify_release(honest, "travel-1")).problems == []
    for update, problem in FORGED:
        async with Forged(local.url, 4, update) as forged:
            found = (await verify_release(forged, "travel-1")).problems
        assert [line for line in found if problem in line] == found[-1:]
        assert found[-1].startswith("observation 4 of rollout r")


@pytest.mark.slow
async def test_a_tape_that_was_changed_is_not_verified(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with serving() as provider:
        config = upstreams(openai=provider.openai_url)
        async with locally(tmp_path, config) as made, Client(made.url) as client:
            await counted(await registered(made.url, client, http), 6)
            assert (await Shell(made.url, tmp_path).run("release", "verify", "travel")).code == 0
        with lmdb.open(str(made.data / "tape"), max_dbs=len(DATABASES)) as env:
            replace_first(env, b"seen", b'"reward":1.0', b'"reward":0.0')
            replace_first(env, b"audit", b"skipped by the policy", b"skipped by the weather")
        async with locally(tmp_path, config) as made:
            shell = Shell(made.url, tmp_path)
            done = await shell.run("release", "verify", "travel")
            as_json = await shell.run("release", "verify", "travel", "--json")
    first, second, *_ = done.text.splitlines()
    assert (done.code, done.err) == (1, f"penstock: travel-1 is not verified: {len(done.text.splitlines())} problems\n")
    assert tells(first, "entry 2", "hash")
    assert tells(done.text, "reward of 1", "1, not 0.0")
    (found,) = map(json.loads, as_json.text.splitlines())
    assert found["problems"][:2] == [first, second]


@pytest.mark.slow
async def test_an_edited_text_and_a_call_of_another_version_are_found(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with serving() as provider:
        config = upstreams(openai=provider.openai_url)
        async with locally(tmp_path, config) as made, Client(made.url) as client:
            await counted(await registered(made.url, client, http), 16)
            pins = {name: (await client.pins(name))[0] for name in names("r", 16)}
            name = next(name for name, pin in pins.items() if pin.arm == "candidate")
            verified = await Shell(made.url, tmp_path).run("release", "verify", "travel")
            assert ", 32 calls by its arm's version." in verified.text, verified.err
            async with Misled(made.url, name) as misled:
                problems = (await verify_release(misled, "travel-1")).problems
        (problem,) = problems
        assert tells(problem, f"call a1#1 of rollout {name}", "travel@v1", "candidate has v2")
        with lmdb.open(str(made.data / "tape"), max_dbs=len(DATABASES)) as env:
            replace_first(env, b"resources", b"Ask before you book.", b"Book at once, always")
        async with locally(tmp_path, config) as made:
            done = await Shell(made.url, tmp_path).run("release", "verify", "travel")
    said = "travel@v2 says something else than when the release began: its content was edited\n"
    assert (done.code, done.text) == (1, said)


class Misled(Client):
    """A gateway on whose tape the first call of a rollout has another version."""

    def __init__(self, url: str, rollout: str) -> None:
        super().__init__(url)
        self._rollout = rollout

    async def spans(self, rollout: str, *given: Any, **named: Any) -> AsyncIterator[Span]:
        async for span in super().spans(rollout, *given, **named):
            edited = rollout == self._rollout and span.sequence == 1
            yield span.model_copy(update={"versions": {"travel": "v1"}}) if edited else span


@pytest.mark.slow
async def test_a_chain_that_was_made_anew_is_found_by_signatures_and_by_an_anchor(
    http: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes the tape computes every hash again: only the key and the head that was kept are not his."""
    key, ask = "kept-somewhere-else", ("release", "verify", "travel", "--anchor", "anchors.txt")
    monkeypatch.setenv("PENSTOCK_AUDIT_KEY", key)
    async with serving() as provider:
        config = upstreams(openai=provider.openai_url)
        async with locally(tmp_path, config) as made, Client(made.url) as client:
            shell = Shell(made.url, tmp_path)
            await (await registered(made.url, client, http)).start("travel", "v2", policy(0.5))
            await client.decide("travel-1", "hold", ActionRequest(who="ann"))
            kept = (await shell.run("release", "anchor")).text
            assert kept.split()[:2] == ["travel-1", "6"]
            (tmp_path / "anchors.txt").write_text(kept)
            verified = await shell.run(*ask, PENSTOCK_AUDIT_KEY=key)
            assert "Signatures and anchors agree." in verified.text, verified.err
            wrong = await shell.run("release", "verify", "travel", PENSTOCK_AUDIT_KEY="another")
            assert tells(wrong.text, "entry 1", "another key")
            assert key.encode() not in (made.data / "tape" / "data.mdb").read_bytes()
        make_anew(made.data / "tape", lambda it: it.model_copy(update={"who": "bob"} if it.who == "ann" else {}))
        async with locally(tmp_path, config) as made:
            shell = Shell(made.url, tmp_path)
            assert (await shell.run("release", "verify", "travel")).code == 0
            signed = await shell.run("release", "verify", "travel", PENSTOCK_AUDIT_KEY=key)
            assert re.fullmatch(r"entry 6 .* another key.*\n", signed.text)
            anchored = await shell.run(*ask)
            assert re.fullmatch(r"entry 6 .* anchored: .* hash\n", anchored.text)
            broken = await shell.run(*ask[:-1], "-", stdin=b"travel-1 six abc")
            assert (broken.code, "line 1 is no anchor" in broken.err) == (1, True)


def make_anew(tape: Path, edit: Callable[[AuditTrailEntry], AuditTrailEntry]) -> None:
    """Edits entries of the only release, and computes every hash again."""
    with lmdb.open(str(tape), max_dbs=len(DATABASES)) as env:
        dbs = {name: env.open_db(name, create=False) for name in (b"audit", b"releases")}
        with env.begin(write=True) as txn:
            head = ""
            for key, record in list(txn.cursor(dbs[b"audit"])):
                entry = edit(AuditTrailEntry.model_validate_json(record))
                link = entry.sealed(head).model_copy(update={"signature": entry.signature})
                txn.put(key, link.model_dump_json().encode(), db=dbs[b"audit"])
                head = link.hash
            ((key, record),) = list(txn.cursor(dbs[b"releases"]))
            release = Release.model_validate_json(record).model_copy(update={"head": head})
            txn.put(key, release.model_dump_json().encode(), db=dbs[b"releases"])


def replace_first(env: lmdb.Environment, database: bytes, old: bytes, new: bytes) -> None:
    db = env.open_db(database, create=False)
    with env.begin(db=db, write=True) as txn:
        key, record = next((key, record) for key, record in txn.cursor() if old in record)
        assert txn.put(key, record.replace(old, new, 1))
