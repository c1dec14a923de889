"""Sends recorded traffic to the gateway, also that of earlier wrappers. Needs the standard library alone.

A thread does it, and only the end of the wrapper waits for it, for a moment. While the gateway is away the thread tries
again and again; traffic that it cannot send stays on disk, and the next wrapper sends it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from urllib.parse import urlsplit

from penstock.gateway.model.stdio_frames import PATH, frame_bounds
from penstock.gateway.model.times import Backoff
from penstock.sidecar.stdio.spool import ABOUT, Spool, bytes_used, session_folders

if TYPE_CHECKING:
    from urllib.error import HTTPError
    from urllib.request import OpenerDirector

BATCH: Final = 1 << 20
"""The approximate most bytes of one request."""
GATHER_S: Final = 0.05
"""The time for which the first line of a request waits for others; s."""
TIMEOUT_S: Final = 30.0
EMPTY_S: Final = 60.0
"""Age at which an empty folder is removed, because its wrapper was killed before it wrote anything; s."""
PAUSES: Final = Backoff(0.1, 5.0)
KEPT_S: Final = 30 * 86400.0
"""Age until which a session that no gateway accepts is kept; s. Longer, it would leave no room for others."""
AGENT_TOKEN: Final = "pst_"
"""The prefix of a key that opens one rollout only. Such a key is written to disk beside its session."""


class Destination(NamedTuple):
    """The destination of a session."""

    url: str
    """The address of the session's rollout, or the gateway's."""
    key: str | None


class GatewayUnavailable(Exception):
    """Raised when the gateway does not answer, or cannot serve now."""


class DeliveryRefusal(Exception):
    """Raised when the gateway refuses for good."""


def say(text: str) -> None:
    """Print a line on stderr: stdout belongs to the server."""
    with suppress(OSError):
        _ = os.write(2, f"penstock: {text}\n".encode(errors="replace"))


def destination_record(home: Destination, server: str) -> dict[str, Any]:
    """The destination as it is written beside a session. A key is written only if it opens the rollout and nothing
    else.
    """
    key = home.key if home.key is not None and home.key.startswith(AGENT_TOKEN) else None
    return {"url": home.url, "server": server, "key": key}


class SessionDelivery:
    """A session on its way to the gateway."""

    def __init__(self, spool: Spool, home: Destination, server: str) -> None:
        self.spool = spool
        self.recorded_bytes: int | None = None
        """Bytes of a line that the gateway keeps; None until it has answered."""
        self.home, self._server = home, server
        self._done = 0
        self._open: list[int] = []
        self._need: list[int] = []

    @property
    def complete(self) -> bool:
        """True if all of the session is on the tape."""
        return self.spool.ended and self._done >= self.spool.last

    def step(self) -> bool:
        """Send the next frames; False when there are none. Raises `GatewayUnavailable` or `DeliveryRefusal`."""
        lost: list[int] = []
        if self._need:
            body, lost = self.spool.select(self._need, BATCH)
        else:
            body = self.spool.after(self._done, BATCH)
            if not body:
                return False
        said: dict[str, Any] = {"session": self.spool.folder.name, "server": self._server}
        answer = post(self.home, json.dumps(said | ({"lost": lost} if lost else {})).encode() + b"\n" + body)
        self._done, self._open, self._need = answer["done"], answer["open"], answer["need"]
        self.recorded_bytes = answer["recorded_bytes"]
        if not self._need:
            self.spool.acknowledge(self._done, self._open)
            sent = [head.sequence for head in frame_bounds(body)]
            if sent and self._done < sent[-1] and not lost:
                raise GatewayUnavailable("it did not take what was sent")
        return True


def post(home: Destination, body: bytes) -> dict[str, Any]:
    """Send a request; return the gateway's answer. Raises `GatewayUnavailable` or `DeliveryRefusal`."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request

    from penstock.gateway.client.opener import fits_a_header

    headers = {"Content-Type": "application/octet-stream"}
    if home.key:
        if not fits_a_header(home.key):
            raise DeliveryRefusal("the key for the gateway has a character that no key has, such as the end of a line")
        headers["Authorization"] = f"Bearer {home.key}"
    try:
        if urlsplit(home.url).scheme not in ("http", "https"):
            raise ValueError("it begins with neither http:// nor https://")
        with _opener(home.url).open(Request(home.url + PATH, body, headers), timeout=TIMEOUT_S) as response:
            return _read(response.read())
    except HTTPError as e:
        text = " ".join(_body(e).decode(errors="replace").split())
        problem = _message(text) or f"{e.code} {e.reason}"
        if e.code in (401, 403):
            way = "start the agent by `penstock run`, or set PENSTOCK_TOKEN (`penstock token ROLLOUT` makes one)"
            raise DeliveryRefusal(f"the gateway refuses the key: {problem}; {way}") from None
        if e.code < 500 and e.code != 429:
            raise DeliveryRefusal(f"the gateway at {home.url} does not take what passes: {problem}") from None
        raise GatewayUnavailable(problem) from None
    except (ValueError, RecursionError) as e:
        raise DeliveryRefusal(f"{home.url} is not the address of a gateway: {e}") from None
    except (OSError, HTTPException) as e:
        raise GatewayUnavailable(str(getattr(e, "reason", e)) or type(e).__name__) from None


