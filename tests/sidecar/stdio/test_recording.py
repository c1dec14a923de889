"""What passes a wrapper is on the tape once, with its true end, whoever is away or killed meanwhile."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from conftest import StartGateway
from fakes.mcp_sdk_server import calculator
from fakes.mistakes import tells
from fakes.process import PATIENCE, Gateway
from fakes.shell import Shell
from fakes.tape import Tape
from fakes.waiting import until
from fakes.wrapping import ANSWERING, NOWHERE, SDK_SERVER, Wrapping, answering
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from penstock.gateway.model.span import Span
from penstock.gateway.model.stdio_frames import frame_bounds
from penstock.sidecar.stdio import spool

KEY = "an-admin-key-of-this-test-0123"


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> Gateway:
    """A gateway that has no upstreams of its own."""
    return await start_gateway("")


@pytest.fixture
def wrapping(tmp_path: Path, gateway: Gateway) -> Wrapping:
    """Wrappers of that gateway."""
    return Wrapping(tmp_path / "state", gateway.url)


def ended(count: int) -> Callable[[list[Span]], bool]:
    """Whether so many sessions are on the tape to their end."""
    return lambda spans: sum(span.name == "end session" for span in spans) >= count


def shown(spans: list[Span]) -> list[tuple[str | None, str, str | None]]:
    """Without the ends of sessions."""
    return sorted((span.name, span.status.value, span.error) for span in spans if span.name != "end session")


async def used(client: Client) -> list[object]:
    """What an agent gets that uses each tool."""
    listed = sorted(tool.name for tool in (await client.list_tools()).tools)
    seen: list[float] = []

    async def noted(progress: float, total: float | None, message: str | None) -> None:
        seen.append(progress)

    add = await client.call_tool("add", {"a": 1, "b": 2})
    count = await client.call_tool("count", {"to": 3}, progress_callback=noted)
    broken = await client.call_tool("broken", {})
    return [listed, add.structured_content, count.content, seen, broken.is_error, client.server_info]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_official_sdk_sees_no_difference(wrapping: Wrapping, tape: Tape, mode: str) -> None:
    async with Client(calculator(), mode=mode) as client:
        direct = await used(client)
    command, *words = wrapping.command(*SDK_SERVER, options=("--rollout", "r1"))
    server = StdioServerParameters(command=command, args=words, env=wrapping.variables)
    async with Client(stdio_client(server), mode=mode) as client:
        assert await used(client) == direct
    spans = await tape.when("r1", "a1", ended(1))
    tools = [span for span in spans if span.kind == "tool"]
    assert [(span.name, span.error) for span in tools] == [
        ("tools/call add", None),
        ("tools/call count", None),
        ("tools/call broken", "tool_error"),
    ]
    progress = [span for span in spans if span.name == "notifications/progress"]
    assert [span.parent_id for span in progress] == [tools[1].span_id] * 3
    assert all((span.attributes or {})["network.transport"] == "pipe" for span in spans)
    assert len({span.span_id for span in spans}) == len(spans)
    assert [one["tool"] for one in (await tape.get("/api/rollouts/r1/attempts/a1/tools"))["tools"]] == [
        "add",
        "count",
        "broken",
    ]


async def test_a_gateway_that_is_killed_gets_everything_once(wrapping: Wrapping, gateway: Gateway, tape: Tape) -> None:
    async with answering(wrapping, "--rollout", "r1") as wrapper:
        assert await wrapper.ask("first", 1) == {"is": "first"}
        wrapper.say("wait", "open over the restart")
        _ = await tape.when("r1", "a1", lambda spans: len(spans) == 1)
        _ = await gateway.kill()
        for number in range(2, 30):
            assert await wrapper.ask("away", number) == {"is": "away"}
        await gateway.start(gateway.port)
        assert await wrapper.ask("back", "x") == {"is": "back"}
        _ = await tape.when("r1", "a1", lambda spans: len(spans) == 30)
        _ = await gateway.kill()
        await gateway.start(gateway.port)
        assert await wrapper.ask("once more", "y") == {"is": "once more"}
        wrapper.say("notifications/cancelled", requestId="open over the restart")
    spans = await tape.when("r1", "a1", ended(1))
    assert shown(spans) == sorted([
        ("first", "ok", None), ("back", "ok", None), ("once more", "ok", None), ("notifications/cancelled", "ok", None),
        ("wait", "cancelled", "client_cancelled"), *[("away", "ok", None)] * 28,
    ])  # fmt: skip
    assert len({span.span_id for span in spans}) == len(spans)
    (first,) = [span for span in spans if span.name == "first"]
    assert b'"method": "first"' in await tape.raw(first, "request")
    assert b'{"is": "first"}' in await tape.raw(first, "response")
    assert wrapping.left == []


def on_disk(wrapping: Wrapping) -> int:
    """Lines that wait."""
    return sum(len(list(frame_bounds(path.read_bytes()))) for one in wrapping.left for path in one.glob("*.frames"))


async def test_the_next_wrapper_sends_what_a_killed_one_has_left(wrapping: Wrapping, tape: Tape) -> None:
    away = Wrapping(wrapping.state)
    async with answering(away, "--gateway", NOWHERE, "--rollout", "r1") as wrapper:
        _ = await wrapper.ask("asked", 1)
        wrapper.say("wait", 2)
        _ = await wrapper.ask("asked", 3)
        # A line is put on disk when it has been passed on.
        await until(lambda: on_disk(wrapping) >= 5)
        wrapper.process.kill()
    (folder,) = wrapping.left
    about = folder / "about.json"
    about.write_text(about.read_text().replace(NOWHERE, wrapping.url))
    async with answering(wrapping, "--rollout", "r2") as wrapper:
        _ = await wrapper.ask("new", 1)
        spans = await tape.when("r1", "a1", ended(1))
    assert shown(spans) == [("asked", "ok", None), ("asked", "ok", None), ("wait", "interrupted", "wrapper_died")]
    assert shown(await tape.when("r2", "a1", ended(1))) == [("new", "ok", None)]
    assert wrapping.left == []


async def test_a_server_that_dies_leaves_its_calls_with_their_true_end(wrapping: Wrapping, tape: Tape) -> None:
    wrapper = await wrapping.start(sys.executable, "-c", ANSWERING, options=("--rollout", "r1", "--attempt", "a7"))
    wrapper.say("wait", 1)
    wrapper.say("die")
    _ = await asyncio.wait_for(wrapper.process.wait(), PATIENCE)
    assert await wrapper.end() == 3
    spans = await tape.when("r1", "a7", ended(1))
    assert shown(spans) == [("die", "ok", None), ("wait", "error", "ended_early")]
    assert [(span.attributes or {})["process.exit.code"] for span in spans if span.name == "end session"] == [3]


async def test_a_session_without_a_rollout_gets_one(
    wrapping: Wrapping, tape: Tape, http: aiohttp.ClientSession
) -> None:
    for _ in range(2):
        async with answering(wrapping) as wrapper:
            _ = await wrapper.ask("hello", 1)
    found = (await tape.get("/api/rollouts"))["rollouts"]
    assert [(one["origin"], one["id"][:2]) for one in found] == [("implicit", "i-")] * 2
    assert shown(await tape.when(found[0]["id"], "a1", ended(1))) == [("hello", "ok", None)]


AGENT = """
import json, subprocess, sys
asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "add", "arguments": {}}}
# As most agents do: the server gets hardly any variables.
env = {"PYTHONPATH": %r, "XDG_STATE_HOME": %r}
line = json.dumps(asked).encode() + b"\\n"
done = subprocess.run(sys.argv[1:], input=line, stdout=subprocess.PIPE, env=env, check=True)
assert b"tools/call" in done.stdout
"""


async def test_an_agent_of_penstock_run_needs_no_more_than_the_command(
    wrapping: Wrapping, gateway: Gateway, tape: Tape, tmp_path: Path
) -> None:
    shell = Shell(gateway.url, tmp_path)
    shell.patience = PATIENCE
    (tmp_path / "agent.py").write_text(AGENT % (wrapping.variables["PYTHONPATH"], str(wrapping.state)))
    (tmp_path / "tasks.jsonl").write_text('{"id": "q1", "input": 1}\n')
    assert (await shell.run("enqueue", "tasks.jsonl")).code == 0
    ran = await shell.run("run", "--", sys.executable, "agent.py", *wrapping.command(sys.executable, "-c", ANSWERING))
    assert ran.code == 0, ran.err
    rollout = (await tape.get("/api/rollouts"))["rollouts"][0]
    spans = await tape.when(rollout["id"], rollout["attempt"], ended(1))
    assert [span.name for span in spans if span.kind == "tool"] == ["tools/call add"]


async def test_a_wrong_key_is_said_and_stops_no_tool(
    start_gateway: StartGateway, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    locked = await start_gateway("require_token = true", env={"PENSTOCK_ADMIN_KEY": KEY})
    wrapping = Wrapping(tmp_path / "state", locked.url, {"PENSTOCK_TOKEN": "pst_not-one"})
    wrapper = await wrapping.start(sys.executable, "-c", ANSWERING, options=("--rollout", "r1"))
    assert wrapper.process.stderr is not None
    assert await wrapper.ask("hello", 1) == {"is": "hello"}
    said = (await asyncio.wait_for(wrapper.process.stderr.readline(), PATIENCE)).decode()
    assert tells(said, "the gateway refuses the key", "PENSTOCK_TOKEN (`penstock token ROLLOUT`", "the tool works")
    assert str(wrapping.left[0]) in said
    assert await wrapper.ask("again", 2) == {"is": "again"}
    assert await wrapper.end() == 0
    # The key is an agent's, so it was noted. Who has the right one writes it there.
    about = wrapping.left[0] / "about.json"
    about.write_text(about.read_text().replace('"pst_not-one"', "null"))
    admin = Wrapping(wrapping.state, locked.url, {"PENSTOCK_ADMIN_KEY": KEY})
    http.headers["Authorization"] = f"Bearer {KEY}"
    async with answering(admin, "--rollout", "r2") as wrapper:
        _ = await wrapper.ask("hello", 1)
        spans = await Tape(locked.url, http).when("r1", "a1", ended(1))
    assert shown(spans) == [("again", "ok", None), ("hello", "ok", None)]


async def test_the_token_that_opens_a_rollout_is_not_on_its_tape(
    start_gateway: StartGateway, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    locked = await start_gateway("require_token = true", env={"PENSTOCK_ADMIN_KEY": KEY})
    http.headers["Authorization"] = f"Bearer {KEY}"
    async with http.post(f"{locked.url}/api/tokens", json={"rollout": "r1"}) as response:
        token = (await response.json())["token"]
    wrapping = Wrapping(tmp_path / "state", locked.url, {"PENSTOCK_TOKEN": token})
    async with answering(wrapping) as wrapper:
        _ = await wrapper.ask("hello", 1, said=f"{token} and {KEY}")
    tape = Tape(locked.url, http)
    span = next(span for span in await tape.when("r1", "a1", ended(1)) if span.name == "hello")
    kept = await tape.raw(span, "request")
    assert b"said" in kept
    assert token.encode() not in kept
    assert KEY.encode() not in kept


async def test_what_has_no_room_on_disk_is_said_on_the_tape(wrapping: Wrapping, gateway: Gateway, tape: Tape) -> None:
    async with answering(wrapping, "--rollout", "r1", "--spool", "1") as wrapper:
        _ = await wrapper.ask("before", 1)
        _ = await tape.when("r1", "a1", lambda spans: len(spans) == 1)
        _ = await gateway.kill()
        for number in range(40):
            _ = await wrapper.ask("away", number, text="x" * 50_000)
        await gateway.start(gateway.port)
        await until(lambda: spool.bytes_used(wrapping.state / "penstock" / "wrapped") <= 1 << 18)  # there is room
        _ = await wrapper.ask("after", "y")
    spans = await tape.when("r1", "a1", ended(1))
    (gap,) = [span for span in spans if span.name == "recording_gap"]
    kept = sum(span.name == "away" and span.status == "ok" for span in spans)
    assert 10 < kept < 30
    # Requests are long and answers short: where a request had no room, its answer may have had.
    answers = sum(span.name == "answer" for span in spans)
    assert (gap.attributes or {})["lines"] == 2 * (40 - kept) - answers
    assert (gap.attributes or {})["bytes"] > (40 - kept) * 50_000
    assert shown(spans).count(("after", "ok", None)) == 1
    assert shown(spans).count(("before", "ok", None)) == 1


async def test_a_line_that_is_too_long_is_kept_in_part(
    start_gateway: StartGateway, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    gateway = await start_gateway("[limits]\nrecorded_bytes = 100_000\n")
    wrapping, tape = Wrapping(tmp_path / "state", gateway.url), Tape(gateway.url, http)
    async with answering(wrapping, "--rollout", "r1") as wrapper:
        _ = await wrapper.ask("short", 1)
        _ = await tape.when("r1", "a1", lambda spans: len(spans) == 1)
        _ = await wrapper.ask("long", 2, text="x" * 3_000_000)
    spans = await tape.when("r1", "a1", ended(1))
    (long,) = [span for span in spans if span.name == "long"]
    assert (long.status, long.truncated) == ("ok", True)
    assert long.request_bytes > 3_000_000
    assert len(await tape.raw(long, "request")) == 100_000


async def test_what_is_no_batch_of_a_wrapper_is_refused(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    url = f"{gateway.address('r1')}/wrapped"
    about = b'{"session":"00000000000-0000000000000000","server":"s"}\n'
    wrong = (b"", "Invalid JSON"), (about + b"garbage", "no whole frame"), (b'{"session":"x"}\n', "session")
    for body, said in wrong:
        async with http.post(url, data=body) as response:
            assert response.status == 400
            error = (await response.json())["error"]
            assert error["field"] == "body"
            assert said in error["message"]
    async with http.post(url, data=about) as response:
        assert await response.json() == {"done": 0, "open": [], "need": [], "recorded_bytes": 64 << 20}


LISTING = """
import json, sys
for line in sys.stdin:
    said = json.loads(line)
    tools = [{"name": "search", "description": sys.argv[1], "inputSchema": {"type": "object"}}]
    print(json.dumps({"jsonrpc": "2.0", "id": said["id"], "result": {"tools": tools}}), flush=True)
