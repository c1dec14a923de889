"""Processes of servers that the gateway hosts: how they die, what they may not do, and that none is left."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
import uvloop
from conftest import StartGateway
from fakes import waiting
from fakes.local import locally
from fakes.mcp_hosted import Habits, Hosted, config, error, hosting, processes, text, until_left
from fakes.mcp_wire import INITIALIZE, call
from fakes.process import PATIENCE
from fakes.tape import Tape
from fakes.waiting import until

from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.settings import McpServer
from penstock.gateway.model.span import SpanStatus
from penstock.gateway.tape.store.directory import DamagedRecordError
from penstock.gateway.tools import bridge
from penstock.gateway.tools.bridge import ProcessExit, ProcessPool
from penstock.gateway.tools.hosted_process import OPEN_FILES, LineQueue, Owner, ProcessSession
from penstock.gateway.wire.dialects.mcp import messages

Take = Callable[[str], Hosted]
Alone = Callable[..., Awaitable[Hosted]]
SERVERS: dict[str, Habits] = {
    **{name: () for name in ("dying", "killing", "noisy", "endless", "mute", "deaf", "good", "attempt")},
    "never": ("", "dies"),
    "none": ('command = ["/does/not/exist"]',),
    "nowhere": ('command = ["true"]\ncwd = "/does/not"',),
    "talking": ('env = { TALK_KEY = "sk-of-this-server-12345678" }',),
    "two": ("processes = 2",),
    "stubborn": ("", "stubborn"),
}


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, aiohttp.ClientSession], Hosted]]:
    with hosting(tmp_path_factory.mktemp("gateway"), SERVERS) as made:
        yield made


@pytest.fixture
def take(named: Callable[[str, aiohttp.ClientSession], Hosted], http: aiohttp.ClientSession) -> Take:
    """One of the servers, which no other test takes."""
    return lambda name: named(name, http)


@pytest.fixture
def alone(start_gateway: StartGateway, http: aiohttp.ClientSession) -> Alone:
    """A gateway of the test's own that hosts a server with these settings and habits."""

    async def host(more: str = "", *habits: str, env: dict[str, str] | None = None) -> Hosted:
        mark = uuid4().hex
        return Hosted(await start_gateway(config(mark, more, *habits), env=env), http, mark)

    return host


@pytest.mark.parametrize(
    ("tool", "how"),
    [("dies", "ended with exit status 7; its last words: it cannot go on"), ("killed", "was ended by SIGKILL")],
)
async def test_whoever_waits_is_told_how_it_ended(take: Take, tool: str, how: str) -> None:
    hosted = take("dying" if tool == "dies" else "killing")
    client, other = await hosted.opened(), await hosted.opened("r2")
    waiting = asyncio.ensure_future(error(client, "hangs", id="h"))
    await hosted.tape.open_span(hosted.rollout(), name="tools/call hangs")
    for told in (await error(client, tool), await waiting):
        assert f"MCP server '{hosted.name}' {how}" in told["message"]
        assert told["data"] == {"reason": "mcp_process"}
    assert (await client.say(call("echo")))[0] == 404
    assert "pid" in await text(other, "echo")
    del client.headers["Mcp-Session-Id"]
    await client.open()
    assert "pid" in await text(client, "echo")


async def test_a_server_that_does_not_start_is_left_alone_for_longer_and_longer(take: Take) -> None:
    for server, words in (
        ("never", "ended with exit status 3; its last words: a module is missing"),
        ("none", "cannot start '/does/not/exist': No such file or directory"),
        ("nowhere", "cannot be started in /does/not: No such file or directory"),
    ):
        client, reasons, message = take(server).client(), list[str](), ""
        while "mcp_backoff" not in reasons:  # on a busy machine the second has passed, and two are waited for
            status, body = await client.say(INITIALIZE)
            told = json.loads(body)["error"]
            message = told["message"]
            assert (status, told["data"]) == (200, {"reason": told["data"]["reason"]})
            assert words in message
            reasons.append(told["data"]["reason"])
        assert reasons[:-1] == ["mcp_process"] * (len(reasons) - 1) != []
        assert message.endswith("start again in 1 s") or len(reasons) > 2
    assert "pid" in await text(await take("good").opened(), "echo")

    async def two_seconds_are_waited_for() -> bool:
        _, body = await take("never").client().say(INITIALIZE)
        return json.loads(body)["error"]["message"].endswith("again in 2 s")

    await waiting.until(two_seconds_are_waited_for)
    await take("never").gone()