def _body(error: HTTPError) -> bytes:
    """The body of a refusal, as far as it arrives: a gateway that is killed breaks off in the middle."""
    from http.client import HTTPException

    with error:
        try:
            return error.read()
        except (OSError, HTTPException):
            return b""


def _opener(url: str) -> OpenerDirector:
    """The opener for a gateway. One on this machine is reached without a proxy."""
    from urllib.request import ProxyHandler

    from penstock.gateway.client.opener import opener

    host = urlsplit(url).hostname or ""
    here = host in ("localhost", "::1") or host.startswith("127.")
    return opener(url, ProxyHandler({})) if here else opener(url)


def _read(text: bytes) -> dict[str, Any]:
    """Parse an answer. Raises `ValueError` or `RecursionError` when no gateway gave it."""
    match answer := _object(json.loads(text)):
        case {"done": int(), "recorded_bytes": int(), "open": [*still_open], "need": [*need]} if all(
            isinstance(number, int) for number in (*still_open, *need)
        ):
            return answer
        case _:
            raise ValueError("it answers with something else")


def _object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _message(text: str) -> str:
    """The message in an error of the gateway, in its own format or in that of an API."""
    with suppress(ValueError, RecursionError):
        message = _object(_object(json.loads(text)).get("error")).get("message")
        if message:
            return str(message)[:300]
    return text[:300]


class SpoolSender:
    """The thread that sends a session, and then those that earlier wrappers have left."""

    def __init__(self, delivery: SessionDelivery, root: Path, spool_bytes: int) -> None:
        """`root`: the folder of all sessions, which may have `spool_bytes` together."""
        self._delivery, self._root, self._spool_bytes = delivery, root, spool_bytes
        self._news, self._closing = threading.Event(), threading.Event()
        self._reached = self._swept = self._refused = False
        self._said = False
        self._thread = threading.Thread(target=self._run, name="penstock-sender", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Called when a line was recorded."""
        if not self._news.is_set():
            self._news.set()

    def close(self, seconds: float) -> None:
        """Send the rest, for at most so many seconds; give up at once when the gateway does not answer."""
        self._closing.set()
        self._news.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        failures = 0
        while not self._refused:
            try:
                while self._delivery.step():
                    self._reached, failures = True, 0
                if self._closing.is_set():
                    if self._delivery.complete:
                        self._delivery.spool.remove()
                    return
                if self._reached and not self._swept:
                    self._swept = True
                    self._send_left()
                self._wait()
            except GatewayUnavailable as e:
                self._complain(f"the gateway does not answer ({e}): what passes is kept and sent later")
                if self._closing.is_set():
                    return
                failures += 1
                _ = self._closing.wait(PAUSES.after(failures))
            except DeliveryRefusal as e:
                self._refused = True
                self._complain(f"{e}; the tool works, and what passes is kept in {self._delivery.spool.folder}")
            except OSError as e:
                self._refused = True
                self._complain(f"what passes cannot be read back ({e}): it is not recorded; the tool works")

    def _wait(self) -> None:
        _ = self._news.wait()
        if not self._closing.is_set():
            time.sleep(GATHER_S)
        self._news.clear()
        if self._closing.is_set():
            self._news.set()

    def _complain(self, text: str) -> None:
        if not self._said:
            self._said = True
            say(text)

    def _send_left(self) -> None:
        """Send sessions of wrappers that were killed, or could not reach the gateway. Called once, when there is
        time.
        """
        own = self._delivery.spool
        for folder in session_folders(self._root):
            if self._closing.is_set():
                return
            if folder != own.folder:
                _ = send_leftover(folder, self._delivery.home, self._closing.is_set)
        own.room = self._spool_bytes - bytes_used(self._root, own.folder)


def send_leftover(folder: Path, own: Destination, stopped: Callable[[], bool]) -> bool:
    """Send the session of a wrapper that has ended; False when it still lives, or the gateway does not accept the
    session. `own`: the destination of the wrapper that sends.
    """
    try:
        if not (folder / ABOUT).exists() and time.time() - folder.stat().st_mtime > EMPTY_S:
            Spool(folder, 0).remove()
            return False
        about = (folder / ABOUT).read_bytes()
        spool = Spool(folder, 0)
    except OSError:
        return False
    age_s = time.time() - folder.stat().st_mtime
    try:
        spool.recover(time.time_ns())
        delivery = SessionDelivery(spool, *_noted(about, own))
        while not delivery.complete and not stopped() and delivery.step():
            pass
        if delivery.complete or not spool.last:
            spool.remove()
        return delivery.complete
    except (GatewayUnavailable, DeliveryRefusal, OSError) as e:
        if age_s > KEPT_S:
            say(f"what waits in {folder} could not be sent for a month ({e}): it is removed")
            spool.remove()
        return False
    finally:
        spool.close()


def _noted(about: bytes, own: Destination) -> tuple[Destination, str]:
    """The destination of a session, and the name of its server. Raises `DeliveryRefusal` when they cannot be read."""
    try:
        said = json.loads(about)
        key = said["key"]
        home, server = Destination(str(said["url"]), None if key is None else str(key)), str(said["server"])
        if home.key is None and urlsplit(home.url)[:2] == urlsplit(own.url)[:2]:
            # The admin key is not written down, and goes to its own gateway only.
            home = home._replace(key=os.environ.get("PENSTOCK_ADMIN_KEY"))
    except (ValueError, KeyError, TypeError):
        raise DeliveryRefusal(f"{ABOUT} is damaged, which says where it belongs") from None
    return home, server
