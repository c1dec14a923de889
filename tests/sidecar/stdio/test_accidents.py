"""A gateway that breaks off its answer, and folders that are damaged: what passes is sent nevertheless."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from fakes.process import PATIENCE

from penstock.gateway.model.stdio_frames import CLIENT
from penstock.sidecar.run.agent import helper
from penstock.sidecar.stdio.delivery import DeliveryRefusal, Destination, GatewayUnavailable, post, send_leftover
from penstock.sidecar.stdio.spool import SPOOL_BYTES, LinePiece, Spool

BROKEN_OFF = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 100\r\n\r\n{"
GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@pytest.fixture
def answering() -> Generator[Callable[..., str]]:
    """A server that gives these answers, one for each connection, and closes each; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def start(*answers: bytes) -> str:
            def serve() -> None:
                for one in answers:
                    client, _ = listening.accept()
                    with client:
                        _ = client.recv(1 << 16)
                        client.sendall(one)

            threading.Thread(target=serve, daemon=True).start()
            return f"http://127.0.0.1:{listening.getsockname()[1]}"

        yield start


def test_a_gateway_that_breaks_off_its_refusal_is_away(answering: Callable[..., str]) -> None:
    with pytest.raises(GatewayUnavailable, match="503"):
        _ = post(Destination(answering(BROKEN_OFF), None), b"{}\n")


def test_what_is_no_address_of_a_gateway_is_not_asked_for_ever() -> None:
    with pytest.raises(
        DeliveryRefusal, match=r"unix:/run/g\.sock is not the address of a gateway: it begins with neither"
    ):
        _ = post(Destination("unix:/run/g.sock", None), b"{}\n")


@pytest.mark.parametrize(
    "answer",
    [
        b'{"done": null, "open": [], "need": [], "recorded_bytes": 1}',
        b'{"done": 1, "open": {}, "need": [], "recorded_bytes": 1}',
        b'{"done": 1, "open": [], "need": ["x"], "recorded_bytes": 1}',
        b'{"done": 1, "open": []}',
        b"[" * 10_000,
        b"<html>",
    ],
)
def test_what_answers_like_no_gateway_is_none(answering: Callable[..., str], answer: bytes) -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer)
    with pytest.raises(DeliveryRefusal, match=r"^http://127\.0\.0\.1:\d+ is not the address of a gateway: "):
        _ = post(Destination(answering(whole), None), b"{}\n")


@pytest.mark.parametrize("key", ["pst_secret\n", "pst_\x1bsecret", "pst_\u201csecret\u201d"])
def test_a_key_that_cannot_be_sent_is_not_told(
    key: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DeliveryRefusal, match=r"^the key for the gateway has a character that") as refused:
        _ = post(Destination("http://127.0.0.1:1", key), b"{}\n")
    monkeypatch.setattr(helper, "_said", set[str]())
    sender = helper.ReportSender()
    sender.put(("http://127.0.0.1:1", key), helper.EVENTS, {"name": "said"})
    assert sender.wait(PATIENCE)
    said = capfd.readouterr().err
    assert "said of itself: its token has a character" in said
    assert "secret" not in str(refused.value) + said


def test_an_agent_asks_a_gateway_again_that_breaks_off_its_refusal(
    answering: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    sender = helper.ReportSender()
    sender.put((answering(BROKEN_OFF, GOOD), "pst_x"), helper.EVENTS, {"name": "said"})
    assert sender.wait(PATIENCE)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "about",
    [
        {"url": "http://127.0.0.1:1", "key": None},
        {"url": 5, "key": None, "server": "s"},
        {"url": "http://127.0.0.1:1", "key": 5, "server": {}},
        [],
        None,
    ],
)
def test_a_damaged_folder_keeps_nobody_from_sending(tmp_path: Path, about: Any) -> None:
    folder = tmp_path / "0-1"
    spool = Spool(folder, SPOOL_BYTES)
    spool.put(CLIENT, [LinePiece(b"{}\n", 3, True)], 1)
    spool.close()
    (folder / "about.json").write_text(json.dumps(about))
    (folder / "copy of 1.frames").write_bytes(b"x")
    assert not send_leftover(folder, Destination("http://127.0.0.1:1", None), lambda: False)


@pytest.mark.parametrize(("days", "kept"), [(29, True), (31, False)])
def test_a_damaged_folder_takes_room_for_a_month_at_most(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], days: int, kept: bool
) -> None:
    folder = tmp_path / "0-1"
    spool = Spool(folder, SPOOL_BYTES)
    spool.put(CLIENT, [LinePiece(b"{}\n", 3, True)], 1)
    spool.close()
    (folder / "about.json").touch()  # the power was cut
    then = time.time() - days * 86400
    os.utime(folder, (then, then))
    assert not send_leftover(folder, Destination("http://127.0.0.1:1", None), lambda: False)
    assert folder.exists() == kept
    assert ("a month (about.json is damaged" in capfd.readouterr().err) != kept


def test_files_of_others_in_a_folder_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "0-1"
    spool = Spool(folder, SPOOL_BYTES)
    spool.put(CLIENT, [LinePiece(b"{}\n", 3, True)], 1)
    spool.close()
    (folder / "copy of 1.frames").write_bytes(b"x")
    found = Spool(folder, 0)
    found.recover(2)
    assert found.last == 2
    assert found.ended
    found.close()
