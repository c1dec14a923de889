"""Sends what an agent reports (`sidecar.run.agent.helper`) to the gateway. Needs the standard library alone.

Reports wait in memory, and a thread sends them in their order. The thread lives while any report waits. It is not a
daemon, so Python waits for it before it ends. So do the children of `multiprocessing`, which do not run `atexit`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from itertools import takewhile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

Endpoint = tuple[str, str]
"""The agent's own address, and its token."""
REWARDS, EVENTS, SPANS = "/rewards", "/events", "/v1/traces"
"""Paths of the reports below the address."""

TIMEOUT_S: Final = 10.0
PATIENCE_S: Final = 30.0
"""The time for which a request is repeated while the gateway does not answer; s. Then all waiting reports are dropped,
so that agents can end.
"""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
MOST_WAITING: Final = 10_000
"""The most reports in memory while the gateway is away; further ones are dropped."""
MOST_AT_ONCE: Final = 100

_said: set[str] = set()


def say_once(kind: str, text: str) -> None:
    """Print a complaint on stderr, once in a process for each kind of trouble."""
    if kind not in _said:
        _said.add(kind)
        with suppress(OSError, ValueError, AttributeError):  # stderr may be closed, or not be there
            sys.stderr.write(f"penstock: {text}\n")
            sys.stderr.flush()


class _ReportRefusal(Exception):
    """Raised when the gateway has refused a report."""


class ReportSender:
    """The queue of waiting reports, in order, and the thread that sends them, which lives while any report waits."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew: in the child of a fork the waiting reports are the parent's, and the thread does not exist."""
        # Reentrant, because a signal's handler may send a report while the interrupted thread holds the lock.
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)
        self._sending: Endpoint | None = None
        self._waiting: list[tuple[Endpoint, str, dict[str, object]]] = []
        self._thread: threading.Thread | None = None

    def put(self, home: Endpoint, path: str, said: dict[str, object]) -> None:
        """Queue a report; the thread sends it."""
        with self._lock:
            if len(self._waiting) >= MOST_WAITING:
                say_once("full", f"more than {MOST_WAITING:,} statements wait for the gateway: what follows is lost")
                return
            self._waiting.append((home, path, said))
            if self._thread is not None or self._start():
                return
        self._run()

    def _start(self) -> bool:
        """Start the thread; False when Python is ending or can start no thread."""
        thread = threading.Thread(target=self._run, name="penstock", daemon=False)
        try:
            if threading.main_thread().is_alive():
                thread.start()
                self._thread = thread
        except RuntimeError:
            pass
        return self._thread is thread

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until no report is left; False when it takes longer."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def wait_for(self, home: Endpoint, timeout_s: float) -> bool:
        """Wait until no report of one attempt is left, whatever other attempts of this process send; False when it
        takes longer.
        """

        def sent() -> bool:
            return self._sending != home and all(of != home for of, _, _ in self._waiting)

        with self._moved:
            return self._moved.wait_for(sent, timeout_s)

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            self._send(*batch)

    def _next(self) -> tuple[Endpoint, str, list[dict[str, object]]] | None:
        """The reports of the next request; None when none is left."""
        with self._lock:
            self._sending = None
            self._moved.notify_all()
            if not self._waiting:
                self._thread = None
                return None
            home, path, _ = self._waiting[0]
            self._sending = home
            most = self._waiting[: 1 if path == REWARDS else MOST_AT_ONCE]
            batch = [said for _, _, said in takewhile(lambda one: one[:2] == (home, path), most)]
            del self._waiting[: len(batch)]
            return home, path, batch

    def _send(self, home: Endpoint, path: str, batch: list[dict[str, object]]) -> None:
        try:
            _post(home, path, _body(path, batch))
        except _ReportRefusal as e:
            if len(batch) == 1:
                say_once("refused", f"the gateway refused what the agent said of itself: {e}")
            for said in batch if len(batch) > 1 else ():
                self._send(home, path, [said])
        except OSError as e:
            with self._lock:
                lost = len(batch) + len(self._waiting)
                self._waiting.clear()
            say_once("away", f"the gateway did not answer for {PATIENCE_S:g} s ({e}): {lost} statements are lost")
        except Exception as e:
            say_once("failed", f"what the agent said of itself cannot be sent: {type(e).__name__}: {e}")


def _body(path: str, batch: list[dict[str, object]]) -> object:
    if path == REWARDS:
        return batch[0]
    if path == EVENTS:
        return {"events": batch}
    return {"resourceSpans": [{"scopeSpans": [{"scope": {"name": "penstock"}, "spans": batch}]}]}


def _post(home: Endpoint, path: str, body: object) -> None:
    """Return once the reports are on the tape. Raises `_ReportRefusal`, or OSError after `PATIENCE_S` without an
    answer."""
    import json
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request

    from penstock.gateway.client.opener import fits_a_header, opener

    if not fits_a_header(home[1]):
        raise _ReportRefusal("its token has a character that no token has, such as the end of a line")
    headers = {"Authorization": f"Bearer {home[1]}", "Content-Type": "application/json"}
    gateway = opener(home[0])
    request = Request(home[0] + path, json.dumps(body).encode(), headers)
    end, pause = time.monotonic() + PATIENCE_S, FIRST_PAUSE_S
    while True:
        try:
            with gateway.open(request, timeout=TIMEOUT_S) as response:
                answer = response.read()
            break
        except HTTPError as e:
            text = ""
            with e, suppress(OSError, HTTPException):  # a gateway that is killed breaks off in the middle
                text = e.read().decode(errors="replace")[:500]
            if e.code < 500 and e.code != 429:
                raise _ReportRefusal(f"{e.code}: {text}") from None
            problem = f"{e.code}: {text}"
        except (OSError, HTTPException) as e:
            problem = str(e) or type(e).__name__
        if time.monotonic() + pause > end:
            raise OSError(problem)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    if path == SPANS and (partial := json.loads(answer).get("partialSuccess")):
        say_once("refused", f"the gateway refused spans of the agent: {partial.get('errorMessage')}")


SENDER = ReportSender()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SENDER.reset)
