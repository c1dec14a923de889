"""What is refused of a wrapper, and that odd frames break nothing."""

from __future__ import annotations

import json

import aiohttp
from fakes.process import Gateway
from fakes.tape import Tape

from penstock.gateway.model.stdio_frames import CLIENT, END, GAP, PATH, SERVER, StdioFrame, pack_frame

CALL = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"t"}}\n'
ANSWER = b'{"jsonrpc":"2.0","id":1,"result":{}}\n'
FRAMES = {"Content-Type": "application/octet-stream"}
MOST = 2**64 - 1


def about(**said: object) -> bytes:
    return json.dumps({"session": f"{1:011x}-{1:016x}", "server": "tools", **said}).encode() + b"\n"


def frame(kind: int, sequence: int, data: bytes, time_ns: int = 10**18, size: int | None = None) -> bytes:
    return pack_frame(StdioFrame(kind, sequence, time_ns, len(data) if size is None else size, data))


async def posted(http: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str]) -> tuple[int, str]:
    async with http.post(url + PATH, data=body, headers=headers, skip_auto_headers=("Content-Type",)) as response:
        return response.status, await response.text()


async def test_a_foreign_page_cannot_send_frames(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    for headers in ({"Content-Type": "text/plain;charset=UTF-8"}, dict[str, str]()):
        status, said = await posted(http, gateway.address("r1"), about() + frame(CLIENT, 1, CALL), headers)
        assert status == 415, said
        assert "application/octet-stream" in said


NO_FRAMES = (
    b"",
    b"\xff\n",
    about(server="a/b"),
    about(session="x"),
    about(lost=["x"]),
    about(more=1),
    about() + b"half a frame",
    about() + frame(1, 1, CALL),
    about() + frame(CLIENT, 0, CALL),
    about() + frame(CLIENT, 1, CALL, size=1),
    about() + frame(CLIENT, 1, CALL, size=MOST),
    about() + frame(CLIENT, 1, CALL, time_ns=MOST),
    about() + frame(CLIENT, MOST, CALL),
)


async def test_what_is_no_frame_is_refused(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    for body in NO_FRAMES:
        status, said = await posted(http, gateway.address("r1"), body, FRAMES)
        assert status == 400, (body, said)
        assert "a line of JSON and frames" in said


ODD = (
    frame(CLIENT, 1, CALL, 0) + frame(SERVER, 2, ANSWER, 0),
    frame(CLIENT, 1, CALL, 2**62) + frame(SERVER, 2, ANSWER, 2**62, size=2**62),
    frame(CLIENT, 1, CALL, 10**18) + frame(SERVER, 2, ANSWER, 10**9),
    frame(CLIENT, 1, b'{"id":1e999,"method":"x"}\n') + frame(SERVER, 2, b'{"id":"\xff","result":1}\n'),
    frame(GAP, 1, b"[1]") + frame(GAP, 2, b'{"lines":-5,"since_ns":999999999999999999999999}'),
    frame(CLIENT, 1, CALL) + frame(END, 2, b'{"by":[1],"exit_code":999999999999999999999999}'),
    frame(CLIENT, 1, b'{"id":1,"method":"x","params":' + b"[" * 100_000 + b"\n"),
)


async def test_odd_frames_become_spans_that_can_be_read(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    tape = Tape(gateway.url, http)
    for number, odd in enumerate(ODD):
        status, said = await posted(http, gateway.address(f"r{number}"), about() + odd, FRAMES)
        assert status == 200, (number, said)
        for span in await tape.when(f"r{number}", "a1", bool):
            _ = await tape.detail(span)
        _ = await tape.get(f"/api/rollouts/r{number}/attempts/a1/tools")
    for path in ("/api/rollouts", "/api/stats"):
        _ = await tape.get(path)