async def test_what_is_no_message_is_no_message(take: Take) -> None:
    hosted = take("noisy")
    client = await hosted.opened()
    assert await text(client, "noise") == "after the noise"
    assert len(await text(client, "large", {"bytes": 3 << 20})) == 3 << 20
    assert "noisy: (stdout) Starting ..." in hosted.gateway.log


async def test_a_line_without_an_end_ends_it(take: Take) -> None:
    hosted = take("endless")
    client = await hosted.opened()
    assert "a line of more than 64 MiB" in (await error(client, "endless"))["message"]
    await hosted.gone()


async def test_stderr_does_not_hold_it_up_nor_fill_the_log_nor_tell_keys(take: Take) -> None:
    key = "sk-of-this-server-12345678"
    hosted = take("talking")
    client = await hosted.opened()
    assert await text(client, "talks", {"lines": 5_000}) == "talked"
    assert await hosted.end(client) == 200
    spans = await hosted.tape.spans(hosted.rollout(), 4)
    said = str(next(span for span in spans if span.kind == "event").attributes)
    assert "line 4999 ****" in said
    assert "line 4000 " not in said
    log = hosted.gateway.log
    assert 0 < log.count("penstock.mcp: talking: line") <= 200
    assert key not in log + said


def environments_of(mark: str) -> list[str]:
    """The environments of processes with the mark in their command."""
    return [Path(f"/proc/{pid}/environ").read_text(errors="replace") for pid in processes(mark)]


async def test_nothing_of_the_gateway_is_in_its_environment(alone: Alone, tmp_path: Path) -> None:
    more = f'env = {{ LITERAL = "x" }}\nenv_keys = ["ITS_KEY"]\ncwd = "{tmp_path}"\n'
    own = {"PENSTOCK_ADMIN_KEY": "k" * 20, "OPENAI_API_KEY": "sk-upstream-1234567890", "ITS_KEY": "its-own-key-12345"}
    hosted = await alone(more, env=own)
    found = json.loads(await text(await hosted.opened(), "surroundings"))
    assert (found["cwd"], found["limits"]) == (str(tmp_path), [OPEN_FILES, resource.RLIM_INFINITY])
    allowed = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "TZ"}
    assert found["env"].keys() - allowed == {"LITERAL", "ITS_KEY"}
    assert (found["env"]["LITERAL"], found["env"]["ITS_KEY"]) == ("x", own["ITS_KEY"])
    assert found["env"]["PATH"] == os.environ["PATH"]
    environments = await asyncio.to_thread(environments_of, hosted.mark)
    assert len(environments) == 3
    assert not [key for key in ("PENSTOCK_ADMIN_KEY", "OPENAI_API_KEY") if own[key] in "".join(environments)]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {own['PENSTOCK_ADMIN_KEY']}"}) as admin:
        tape = Tape(hosted.gateway.url, admin)
        _, made = await tape.spans(hosted.rollout(), 2)
        told = (await tape.raw(made, "response")).decode()
    assert "LITERAL" in told
    assert own["ITS_KEY"] not in told


@pytest.mark.slow
async def test_a_request_is_forgotten_whose_client_leaves_before_the_process_has_started() -> None:
    session = ProcessSession("cat", McpServer(command=["cat"]), Secrets([]), ("", ""), lambda _: None)
    line = json.dumps(call("echo", id=1)).encode()
    asking = asyncio.ensure_future(session.request(messages(line), line))
    await asyncio.sleep(0)
    before = session.idle
    asking.cancel()
    await asyncio.wait([asking])
    after = session.idle, session.in_use
    session.process.stop()
    await session.task
    assert (before, after) == (False, (True, False))