"""
"""A server that lists one tool, described as its argument says."""


async def listed(wrapping: Wrapping, described: str) -> None:
    asked = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}\n'
    command = (sys.executable, "-c", LISTING, described)
    code, out, _ = await wrapping.run(*command, stdin=asked)
    assert (code, described in out.decode()) == (0, True)


async def known(tape: Tape, name: str, versions: int = 1) -> None:
    """Waits until so many versions of a server's list are known. It is read a moment after it was recorded."""

    async def are_known() -> bool:
        async with tape.http.get(f"{tape.url}/api/mcp/definitions/{name}") as found:
            return found.status == 200 and len((await found.json())["versions"]) == versions

    await until(are_known)


async def test_what_a_wrapped_server_lists_has_versions(wrapping: Wrapping, tape: Tape, tmp_path: Path) -> None:
    shell = Shell(wrapping.url, tmp_path)
    for described in ("Finds pages.", "Finds pages.", "Finds pages and passwords."):
        await listed(wrapping, described)
    await known(tape, "tools", versions=2)
    assert "{+pages and passwords.+}" in (await shell.run("mcp", "definitions", "tools", "--diff")).text
    approved = await shell.run("mcp", "approve", "tools", "--who", "ada", "--why", "harmless")
    assert (approved.code, approved.err) == (0, "")


