"""A server of tools on stdin and stdout that does what servers should not.

    python mcp_stdio_server.py MARK [HABIT ...]

It knows nothing but the standard library. MARK is in its command line and in that of what it starts, so that a test
finds them. Habits: `stubborn` (ignores the end of its input, and TERM), `dies` (before it reads anything). What it does
when a tool is called is decided by the name of the tool, see `Tools`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from typing import Any, cast

Json = dict[str, Any]
SPACED = b'{"jsonrpc" : "2.0",\t"id":%b , "result": {"content": [{"type":"text","text":"\xc3\xa9\\u00e9"}]} }'
"""An answer as no encoder writes it."""


def put(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def say(**message: Any) -> None:
    put(json.dumps({"jsonrpc": "2.0", **message}).encode())


class Tools:
    """By their names; each has (id of the request, its arguments, its `_meta`)."""

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.listening: Any = None
        self.cancelled: list[Any] = []
        self.asking: Any = None

    def result(self, id: Any, value: Any) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        say(id=id, result={"content": [{"type": "text", "text": text}]})

    def echo(self, id: Any, arguments: Json, meta: Json) -> None:
        self.result(id, {"pid": os.getpid(), **arguments})

    def spaced(self, id: Any, arguments: Json, meta: Json) -> None:
        put(SPACED % json.dumps(id).encode())

    def raw(self, id: Any, arguments: Json, meta: Json) -> None:
        """A line of these bytes."""
        put(arguments["line"].encode("latin-1"))

    def dies(self, id: Any, arguments: Json, meta: Json) -> None:
        print("it cannot go on", file=sys.stderr, flush=True)
        os._exit(7)

    def killed(self, id: Any, arguments: Json, meta: Json) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(self, id: Any, arguments: Json, meta: Json) -> None:
        """Answers never."""

    def mute(self, id: Any, arguments: Json, meta: Json) -> None:
        os.close(1)
        time.sleep(600)

    def deaf(self, id: Any, arguments: Json, meta: Json) -> None:
        os.close(0)
        self.result(id, {"content": []})
        time.sleep(600)

    def held_back(self, id: Any, arguments: Json, meta: Json) -> None:
        """Answers when `release` is called."""
        self.held.append(id)

    def release(self, id: Any, arguments: Json, meta: Json) -> None:
        for one in self.held:
            self.result(one, "released")
        self.held = []
        self.result(id, "done")

    def requests(self, id: Any, arguments: Json, meta: Json) -> None:
        """Which wait for `release`, and which are no longer wanted."""
        self.result(id, {"held": self.held, "cancelled": self.cancelled})

    def noise(self, id: Any, arguments: Json, meta: Json) -> None:
        for line in (b"Starting ...", b"{broken", b"\xff\xfe", b"[1]", b"", b"{}"):
            put(line)
        self.result(id, "after the noise")

    def large(self, id: Any, arguments: Json, meta: Json) -> None:
        self.result(id, "x" * arguments["bytes"])

    def endless(self, id: Any, arguments: Json, meta: Json) -> None:
        while True:
            sys.stdout.buffer.write(b"x" * (1 << 20))

    def talks(self, id: Any, arguments: Json, meta: Json) -> None:
        for number in range(arguments["lines"]):
            print(f"line {number} {os.environ.get('TALK_KEY', '')} " + "x" * 80, file=sys.stderr)
        self.result(id, "talked")

    def progress(self, id: Any, arguments: Json, meta: Json) -> None:
        for number in (1, 2):
            say(method="notifications/progress", params={"progressToken": meta["progressToken"], "progress": number})
        say(method="notifications/message", params={"level": "info", "data": "nearly"})
        self.result(id, "done")

    def changed(self, id: Any, arguments: Json, meta: Json) -> None:
        about = {"_meta": {"io.modelcontextprotocol/subscriptionId": self.listening}} if self.listening else {}
        say(method="notifications/tools/list_changed", params=about)
        self.result(id, "changed")

    def ask(self, id: Any, arguments: Json, meta: Json) -> None:
        self.asking = id
        say(id="s-1", method="sampling/createMessage", params={"maxTokens": 5, "messages": []})

    def children(self, id: Any, arguments: Json, meta: Json) -> None:
        """Leaves one in a session of its own, which ignores TERM and the end of its input."""
        code = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code, sys.argv[1]],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        child.stdout.readline()
        self.result(id, {"child": child.pid})

    def surroundings(self, id: Any, arguments: Json, meta: Json) -> None:
        limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)]
        self.result(id, {"env": dict(os.environ), "cwd": os.getcwd(), "limits": limits})


def handle(tools: Tools, message: Json) -> None:
    method, id = message.get("method"), message.get("id")
    params: Json = message.get("params") or {}
    if method == "initialize":
        result = {"protocolVersion": params.get("protocolVersion"), "capabilities": {}, "serverInfo": {"name": "evil"}}
        say(id=id, result=result)
    elif method == "tools/call":
        # Where it does not come back, the others go on.
        run = getattr(tools, params["name"])
        if params["name"] in ("hangs", "burns"):
            threading.Thread(target=run, args=(id, {}, {}), daemon=True).start()
        else:
            run(id, params.get("arguments") or {}, params.get("_meta") or {})
    elif method == "subscriptions/listen":
        tools.listening = id
        about = {"_meta": {"io.modelcontextprotocol/subscriptionId": id}}
        say(method="notifications/subscriptions/acknowledged", params=about)
    elif method == "notifications/cancelled":
        tools.cancelled.append(params["requestId"])
    elif method is None and id == "s-1":
        tools.result(tools.asking, message["result"]["content"]["text"])
    elif id is not None:
        say(id=id, error={"code": -32601, "message": f"Method not found: {method}"})


def main() -> None:
    if "dies" in sys.argv:
        print("a module is missing", file=sys.stderr)
        sys.exit(3)
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tools = Tools()
    for line in sys.stdin.buffer:
        found: Any = json.loads(line)
        several = cast("list[Json]", found if isinstance(found, list) else [found])
        for message in several:
            handle(tools, message)
    while "stubborn" in sys.argv:
        time.sleep(60)


if __name__ == "__main__":
    main()