@pytest.mark.parametrize("tool", ["mute", "deaf"])
async def test_one_that_lives_without_speaking_or_listening_is_ended(take: Take, tool: str) -> None:
    hosted = take(tool)
    client = await hosted.opened()
    if tool == "deaf":
        assert (await client.say(call(tool)))[0] == 200
    told = await error(client, "echo" if tool == "deaf" else tool)
    assert told["message"].startswith(f"MCP server '{tool}' was ended by SIGTERM")
    await hosted.gone()


@pytest.mark.slow
async def test_a_number_that_is_too_large_for_a_token_or_a_subscription_harms_nobody() -> None:
    session = ProcessSession("cat", McpServer(command=["cat"]), Secrets([]), ("", ""), lambda _: None)
    session.id = "s"
    stream, large = session.listen(), 10**30
    asked = {**call("echo", id=1), "params": {"_meta": {"progressToken": large}}}
    told = {"jsonrpc": "2.0", "method": "x", "params": {"_meta": {"io.modelcontextprotocol/subscriptionId": large}}}
    for sent in (asked, told, {"jsonrpc": "2.0", "method": "last"}):
        line = json.dumps(sent).encode()
        ask = session.request if "id" in sent else session.send
        await ask(messages(line), line)
    async with asyncio.timeout(PATIENCE):
        assert json.loads(await stream.next() or b"")["method"] == "last"
    session.process.stop()
    await session.task


def test_a_server_may_open_its_stderr_by_name() -> None:
    async def said() -> list[str]:
        words = "echo started > /dev/stderr && cat"
        session = ProcessSession("sh", McpServer(command=["sh", "-c", words]), Secrets([]), ("", ""), lambda _: None)
        await until(lambda: bool(session.process.last_lines))
        session.process.stop()
        await session.task
        return list(session.process.last_lines)

    assert uvloop.run(said()) == ["started"]


def test_what_waits_to_be_written_when_it_is_told_to_end_is_not_written() -> None:
    async def told() -> list[BaseException | None]:
        session = ProcessSession("cat", McpServer(command=["sleep", "600"]), Secrets([]), ("", ""), lambda _: None)
        begun = asyncio.Event()

        async def write() -> None:
            begun.set()
            await session.process.write(b"x" * (4 << 20))

        first = asyncio.ensure_future(write())
        await begun.wait()
        await until(lambda: session.process.pid > 0)
        second = asyncio.ensure_future(session.process.write(b"x"))
        await asyncio.sleep(0)
        session.process.stop()
        found = await asyncio.gather(first, second, return_exceptions=True)
        await session.task
        return list(found)

    found = uvloop.run(told())
    assert isinstance(found[1], BrokenPipeError)


@pytest.mark.slow
async def test_a_damaged_record_of_one_attempt_keeps_no_other_session() -> None:
    class Tape:
        def tell(self, ending: ProcessExit) -> None: ...

        def over(self, owner: Owner) -> bool:
            if owner[0] == "damaged":
                raise DamagedRecordError("style 7 is missing")
            return True

    host = ProcessPool("cat", McpServer(command=["cat"]), Secrets([]), Tape())
    damaged, other = host.begin(("damaged", "a1")), host.begin(("r1", "a1"))
    host.expire(other.last_active + 10)
    await other.task
    assert host.find(damaged.id, "damaged") is damaged
    await host.close()


async def test_there_is_a_limit_to_processes(take: Take) -> None:
    hosted = take("two")
    first, _ = await hosted.opened(), await hosted.opened()
    client = hosted.client()
    status, body = await client.say(INITIALIZE)
    told = json.loads(body)["error"]
    assert (status, told["data"]) == (200, {"reason": "mcp_processes"})
    assert "(mcp.servers.two.processes)" in told["message"]
    assert await hosted.end(first) == 200

    async def there_is_room() -> bool:
        return "error" not in json.loads((await client.say(INITIALIZE))[1])

    await waiting.until(there_is_room)
    await until_left(hosted.mark, 6)


@pytest.mark.smoke
@pytest.mark.parametrize("how", ["end", "terminate", "kill"])
async def test_nothing_is_left_of_a_stubborn_server(take: Take, alone: Alone, how: str) -> None:
    """It ignores the end of its input and TERM, and so does what it has started in a session of its own."""
    hosted = take("stubborn") if how == "end" else await alone("", "stubborn")
    client = await hosted.opened()
    child = json.loads(await text(client, "children"))["child"]
    assert child in processes(hosted.mark)
    if how == "end":
        assert await hosted.end(client) == 200
    else:
        await getattr(hosted.gateway, how)()
    await hosted.gone()


