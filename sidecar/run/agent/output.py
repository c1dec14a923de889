"""The output of an agent: cuts bytes into lines, and finds the last JSON line and the last line on stderr. No I/O.

The last line of stdout that is JSON is the agent's output. An object with a number `reward`, or with an object of
numbers `rewards`, is also a reward.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Literal, NoReturn, cast

Stream = Literal["stdout", "stderr"]
LONGEST_LINE = 1 << 20
"""The most bytes of a line; a longer one is cut into pieces of this size, and a piece is not JSON."""
DEEPEST = 100
"""The most levels of nesting of an output: the gateway reads no deeper bodies."""
LAST_WORDS = 300
LAST_LINES = 5


class LineDecoder:
    """Cuts a stream of bytes into lines."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[str]:
        """Add bytes; return the lines that are complete now, without their ends."""
        self._rest += data
        *lines, rest = self._rest.split(b"\n")
        pieces = [line[at : at + LONGEST_LINE] for line in lines for at in range(0, len(line) or 1, LONGEST_LINE)]
        while len(rest) >= LONGEST_LINE:
            pieces.append(rest[:LONGEST_LINE])
            rest = rest[LONGEST_LINE:]
        self._rest = bytearray(rest)
        return list(map(_text, pieces))

    def close(self) -> list[str]:
        """The last line, if it had no end."""
        rest, self._rest = self._rest, bytearray()
        return [_text(rest)] if rest else []


def _text(line: bytes | bytearray) -> str:
    return line.decode(errors="replace").removesuffix("\r")


class AgentOutput:
    """Both streams of one agent: passes its lines on and keeps those that explain its end."""

    def __init__(self, line: Callable[[Stream, str], None]) -> None:
        self._line = line
        self._lines: dict[Stream, LineDecoder] = {"stdout": LineDecoder(), "stderr": LineDecoder()}
        self.result: Any = None
        """The value of the last JSON line of stdout; None until there is one."""
        self.last_words = ""
        """The last line of stderr that is not empty."""
        self._ends: dict[Stream, deque[str]] = {"stdout": deque(maxlen=LAST_LINES), "stderr": deque(maxlen=LAST_LINES)}

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines of stderr; those of stdout if there are none, because some engines do not tell the streams
        apart.
        """
        return tuple(self._ends["stderr"] or self._ends["stdout"])

    def feed(self, stream: Stream, data: bytes) -> None:
        """Add bytes that the agent wrote; empty at the end of the stream."""
        lines = self._lines[stream]
        for line in lines.feed(data) if data else lines.close():
            self._note(stream, line)
            self._line(stream, line)

    def _note(self, stream: Stream, line: str) -> None:
        if line.strip():
            self._ends[stream].append(line.rstrip()[:LAST_WORDS])
        if stream == "stderr":
            self.last_words = line.strip()[:LAST_WORDS] or self.last_words
        elif (found := parse_json_line(line)) is not None:
            self.result = found


def parse_json_line(line: str) -> Any:
    """The value of a line of JSON; None when it is not JSON."""
    text = line.strip()
    if not text or text[0] not in '{["-0123456789tf':
        return None
    try:
        return _whole(json.loads(text, parse_constant=_refuse), text)
    except (ValueError, RecursionError):
        return None


def _whole(value: Any, text: str) -> Any:
    """The value in a form that can be written again; raises `ValueError` if it is nested too deep for the gateway."""
    if text.count("[") + text.count("{") > DEEPEST and _depth(value) > DEEPEST:
        raise ValueError("it is nested too deep")
    if "\\u" not in text:
        return value
    # A lone surrogate, as in a text that was cut, cannot be encoded: it becomes a question mark.
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def _depth(value: Any) -> int:
    depth, layer = 0, [value]
    while layer := [inner for one in layer for inner in _inside(one)]:
        depth += 1
    return depth


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast(dict[str, Any], value).values()
    return cast(list[Any], value) if isinstance(value, list) else ()


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# Pipes between a runner and its agents.
#
# They are made here, because an event loop may use sockets instead (uvloop does), and an agent cannot open a socket
# by name, as `cat /dev/stdin` and `echo done > /dev/stderr` do.

FLOOD = 1 << 20
"""The most bytes of output that may wait to be read."""


class _PipeProtocol(asyncio.StreamReaderProtocol):
    """Closes a pipe at its end. uvloop would keep it open, as a socket to which one could still write."""

    def eof_received(self) -> bool:
        _ = super().eof_received()
        return False


class OutputPipe(asyncio.StreamReader):
    """The end of a pipe from which an agent's output is read."""

    def set_transport(self, transport: asyncio.BaseTransport) -> None:
        super().set_transport(transport)
        self._pipe = transport

    def close(self) -> None:
        """Close the pipe before its end: a process that got away may hold its other end for ever."""
        self._pipe.close()


async def output_pipe(theirs: ExitStack) -> tuple[OutputPipe, int]:
    """A pipe for an agent's output: (its reader, the end that the agent writes to). `theirs` closes that end here."""
    reading, writing = os.pipe()
    theirs.callback(os.close, writing)
    reader, loop = OutputPipe(limit=FLOOD), asyncio.get_running_loop()
    _ = await loop.connect_read_pipe(lambda: _PipeProtocol(reader), os.fdopen(reading, "rb", 0))
    return reader, writing


async def input_pipe(theirs: ExitStack, data: bytes) -> int:
    """The end of a pipe from which an agent reads `data`; `theirs` closes that end here. The loop writes as the agent
    reads; an agent that does not read is no error.
    """
    reading, writing = os.pipe()
    theirs.callback(os.close, reading)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(writing, "wb", 0))
    # Written before the agent starts, because the pipe of an agent that has ended is closed and must not be written to.
    transport.write(data)
    transport.close()
    return reading