async def test_a_wrapper_cannot_speak_for_a_server_of_the_settings(
    start_gateway: StartGateway, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    gateway = await start_gateway(f'[mcp.servers.tools]\nurl = "{NOWHERE}/mcp"\n')
    wrapping, tape = Wrapping(tmp_path / "state", gateway.url), Tape(gateway.url, http)
    await listed(wrapping, "Finds pages.")
    # Lists are read in their order.
    await listed(replace(wrapping, name="other"), "Finds pages.")
    await known(tape, "other")
    assert "search" not in str((await tape.get("/api/mcp/definitions/tools"))["versions"])


async def test_rules_are_tried_on_wrapped_calls(wrapping: Wrapping, tape: Tape, tmp_path: Path) -> None:
    async with answering(wrapping, "--rollout", "r1") as wrapper:
        await wrapper.ask("tools/call", 1, name="search", arguments={"q": "x"})
    _ = await tape.when("r1", "a1", ended(1))
    rules = tmp_path / "rules.toml"
    _ = rules.write_text('[[policy]]\nname = "none"\nserver = "tools"\nverdict = "deny"\n')
    ran = await Shell(wrapping.url, tmp_path).run("policy", "test", str(rules), "--json")
    assert '"verdict":"deny"' in ran.text.replace(" ", ""), ran