@pytest.mark.slow
async def test_sessions_that_are_forgotten_end(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients open sessions and vanish; one listens, and stays."""
    monkeypatch.setattr(bridge, "IDLE_S", 1.5)
    mark = uuid4().hex
    async with locally(tmp_path, config(mark)) as gateway, AsyncExitStack() as stack:
        hosted = Hosted(gateway, http, mark)
        listening, status = hosted.client(), 0
        while status != 200:  # on a busy machine one may be forgotten before it listens
            listening = await hosted.opened()
            status = (await stack.enter_async_context(listening.listen())).status
            assert status in (200, 404)
        await asyncio.gather(*(hosted.opened(f"r{number}") for number in range(8)))
        await until_left(hosted.mark, 3)
        assert "pid" in await text(listening, "echo")
    await hosted.gone()


async def test_the_end_of_an_attempt_ends_its_processes(take: Take) -> None:
    hosted = take("attempt")
    queued: dict[str, Any] = {"rollouts": [{"id": hosted.rollout("q1"), "input": {}}]}
    async with hosted.http.post(f"{hosted.gateway.url}/api/rollouts", json=queued) as made:
        assert made.status == 200, await made.text()
    async with hosted.http.post(f"{hosted.gateway.url}/api/claims", json={"worker": "w"}) as claimed:
        attempt = (await claimed.json())["claims"][0]["attempt"]["id"]
    client, _ = hosted.client("q1", attempt), await hosted.opened()
    await client.open()
    assert len(processes(hosted.mark)) == 6
    finish = f"{hosted.gateway.url}/api/rollouts/{hosted.rollout('q1')}/attempts/{attempt}/finish"
    async with hosted.http.post(finish, json={"status": "succeeded", "worker": "w"}) as ended:
        assert ended.status == 200, await ended.text()
    await until_left(hosted.mark, 3)


async def test_an_open_request_ends_with_the_gateway(alone: Alone) -> None:
    hosted = await alone()
    client = await hosted.opened()
    waiting = asyncio.ensure_future(client.say(call("hangs")))
    await hosted.tape.open_span(hosted.rollout(), name="tools/call hangs")
    assert len(processes(hosted.mark)) == 3
    waiting.cancel()
    await hosted.gateway.restart()
    spans = await hosted.tape.spans(hosted.rollout(), 2)
    assert [span.status for span in spans] == [SpanStatus.OK, SpanStatus.CANCELLED]
    assert (await client.say(call("echo")))[0] == 404
    await hosted.gone()


# What waits for a client holds the process up while the client is there, and is bounded while it is not ---------------


async def test_a_client_that_is_slow_is_waited_for() -> None:
    stream = LineQueue()
    stream.attached = True
    stream.put(b"x" * (1 << 20))
    await stream.wait_for_room()
    stream.put(b"y")
    waiting = asyncio.ensure_future(stream.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert await stream.next() == b"x" * (1 << 20)
    await waiting
    stream.put(b"z" * (2 << 20))
    waiting = asyncio.ensure_future(stream.wait_for_room())
    stream.detach()
    await waiting


@pytest.mark.parametrize(("count", "size"), [(1500, 1), (30, 1 << 20)])
async def test_of_what_waits_for_nobody_the_oldest_is_dropped(count: int, size: int) -> None:
    stream = LineQueue()
    for number in range(count):
        stream.put(b"%d" % number + b"x" * size)
        await stream.wait_for_room()
    later = LineQueue()
    later.take_over(stream)
    assert await stream.next() is None
    later.end()
    found = [line async for line in lines(later)]
    assert len(found) == count - stream.dropped
    assert (len(found), found[-1]) == (1000 if size == 1 else 7, b"%d" % (count - 1) + b"x" * size)


async def lines(stream: LineQueue) -> AsyncGenerator[bytes]:
    while (line := await stream.next()) is not None:
        yield line
