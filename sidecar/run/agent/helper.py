"""For agents that you may change: report rewards, events and spans. It needs the standard library only; an image
without Penstock can install it with `pip install --no-deps .` in Penstock's checkout.

    import penstock

    penstock.reward(0.7)
    penstock.event("cart", {"items": 3})
    with penstock.span("search", {"query": "trains"}) as search:
        search.set_attributes(hits=12)

Nothing here waits for the gateway: a thread sends every report at once (`ReportSender`), and Python
waits for that thread before it ends. So the same calls work in synchronous and in asynchronous code, and block no event
loop. Call `flush` before you leave by `os._exit`.

Nothing here raises because of the gateway: a report that cannot be sent causes a message on stderr, once. Outside a
rollout nothing is sent, so the same script runs anywhere.

Rewards and events go to the routes of the agent's own address, spans to its `/v1/traces` as OTLP in JSON: they are
spans of OpenTelemetry like those of any instrumented agent.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from contextvars import ContextVar, Token
from itertools import takewhile

TYPE_CHECKING = False
"""As in `typing`, whose import takes longer than all others here."""
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Any, Final, Self, TypeVar

    Function = TypeVar("Function", bound=Callable[..., Any])

LONGEST_TEXT: Final = 16_384
"""The most characters of one value; the gateway keeps half of them, and marks the cut."""
LONGEST_NAME, LONGEST_REASON = 256, 10_000


def reward(
    value: float | None = None,
    *,
    reason: str | None = None,
    key: str | None = None,
    **dimensions: float,
) -> None:
    """Reward this attempt with a number, named scores, or both. The reward is stored with the source `agent` and not
    trained on unless the gateway is configured to trust it. Of several rewards with one `key` the first is stored.
    """
    home = report_endpoint()
    if home is None:
        return
    numbers: dict[str, float] = {}
    for name, given in {"": value, **dimensions}.items():
        if given is None:
            continue
        number = _number(given)
        if number is None:
            say_once("number", f"a reward must be a finite number, not {_text(given, 100)!r}: it is not sent")
            return
        numbers[name] = number
    said: dict[str, object] = {"value": numbers.pop("", None), "dimensions": numbers, "key": key or _random(8)}
    if reason is not None:
        said["reason"] = _text(reason, LONGEST_REASON)
    SENDER.put(home, REWARDS, said)


def event(name: str, attributes: Mapping[str, object] | None = None, /, **more: object) -> None:
    """Record an event in this attempt, as a part of the open `span`. `attributes` and `more` are merged as `dict` does
    it; a value that is no text, number, flag or None is stored as JSON.
    """
    home = report_endpoint()
    if home is None:
        return
    said: dict[str, object] = {"name": _name(name), "attributes": _plain_values(attributes, more)}
    above = None if (open_span := _current.get()) is None else open_span.id
    SENDER.put(home, EVENTS, said | {"time_ns": time.time_ns(), "parent_id": above})


def span(name: str, attributes: Mapping[str, object] | None = None, /, **more: object) -> Span:
    """A piece of the agent's work, for use with `with`, `async with` or as a decorator. Model calls, events and other
    spans that begin inside it are its children. An exception that leaves it is recorded as its error, and propagates.
    """
    return Span(name, {**(attributes or {}), **more})


def address() -> Address | None:
    """The address of this attempt's models; None outside a rollout. Many attempts of a function may share a process
    (`penstock run --concurrency`) and its variables, so each gets its own address here. Tasks and `asyncio.to_thread`
    keep it; a thread that an agent starts itself does not.
    """
    _asked.get().add("address")
    if report_endpoint() is None:
        return None
    return Address(_variable)


class Address:
    """The URLs and the key of an attempt's models."""

    def __init__(self, variable: Callable[[str], str | None]) -> None:
        self.url = variable("PENSTOCK_URL") or ""
        """The rollout's base URL for clients of Anthropic and Gemini."""
        self.openai_url = f"{self.url}/v1"
        """The base URL of an OpenAI client."""
        self.token = variable("PENSTOCK_TOKEN") or ""
        """The API key; opens this rollout and nothing else."""
        self.rollout = variable("PENSTOCK_ROLLOUT_ID") or ""
        self.attempt = variable("PENSTOCK_ATTEMPT_ID") or ""
        self.mode = variable("PENSTOCK_MODE") or ""


def pin(variables: Mapping[str, str]) -> None:
    """Make these the attempt's variables in this context, in place of those of the process."""
    _pinned.set(variables)
    _asked.set(set())


def address_used() -> bool:
    """True if the attempt of this context has called `address`."""
    return bool(_asked.get())


def flush(timeout_s: float | None = None) -> bool:
    """Wait until all reports are on the tape; False when it takes longer. Needed only before `os._exit`. In
    asynchronous code: `await asyncio.to_thread(penstock.flush)`.
    """
    return SENDER.wait(timeout_s)


