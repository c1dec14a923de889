"""Counts the Python function calls of our own code on paths through the gateway: figures that do not depend on the
machine.

    .venv/bin/python -m bench.paths

The gateway, a model and an agent are threads of one process. A profiler notes each call of a function of ours: by the
event loop, by the recorder, by other threads. The calls that the gateway makes without any request (its ticks) are
learnt while it is idle, and left out. The model answers and sends its events, and the agent goes on, when the gateway
has come to rest, so each step has its own turn of the recorder; the path is over when it rests.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Mapping
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import uvloop

from penstock.gateway.app import Gateway
from penstock.gateway.config import load
from penstock.gateway.tape.store import recorder

OURS: Final = f"{Path(__file__).parents[1]}/penstock/"
LOOP, RECORDER = "MainThread", "penstock-recorder"
STEP_S, END_S = 0.05, 0.5
"""Seconds without a call of ours after which the gateway rests: between steps, and at the end."""
IDLE_S: Final = 3.0
FEW, MANY = 2, 22
"""Events of the two streams. The difference of their costs is the cost of the events."""
GATHER_S: Final = 0.5
"""A batch has some dozens of calls, however busy the machine is: they share what it costs itself."""
BUSY_CONNECTIONS, BUSY_CALLS, BUSY_EVENTS, AT_ONCE = 4, 50, 200, 20
"""The load: connections, calls on each, events of a streamed answer, and events that the model writes at once."""
CONFIG: Final = """\
data = "{home}/tape"
port = 0
[[upstream]]
name = "model"
base_url = "http://127.0.0.1:{port}/v1"
[[route]]
model = "*"
upstream = "model"
"""
LOADS: Final = {"1 KB": 0, f"{BUSY_EVENTS} events": BUSY_EVENTS}
STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHAT: Final = "/v1/chat/completions"
HEADERS: Final = {"content-type": "application/json", "authorization": "Bearer sk-mine"}
STABLE: Final = "You are a travel agent of Acme Air. Never refund a basic fare."
CANDIDATE: Final = f"{STABLE} Ask before you book."
POLICY: Final = {
    "stages": [{"split": 0.5, "rollouts": 3}],
    "margin_absolute": 0.1,
    "horizon": 2000,
    "holdback": {"rollouts": 0},
    "checked": "skip",
    "replayed": "skip",
    "shadowed": "skip",
}


class Called(NamedTuple):
    """A call of a function of ours."""

    thread: str
    file: str
    function: str


class Figures(NamedTuple):
    """The cost of a path in function calls."""

    calls: int
    loop: int
    recorder: int
    files: int
    loop_turns: int
    """Number of times that the loop went from one file to another."""
    recorder_turns: int

    @classmethod
    def of(cls, called: list[Called]) -> Figures:
        loop, recorder = ([one.file for one in called if one.thread == name] for name in (LOOP, RECORDER))
        turns = [sum(one != other for one, other in pairwise(files)) for files in (loop, recorder)]
        return cls(len(called), len(loop), len(recorder), len({one.file for one in called}), *turns)


class Load(NamedTuple):
    """Function calls a call of an agent, while others run beside it."""

    loop: float
    recorder: float

    @classmethod
    def of(cls, called: list[Called], n_calls: int) -> Load:
        return cls(*[sum(one.thread == name for one in called) / n_calls for name in (LOOP, RECORDER)])


class Profiler:
    """Notes function calls while it is on. Make it before the threads that it must observe."""

    def __init__(self) -> None:
        self.called: list[Called] = []
        self.background: set[CodeType] = set()
        """Functions that the gateway calls without any request."""
        self._on = self._learns = False
        self._last = 0.0
        threading.setprofile(self._hear)
        sys.setprofile(self._hear)

    def _hear(self, frame: FrameType, event: str, _: object) -> None:
        if not self._on or event != "call" or not frame.f_code.co_filename.startswith(OURS):
            return
        root, above = frame, frame.f_back
        while above is not None:
            root, above = above if above.f_code.co_filename.startswith(OURS) else root, above.f_back
        if self._learns:
            self.background.add(root.f_code)
        elif root.f_code in self.background:
            return
        name = threading.current_thread().name
        self.called.append(Called(name, frame.f_code.co_filename.removeprefix(OURS), frame.f_code.co_qualname))
        self._last = time.monotonic()

    async def idle(self) -> float:
        """Return calls a second without requests. Their roots are in the background from now on."""
        self.called, self._on, self._learns = [], True, True
        began = time.monotonic()
        await asyncio.sleep(IDLE_S)
        self._on = self._learns = False
        return len(self.called) / (time.monotonic() - began)

    def start(self) -> None:
        self.called, self._on, self._last = [], True, time.monotonic()

    def rest(self, seconds: float) -> None:
        """Wait until no function was called for so long."""
        while (left := self._last + seconds - time.monotonic()) > 0:
            time.sleep(left)

    async def end(self) -> list[Called]:
        """Wait for the end of the path; return the calls on it."""
        await asyncio.to_thread(self.rest, END_S)
        self._on = False
        return self.called


class Model(ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, profiler: Profiler) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.profiler = profiler
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answering(StreamRequestHandler):
    """A connection to the model's server."""

    def handle(self) -> None:
        """Answer requests until the client closes."""
        while (head := self._head()) is not None:
            asked = json.loads(self.rfile.read(head))
            if asked["model"] == "busy":
                self._many(asked["n_events"]) if asked.get("stream") else self._whole("x" * 800)
                continue
            self._rest()
            self._stream(asked["n_events"]) if asked.get("stream") else self._whole("hello")

    def _rest(self) -> None:
        assert isinstance(self.server, Model)
        self.server.profiler.rest(STEP_S)

    def _head(self) -> int | None:
        length: int | None = None
        while (line := self.rfile.readline()).strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return length

    def _whole(self, content: str) -> None:
        message = {"role": "assistant", "content": content}
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        answer = {"id": "c1", "object": "chat.completion", "model": "m", "usage": usage}
        body = json.dumps({**answer, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        _ = self.wfile.write(head.encode() + body)

    def _stream(self, events: int) -> None:
        head = STREAM_HEAD
        for number in range(events):
            choice = {"index": 0, "delta": {"content": f"w{number} "}, "finish_reason": None}
            chunk = {"id": "c1", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}
            head = self._event(head, json.dumps(chunk).encode())
            self._rest()
        _ = self.wfile.write(self._event(head, b"[DONE]") + b"0\r\n\r\n")

    def _event(self, head: bytes, data: bytes) -> bytes:
        _ = self.wfile.write(head + _event_chunk(data))
        return b""

    def _many(self, events: int) -> None:
        """A stream whose events come as fast as they can be written."""
        choice = {"index": 0, "delta": {"content": "word "}, "finish_reason": None}
        chunk = json.dumps({"id": "c1", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}).encode()
        _ = self.wfile.write(STREAM_HEAD)
        for _ in range(events // AT_ONCE):
            _ = self.wfile.write(_event_chunk(chunk) * AT_ONCE)
        _ = self.wfile.write(_event_chunk(b"[DONE]") + b"0\r\n\r\n")


def _event_chunk(data: bytes) -> bytes:
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


class Agent:
    """A client of the gateway with one connection."""

    def __init__(self, port: int, profiler: Profiler) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._profiler = profiler

    def close(self) -> None:
        self._connection.close()

    async def ask(self, path: str, body: Mapping[str, Any]) -> None:
        """Send a request and read the answer; AssertionError for an error."""
        await asyncio.to_thread(self._ask, path, json.dumps(body))

    def _ask(self, path: str, body: str) -> None:
        self._profiler.rest(STEP_S)
        self._connection.request("POST", path, body, HEADERS)
        response = self._connection.getresponse()
        answer = response.read()
        assert response.status < 300, (path, response.status, answer)

    async def chat(self, rollout: str, events: int = 0, prompt: str = "") -> None:
        """Make a call of a rollout's first attempt. `events`: the number of events of a streamed answer; 0 for a plain
        one."""
        messages = [{"role": "system", "content": prompt}] * bool(prompt) + [{"role": "user", "content": "hello"}]
        asked = {"model": "m", "messages": messages} | ({"stream": True, "n_events": events} if events else {})
        await self.ask(f"/rollout/{rollout}/attempt/a1{CHAT}", asked)

    async def life(self, rollout: str) -> None:
        """Take a rollout through the queue: enqueued, claimed, one call, finished."""
        await self.ask("/api/rollouts", {"rollouts": [{"id": rollout, "input": {"q": 1}}]})
        await self.ask("/api/claims", {"worker": "w", "wait_s": 0})
        await self.chat(rollout)
        ended = {"worker": "w", "status": "succeeded", "rewards": [{"value": 1.0}]}
        await self.ask(f"/api/rollouts/{rollout}/attempts/a1/finish", ended)

    def busy(self, rollout: str, events: int) -> None:
        """Make calls one after the other, without pauses, each in one packet. `events`: as in `chat`."""
        asked = {"model": "busy", "messages": [{"role": "user", "content": "word " * 40}]}
        body = json.dumps(asked | ({"stream": True, "n_events": events} if events else {}))
        fields = HEADERS | {"Host": "127.0.0.1", "Content-Length": str(len(body))}
        lines = [
            f"POST /rollout/{rollout}/attempt/a1{CHAT} HTTP/1.1",
            *(f"{name}: {it}" for name, it in fields.items()),
        ]
        request = "\r\n".join([*lines, "", body]).encode()
        with socket.create_connection((self._connection.host, self._connection.port)) as connection:
            for _ in range(BUSY_CALLS):
                connection.sendall(request)
                with http.client.HTTPResponse(connection, method="POST") as response:
                    response.begin()
                    assert response.read()

    async def rewarded(self, rollout: str) -> None:
        """Give a rollout a reward."""
        await self.ask(f"/api/rollouts/{rollout}/attempts/a1/rewards", {"value": 1.0})


async def _walk(profiler: Profiler, agent: Agent) -> tuple[float, dict[str, Figures]]:
    found: dict[str, Figures] = {}

    async def measured(name: str, path: Awaitable[None]) -> None:
        profiler.start()
        await path
        found[name] = Figures.of(await profiler.end())

    # Warm up: work that happens once must not count, and must be over before the idle gateway is measured.
    profiler.start()
    for rollout in ("warm1", "warm2", "warm3"):
        await agent.chat(rollout, FEW)
        await agent.chat(rollout)
        await agent.life(f"{rollout}-queued")
    _ = await profiler.end()
    idle = await profiler.idle()

    await measured("streamed call, first of its rollout", agent.chat("r1", FEW))
    await measured("streamed call", agent.chat("r1", FEW))
    await measured(f"streamed call, {MANY - FEW} events more", agent.chat("r1", MANY))
    await measured("plain call", agent.chat("r1"))
    await measured("enqueue, claim, call, finish", agent.life("queued"))

    for text in (STABLE, CANDIDATE):
        content = {"text": text, "sent": text is STABLE}
        await agent.ask("/api/resources/planner", {"kind": "prompt", "content": content})
    await agent.ask("/api/resources/planner/releases", {"candidate": "v2", "policy": POLICY})
    for number in range(6):
        await agent.chat(f"before{number}", prompt=STABLE)
        await agent.rewarded(f"before{number}")
    profiler.start()
    _ = await profiler.end()
    await measured("first call in a canary", agent.chat("decided", prompt=STABLE))
    await measured("reward, counted, decided", agent.rewarded("decided"))
    return idle, found


async def _under_load(gateway: Gateway, profiler: Profiler, agents: list[Agent], events: int) -> Load:
    with patch.object(recorder, "_GATHER_SECONDS", GATHER_S):
        for start in (lambda: None, profiler.start):
            # The first round warms up.
            start()
            await asyncio.gather(*[asyncio.to_thread(agent.busy, f"busy{i}", events) for i, agent in enumerate(agents)])
            assert await gateway.recorder.flush()
        return Load.of(await profiler.end(), len(agents) * BUSY_CALLS)


class Measured(NamedTuple):
    """What `measure` finds."""

    idle: float
    """Calls of an idle gateway a second."""
    paths: dict[str, Figures]
    load: dict[str, Load]


def measure() -> Measured:
    """Return the figures of a gateway of its own."""
    return uvloop.run(_measure())


async def _measure() -> Measured:
    profiler = Profiler()
    with tempfile.TemporaryDirectory() as home, Model(profiler) as model:
        (config := Path(home) / "penstock.toml").write_text(CONFIG.format(home=home, port=model.server_address[1]))
        gateway = Gateway(load(config))
        _, port = await gateway.start()
        try:
            # Ticks belong to no call: a gateway comes to rest only if they are known.
            _ = await profiler.idle()
            # Before prompts are registered: calls that use none ask for none.
            with ExitStack() as stack:
                agents = [stack.enter_context(closing(Agent(port, profiler))) for _ in range(BUSY_CONNECTIONS)]
                loads = {name: await _under_load(gateway, profiler, agents, events) for name, events in LOADS.items()}
            with closing(Agent(port, profiler)) as agent:
                idle, found = await _walk(profiler, agent)
            return Measured(idle, found, loads)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            await gateway.stop()
            model.shutdown()


if __name__ == "__main__":
    measured = measure()
    print(f"{'path':<36} calls = loop + recorder + others   files  turns: loop, recorder")
    for path, cost in measured.paths.items():
        others = cost.calls - cost.loop - cost.recorder
        parts = f"{cost.calls:>5}   {cost.loop:>4}   {cost.recorder:>8}   {others:>6}   {cost.files:>5}"
        print(f"{path:<36} {parts}         {cost.loop_turns:>4}      {cost.recorder_turns:>4}")
    for what, busy in measured.load.items():
        print(f"under load, {what}: {busy.loop:.1f} on the loop, {busy.recorder:.1f} on the recorder's thread")
    print(f"idle: {measured.idle:.0f} calls a second")