class Span:
    """A piece of the agent's work; `span` makes it. One object may be used again, but not within itself."""

    def __init__(self, name: str, attributes: dict[str, object]) -> None:
        self.name = name
        self.attributes = attributes
        """Attributes; they are read when the span ends."""
        self.id = self._trace = self._parent = ""
        self._home: Endpoint | None = None
        self._start_ns = 0
        self._before: Token[Span | None] | None = None

    def set_attributes(self, attributes: Mapping[str, object] | None = None, /, **more: object) -> None:
        """Add attributes while the span is open; a later value replaces an earlier one of the same name."""
        self.attributes.update(attributes or {}, **more)

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that make a model call a child of this span, whatever other spans are open (the `extra_headers`
        of an SDK); empty outside a rollout.
        """
        return {} if self._home is None else {"traceparent": f"00-{self._trace}-{self.id}-01"}

    def __enter__(self) -> Self:
        self._home = report_endpoint()
        if self._home is not None:
            above = _current.get()
            self._trace, self._parent = _outermost() if above is None else (above._trace, above.id)
            self.id = _random(8)
            self._start_ns = time.time_ns()
            self._before = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        home, before, self._home, self._before = self._home, self._before, None, None
        if home is None or before is None:
            return
        with suppress(ValueError):  # it was opened in another context, as in a generator that is closed elsewhere
            _current.reset(before)
        SENDER.put(home, SPANS, self._as_otlp(time.time_ns(), error))

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)

    def __call__(self, function: Function) -> Function:
        """Decorate a function: each of its calls is a span of its own."""
        import functools
        import inspect

        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{function!r} is a generator: use `with penstock.span(...)` in it")

        def called(*args: Any, **named: Any) -> Any:
            with Span(self.name, dict(self.attributes)):
                return function(*args, **named)

        async def awaited(*args: Any, **named: Any) -> Any:
            with Span(self.name, dict(self.attributes)):
                return await function(*args, **named)

        made: Any = functools.wraps(function)(awaited if inspect.iscoroutinefunction(function) else called)
        return made

    def _as_otlp(self, end_ns: int, error: BaseException | None) -> dict[str, object]:
        attributes = _plain_values(self.attributes, {})
        said: dict[str, object] = {
            "traceId": self._trace,
            "spanId": self.id,
            "parentSpanId": self._parent,
            "name": _name(self.name),
            "kind": 1,
            "startTimeUnixNano": str(self._start_ns),
            "endTimeUnixNano": str(end_ns),
        }
        well = isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code)
        if error is not None and not well:
            attributes["error.type"] = _type_of(error)
            said["status"] = {"code": 2, "message": f"{_type_of(error)}: {_text(error)}"}
            said["events"] = [{"name": "exception", "timeUnixNano": str(end_ns), "attributes": _exception(error)}]
        return said | {"attributes": _as_pairs(attributes)}


_current: ContextVar[Span | None] = ContextVar("penstock_span", default=None)


_NOBODY: set[str] = set()
_asked: ContextVar[set[str]] = ContextVar("penstock_asked", default=_NOBODY)
"""Holds "address" once the attempt of this context has called `address`; its threads and tasks share the set."""
_pinned: ContextVar[Mapping[str, str] | None] = ContextVar("penstock_variables", default=None)


def _variable(name: str) -> str | None:
    pinned = _pinned.get()
    return os.environ.get(name) if pinned is None else pinned.get(name)


def report_endpoint() -> Endpoint | None:
    """The address and token for reports of this attempt; None outside a rollout."""
    url, token = _variable("PENSTOCK_URL"), _variable("PENSTOCK_TOKEN")
    return (url, token) if url and token else None


def _outermost() -> tuple[str, str]:
    """(trace id, parent's id) for a span without an open span around it: those of the attempt, or a new trace."""
    parts = (_variable("TRACEPARENT") or "").split("-")
    return (parts[1], parts[2]) if len(parts) == 4 else (_random(16), "")


def _random(size: int) -> str:
    return os.urandom(size).hex()


def _type_of(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _exception(error: BaseException) -> list[object]:
    """Attributes of an exception, by OpenTelemetry's names. Of a long stack the end is kept: the error happened
    there.
    """
    import traceback

    stack = "".join(traceback.format_exception(error))[-LONGEST_TEXT // 2 :]
    said = {"exception.type": _type_of(error), "exception.message": _text(error), "exception.stacktrace": _text(stack)}
    return _as_pairs(said)


# Values ---------------------------------------------------------------------------------------------------------------


def _plain_values(attributes: Mapping[str, object] | None, more: Mapping[str, object]) -> dict[str, Any]:
    both = {**(attributes or {}), **more}
    return {_name(name): _plain(value) for name, value in both.items()}


def _plain(value: object) -> str | float | bool | None:
    """A value as the gateway accepts it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    if isinstance(value, float) and _number(value) is not None:
        return float(value)
    return _text(value)


def _number(value: object) -> float | None:
    """A finite number as a float, whatever its type (such as NumPy's); None for anything else."""
    try:
        number = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number - number == 0 and not isinstance(value, str) else None


def _text(value: object, longest: int = LONGEST_TEXT) -> str:
    """A text that can be sent, made from any value."""
    import json

    try:
        made = type(value) in (list, tuple, dict)
        text = json.dumps(value, ensure_ascii=False, default=str) if made else str(value)
    except Exception as e:  # `str` of the agent's own classes may fail
        text = f"{type(value).__name__} (no text of it can be made: {type(e).__name__})"
    return text[:longest].encode(errors="replace").decode()


def _name(given: str) -> str:
    return _text(given, LONGEST_NAME) or "unnamed"


def _as_pairs(attributes: Mapping[str, Any]) -> list[object]:
    """Attributes in the JSON of OTLP."""
    pairs: list[object] = []
    for name, value in attributes.items():
        kind = next((kind for base, kind in _KINDS if isinstance(value, base)), None)
        pairs.append({"key": name, "value": {} if kind is None else {kind: value}})
    return pairs


_KINDS = ((bool, "boolValue"), (int, "intValue"), (float, "doubleValue"), (str, "stringValue"))


# -- sending ----
#
# Reports wait in memory, and a thread sends them in their order. The thread lives while any report waits. It is not a
# daemon, so Python waits for it before it ends. So do the children of `multiprocessing`, which do not run `atexit`.

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
