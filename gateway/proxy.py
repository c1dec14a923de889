"""The life of one call, from its address to its record. Read `Call` from top to bottom.

No coroutine runs per call: what arrives moves it on. `begin` finds out whose call it is, whether it may pass and where it
goes, and writes it upstream; `on_answer` and `on_data` pass on what comes back in the very read that brought it; `complete`
hands the call to the recorder. A client that leaves (`on_client_gone`), an upstream that cannot be reached, stays silent
or breaks off (`on_unreachable`, `on_timeout`, `on_broken`) each end the call once, with one span.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from gateway import trace
from gateway.address import Address, AddressError, from_headers, from_path
from gateway.auth import Auth, AuthError
from gateway.codec import Body
from gateway.config import Config
from gateway.dialects import find
from gateway.dialects.base import Dialect
from gateway.dialects.errors import error_body
from gateway.dialects.reading import decode_body
from gateway.errors import ClientFault, GatewayFault, Refusal, UpstreamFault
from gateway.front import Front, Request
from gateway.implicit import Conversations, new_rollout
from gateway.metrics import Metrics
from gateway.recorder import Recorder
from gateway.redact import MASK, Redactor
from gateway.redact import url as redact_url
from gateway.store import Entry
from gateway.upstream import Link, Pool

_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"upgrade",
    }
)
_OWN: Final = frozenset({b"host", b"expect", b"x-penstock-token"}) | _HOP
_CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key", b"x-penstock-token"})
_REASONS: Final = {
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    413: b"Content Too Large",
    426: b"Upgrade Required",
    431: b"Request Header Fields Too Large",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
}


class Proxy:
    """What all calls share: the upstreams, the routes, the keys, the recorder."""

    def __init__(
        self,
        config: Config,
        pools: Mapping[str, Pool],
        auth: Auth,
        recorder: Recorder,
        metrics: Metrics,
        control: Callable[[], asyncio.Protocol],
    ) -> None:
        """`control` makes a protocol of the control plane."""
        self.config = config
        self.pools = pools
        self.auth = auth
        self.recorder = recorder
        self.metrics = metrics
        self.control = control
        self.fronts: set[Front] = set()
        self.header_bytes = config.limits.header_bytes
        self.request_bytes = config.limits.request_bytes
        self.conversations = Conversations()
        self.redactor = Redactor()
        self.running: OrderedDict[Call, None] = OrderedDict()
        self.token_required = config.token_required
        self.strict = config.tape.record == "strict"
        self._epoch = time.time_ns() - time.monotonic_ns()
        self._silent = {
            family: next(pool for pool in pools.values() if pool.config.dialect == family)
            for family in ("openai", "anthropic")
        }

    def now_ns(self) -> int:
        """Wall-clock nanoseconds that never run backwards while the process lives."""
        return self._epoch + time.monotonic_ns()

    def serve(self, front: Front, request: Request) -> Call | None:
        """Begins a call; None when it was answered at once."""
        call = Call(self, front, request)
        return call if call.begin() else None

    def refuse(self, front: Front, request: Request | None, status: int, message: str, field: str) -> None:
        """Answers what cannot become a call: it is not HTTP, or too large."""
        target = b"/" if request is None else request.target
        dialect = find("POST", target.decode("latin-1").partition("?")[0])
        front.transport.write(_refusal(dialect.family, Refusal(status, "refused", message, field), keep_alive=False))
        front.linger()

    def route(self, dialect: Dialect, request: Request, body: bytes) -> tuple[list[Pool], str | None]:
        """(upstreams to try in turn, model name to send instead)."""
        if self.config.route:
            model = dialect.model(body)
            for route in self.config.route:
                if model is not None and route.matches(model):
                    return [self.pools[name] for name in route.upstream], route.alias
        family = dialect.family if dialect.name not in ("opaque", "models") else _family_of(request)
        return [self._silent[family]], None

    def sweep(self, now: float) -> None:
        """Once a tick: announces calls that have run for a while, ends those whose upstream is silent."""
        announce = now - self.config.tape.announce_seconds
        for call in list(self.running):
            call.check(now, announce)
        for pool in self.pools.values():
            pool.expire(now)
            self.metrics.connections(pool.name, "idle", pool.idle)
            self.metrics.connections(pool.name, "busy", pool.connections - pool.idle)


class Call:
    """One call. It is in `Proxy.running` from `begin` until it is handed to the recorder."""

    __slots__ = (
        "_address",
        "_announced",
        "_body",
        "_candidates",
        "_chunked_out",
        "_connecting",
        "_dialect",
        "_end_ns",
        "_entry",
        "_error",
        "_first_byte_ns",
        "_front",
        "_held",
        "_http_status",
        "_link",
        "_marks",
        "_messages",
        "_path",
        "_pieces",
        "_pool",
        "_proxy",
        "_request",
        "_response_bytes",
        "_response_headers",
        "_sent",
        "_sent_block",
        "_size",
        "_started",
        "_status",
        "_stream",
        "_tail",
        "_touched",
        "_trailers",
        "_truncated",
        "_until_close",
        "head_only",
        "weight",
    )

    def __init__(self, proxy: Proxy, front: Front, request: Request) -> None:
        self._proxy = proxy
        self._front = front
        self._request = request
        self._address: Address
        self._dialect: Dialect
        self._path = ""
        self._body = b""
        self._messages: list[bytes] = []
        self._candidates: list[Pool] = []
        self._pool: Pool | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._link: Link | None = None
        self._sent: tuple[bytes, bytes] = (b"", b"")
        self._sent_block = b""
        self._response_headers: list[tuple[bytes, bytes]] = []
        self._trailers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._marks: list[int] = []
        self._size = 0
        self._response_bytes = 0
        self._truncated = self._started = self._held = self._stream = False
        self._chunked_out = self._until_close = self._announced = False
        self._http_status: int | None = None
        self._status = "open"
        self._error: str | None = None
        self._first_byte_ns: int | None = None
        self._end_ns: int | None = None
        self._tail: bytes | None = None
        self._touched = request.started
        self._entry: Entry | None = None
        self.head_only = request.method == "HEAD"
        self.weight = 1024

    # 1-4. Whose call is it, may it pass, where does it go, must something change? -------------------------------------

    def begin(self) -> bool:
        """False when the gateway answered it at once and nothing is on the tape."""
        try:
            self._find_address()
        except Refusal as refusal:
            self._answer(refusal)
            self._front.finish(self._request.keep_alive)
            return False
        proxy = self._proxy
        proxy.running[self] = None
        proxy.metrics.inflight_calls += 1
        # The connection must know its call before anything can end it.
        self._front.call = self
        try:
            self._refuse_unrecordable()
            self._candidates, alias = proxy.route(self._dialect, self._request, self._body)
            if alias is not None:
                self._body = replace_model(self._body, alias)
            self._forward()
        except Refusal as refusal:
            self._fail(refusal)
        return self._status == "open"

    def _find_address(self) -> None:
        request = self._request
        target = request.target.decode("latin-1")
        if not target.startswith("/"):
            raise ClientFault(400, "target", f"the request target {target[:80]!r} must be a path", "target")
        path, mark, query = target.partition("?")
        try:
            address, below = from_path(path)
            self._path = below + mark + query
            self._dialect = find(request.method, below)
            headers = {low: value for low, _, value in request.headers}
            if address is None:
                address = from_headers(headers)
        except AddressError as error:
            self._dialect = find(request.method, path)
            raise ClientFault(400, "address", str(error), error.part) from None
        self._body = request.body
        self.weight += 2 * len(self._body)
        token = self._authorize(headers)
        if address is None:
            address = Address(token, origin="header") if token is not None else self._follow()
        elif token is not None and token != address.rollout:
            raise ClientFault(
                403, "token", f"the agent token is for another rollout than {address.rollout!r}", "authorization"
            )
        self._address = address

    def _authorize(self, headers: Mapping[bytes, bytes]) -> str | None:
        """The rollout that a token names; None without one, if none is needed."""
        token = _agent_token(headers)
        try:
            if token is not None:
                return self._proxy.auth.rollout_of(token, time.time())
        except AuthError as error:
            raise ClientFault(401, "token", f"{error}; make a new one with `penstock token`", "authorization") from None
        if self._proxy.token_required and not self._proxy.auth.is_admin(_text(headers)):
            raise ClientFault(
                401,
                "token",
                "an agent token is needed: `penstock token ROLLOUT` makes one, give it as the API key",
                "authorization",
            )
        return None

    def _follow(self) -> Address:
        """The implicit rollout of a call that names none."""
        proxy, front = self._proxy, self._front
        self._messages = self._dialect.conversation(self._body)
        if self._dialect.name == "responses" and (previous := _previous_response(self._body)):
            rollout = proxy.conversations.find_response(previous)
        else:
            rollout = proxy.conversations.find(self._messages)
        if rollout is None and not self._messages:
            rollout = front.session
        front.session = rollout or new_rollout()
        return Address(front.session, origin="implicit")

    def _refuse_unrecordable(self) -> None:
        failing = self._proxy.recorder.failing
        if failing is not None and self._refuses:
            raise GatewayFault(
                503, "tape", f"this call cannot be recorded and mode {self._address.mode!r} refuses to go on: {failing}"
            )

    @property
    def _refuses(self) -> bool:
        policy = self._proxy.config.tape.on_record_failure
        return policy.get(self._address.mode, "pass") == "refuse"

    # 5. Forward ------------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        self._pool = pool = self._candidates.pop(0)
        self._sent = self._compose(pool)
        self._send(pool.take())

    def _send(self, link: Link | None) -> None:
        if link is not None:
            self.on_connected(link)
        elif self._pool is not None:
            self._connecting = self._pool.connect(self)

    def _compose(self, pool: Pool) -> tuple[bytes, bytes]:
        """The request's head and body for this upstream: the client's own, less what is only between it and us.

        Beside it grows the block that is recorded: the same lines with secrets masked.
        """
        request, secret = self._request, self._proxy.redactor.secret
        drop = (_OWN if pool.key is None else _OWN | _CREDENTIALS) | _named_hops(request)
        lines = [b"Host: " + pool.host + b"\r\n"]
        masked: list[tuple[int, bytes]] = []
        for low, name, value in request.headers:
            if low in drop or (low in _CREDENTIALS and b"pst_" in value):
                continue
            if low == b"content-length" and self._body is not request.body:
                value = b"%d" % len(self._body)
            if secret(low):
                masked.append((len(lines), b"%b: %b\r\n" % (name, MASK)))
            lines.append(b"%b: %b\r\n" % (name, value))
        if pool.key is not None:
            name, value = (b"x-api-key", b"") if pool.config.dialect == "anthropic" else (b"Authorization", b"Bearer ")
            masked.append((len(lines), b"%b: %b\r\n" % (name, MASK)))
            lines.append(b"%b: %b%b\r\n" % (name, value, pool.key.encode()))
        head = b"%b %b HTTP/1.1\r\n%b\r\n" % (
            request.method.encode(),
            pool.target(self._path).encode("latin-1"),
            b"".join(lines),
        )
        for place, line in masked:
            lines[place] = line
        self._sent_block = b"".join(lines)
        return head, self._framed() if request.chunked else self._body

    def _framed(self) -> bytes:
        """The body in chunks, as they came."""
        pieces = self._request.pieces if b"".join(self._request.pieces) == self._body else [self._body]
        return b"".join([b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]) + b"0\r\n\r\n"

    def on_connected(self, link: Link) -> None:
        """A connection is there: write the request."""
        self._connecting = None
        self._link = link
        link.send(self, *self._sent)

    def on_unreachable(self, reason: str, detail: str) -> None:
        """No connection came about: the next upstream, or a clear answer."""
        self._connecting = None
        if self._candidates:
            self._proxy.metrics.upstream_retries += 1
            self._forward()
            return
        self._fail(
            UpstreamFault(
                504 if reason == "connect_timeout" else 502, reason, f"{self._where()} could not be reached: {detail}"
            )
        )

    def _where(self) -> str:
        pool = self._pool
        return "the upstream" if pool is None else f"upstream {pool.name!r} ({pool.origin})"

    # 6. Stream back as it arrives -------------------------------------------------------------------------------------

    def on_answer(self, link: Link, head: bytes, raw: bytes) -> None:
        """Passes on the head with what came in the same read."""
        self._started = True
        self._http_status = int(head[9:12])
        headers = self._response_headers = link.headers[: link.head_fields]
        request = self._request
        self._chunked_out = request.http10 and link.chunked
        self._until_close = not (link.chunked or link.length_known or self.head_only or self._http_status in (204, 304))
        close = not request.keep_alive or self._until_close or self._chunked_out
        rebuild = close
        for name, value in headers:
            low = name.lower()
            if low in _HOP:
                rebuild = True
            elif low == b"content-type" and value.startswith(b"text/event-stream"):
                self._stream = True
        if rebuild:
            head = self._client_head(head, close)
        self._pass_on(link, head, raw)

    def _client_head(self, head: bytes, close: bool) -> bytes:
        """The answer's head less what is between us and the upstream."""
        drop = _HOP | {b"transfer-encoding"} if self._chunked_out else _HOP
        status_line = head[: head.index(b"\r\n") + 2]
        lines = [b"%s: %s\r\n" % (name, value) for name, value in self._response_headers if name.lower() not in drop]
        return status_line + b"".join(lines) + (b"Connection: close\r\n\r\n" if close else b"\r\n")

    def on_data(self, link: Link, raw: bytes) -> None:
        """Passes on a read."""
        self._pass_on(link, b"", raw)

    def _pass_on(self, link: Link, head: bytes, raw: bytes) -> None:
        pieces = link.pieces
        if pieces:
            self._keep(pieces)
        out = (
            head + (b"".join(pieces) if self._chunked_out else raw)
            if head
            else b"".join(pieces)
            if self._chunked_out
            else raw
        )
        link.pieces = []
        if not link.done:
            if out:
                self._front.transport.write(out)
            return
        if self._proxy.strict or self._proxy.recorder.full:
            self._tail, out = out[-1:], out[:-1]
        if out:
            self._front.transport.write(out)
        self._complete(link)

    def _keep(self, pieces: list[bytes]) -> None:
        """Notes what arrived, by reference."""
        now = time.monotonic()
        self._touched = now
        elapsed = int((now - self._request.started) * 1e9)
        if self._first_byte_ns is None:
            self._first_byte_ns = elapsed
        size = sum(map(len, pieces))
        self._response_bytes += size
        if self._size + size <= self._proxy.config.limits.recorded_bytes:
            self._size += size
            self._pieces += pieces
            self._marks += (elapsed // 1000, size)
        else:
            self._truncated = True

    def hold(self) -> None:
        """The client reads slower than the upstream sends: stop reading there."""
        self._held = True
        if self._link is not None:
            self._link.transport.pause_reading()

    def go_on(self) -> None:
        """The client has caught up."""
        self._held = False
        self._touched = time.monotonic()
        if self._link is not None:
            self._link.transport.resume_reading()

    # 7. Record ---------------------------------------------------------------------------------------------------------

    def _complete(self, link: Link) -> None:
        """The last byte is on its way, or held until it may go."""
        self._trailers = link.headers[link.head_fields :]
        if self._held:
            link.transport.resume_reading()
        self._link = None
        link.release()
        status = self._http_status or 0
        self._end("ok" if status < 400 else "error", None if status < 400 else f"http_{status}")
        if self._tail is None:
            self._proxy.recorder.put(self)
            self._close_answer()
        else:
            self._proxy.recorder.put(self, self._let_go)

    def _let_go(self, kept: bool) -> None:
        """The span is on disk, or lost: the last byte may go, unless the mode refuses unrecorded answers."""
        self._proxy.metrics.recorder_wait_seconds += (self._proxy.now_ns() - (self._end_ns or 0)) / 1e9
        if self._front.call is not self:
            return
        if not kept and self._refuses:
            self._front.break_off()
            return
        if self._tail:
            self._front.transport.write(self._tail)
        self._close_answer()

    def _close_answer(self) -> None:
        request = self._request
        self._front.finish(request.keep_alive and not self._until_close and not self._chunked_out)

    def _end(self, status: str, error: str | None) -> None:
        proxy = self._proxy
        self._status, self._error = status, error
        self._end_ns = proxy.now_ns()
        self.weight += self._size
        del proxy.running[self]
        metrics = proxy.metrics
        metrics.inflight_calls -= 1
        metrics.request_bytes += len(self._body)
        metrics.response_bytes += self._response_bytes
        metrics.call_ended(self._dialect.name, status, (self._end_ns - self._request.started_ns) / 1e9)
        if self._first_byte_ns is not None:
            metrics.first_byte_seconds.observe(self._first_byte_ns / 1e9)
        if self._address.origin == "implicit" and self._started:
            self._remember()

    def _remember(self) -> None:
        """What a later request would continue."""
        response = self._decoded()
        if self._messages:
            reply = self._dialect.reply(response, self._stream)
            self._proxy.conversations.remember(self._messages, reply, self._address.rollout)
        if self._dialect.name == "responses":
            found = self._dialect.facts(b"", response, self._stream).response_id
            if found:
                self._proxy.conversations.remember_response(found, self._address.rollout)

    # Ends that are not completions ------------------------------------------------------------------------------------

    def on_client_gone(self) -> None:
        """Nobody waits any more: the upstream is told at once."""
        if self._status != "open":
            return
        if self._connecting is not None:
            self._connecting.cancel()
        if self._link is not None:
            self._link.cancel()
            self._link = None
        self._end("cancelled", "client_gone")
        self._proxy.recorder.put(self)

    def on_broken(self, link: Link, reason: str) -> None:
        """The upstream broke off. Before the first byte it is asked again; after it, the client sees a broken answer."""
        self._link = None
        if not self._started and link.reused and not link.seen:
            self._proxy.metrics.upstream_retries += 1
            self._send(None)
        elif not self._started and self._candidates:
            self._proxy.metrics.upstream_retries += 1
            self._forward()
        elif not self._started:
            self._fail(UpstreamFault(502, reason, f"{self._where()} closed the connection before it answered"))
        else:
            if link.pieces:
                self._keep(link.pieces)
            self._end("error", reason)
            self._proxy.recorder.put(self)
            self._front.break_off()

    def check(self, now: float, announce: float) -> None:
        """Called every tick: has the upstream been silent for too long, must the call be announced?"""
        if not self._announced and self._request.started <= announce:
            self._announced = True
            self._proxy.recorder.announce(self)
        pool, link = self._pool, self._link
        if pool is None or link is None or self._held or now - self._touched <= pool.config.read_timeout:
            return
        link.cancel()
        self._link = None
        silent = f"{self._where()} sent nothing for {pool.config.read_timeout:g} s (upstream.read_timeout)"
        if not self._started:
            self._fail(UpstreamFault(504, "timeout", silent))
            return
        self._end("error", "timeout")
        self._proxy.recorder.put(self)
        self._front.break_off()

    def give_up(self) -> None:
        """The gateway stops and cannot wait any longer."""
        if self._link is not None:
            self._link.cancel()
            self._link = None
        if self._connecting is not None:
            self._connecting.cancel()
        self._end("interrupted", "gateway_stopped")
        self._proxy.recorder.put(self)
        self._front.break_off()

    def _fail(self, refusal: Refusal) -> None:
        """Ends a call that has got no byte yet with an answer of our own, in the shape of its API."""
        self._http_status = refusal.status
        answer = self._answer(refusal)
        self._pieces, self._size, self._response_bytes = [answer], len(answer), len(answer)
        self._end("error", refusal.kind)
        self._proxy.recorder.put(self)
        self._front.finish(self._request.keep_alive)

    def _answer(self, refusal: Refusal) -> bytes:
        family = self._dialect.family if self._dialect.name != "opaque" else _family_of(self._request)
        whole = _refusal(family, refusal, self._request.keep_alive)
        self._front.transport.write(whole)
        return whole[whole.index(b"\r\n\r\n") + 4 :]

    # On the recorder's thread -------------------------------------------------------------------------------------------

    def entry(self, final: bool) -> Entry:
        """The call as it goes to the tape."""
        entry = self._entry or self._new_entry()
        if not final or self._status == "open":
            entry.body = self._recorded(b"")
            return entry
        response = self._decoded()
        facts = self._dialect.facts(self._body, response, self._stream)
        entry.status, entry.error = self._status, self._error
        entry.end_ns, entry.first_byte_ns = self._end_ns, self._first_byte_ns
        entry.http_status, entry.stream = self._http_status, self._stream
        entry.upstream = None if self._pool is None else self._pool.name
        entry.model_served, entry.response_id, entry.finish = facts.model_served, facts.response_id, facts.finish
        entry.usage, entry.tool_calls, entry.choices = facts.usage, facts.tool_calls, facts.choices
        entry.response_bytes, entry.truncated = self._response_bytes, self._truncated
        entry.body = self._recorded(b"".join(self._pieces))
        return entry

    def _new_entry(self) -> Entry:
        address, request = self._address, self._request
        entry = self._entry = Entry(address.rollout, address.attempt, address.origin, address.mode)
        entry.start_ns, entry.agent = request.started_ns, address.agent
        entry.dialect, entry.method = self._dialect.name, request.method
        entry.path, entry.request_bytes = redact_url(self._path), len(self._body)
        entry.model = self._dialect.model(self._body)
        for low, _, value in request.headers:
            if low == b"traceparent" and (found := trace.parse(value.decode("latin-1"))):
                entry.trace_id, entry.parent_id = found
            elif low == b"x-stainless-retry-count" and value not in (b"0", b""):
                entry.retried = True
        return entry

    def _recorded(self, response: bytes) -> Body:
        pool, block = self._pool, self._proxy.redactor.block
        url = "" if pool is None else redact_url(pool.url(self._path))
        return Body(
            url,
            self._sent_block,
            self._body,
            block(self._response_headers),
            response,
            block(self._trailers),
            list(self._marks),
        )

    def _decoded(self) -> bytes:
        """The response body without content encoding, as far as it can be read."""
        body = b"".join(self._pieces)
        for name, value in self._response_headers:
            if len(name) == 16 and name.lower() == b"content-encoding":
                return decode_body(body, value.decode("latin-1"))[0]
        return body


def _refusal(family: str, refusal: Refusal, keep_alive: bool) -> bytes:
    body = error_body(family, refusal.status, refusal.message, refusal.kind, refusal.field)
    return b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n%b" % (
        refusal.status,
        _REASONS.get(refusal.status, b"Error"),
        len(body),
        b"" if keep_alive else b"Connection: close\r\n",
        body,
    )


def _agent_token(headers: Mapping[bytes, bytes]) -> str | None:
    for name in _CREDENTIALS:
        value = headers.get(name)
        if value is not None and b"pst_" in value:
            return value[value.index(b"pst_") :].decode("latin-1").strip()
    return None


def _text(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}


def _named_hops(request: Request) -> frozenset[bytes]:
    """Headers that the client's Connection header makes hop-by-hop (RFC 9110 §7.6.1)."""
    for low, _, value in request.headers:
        if low == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            return frozenset(token.strip() for token in value.lower().split(b","))
    return frozenset()


def _family_of(request: Request) -> str:
    """Whose API an opaque call speaks: Anthropic clients name their version, or at least themselves."""
    for low, _, value in request.headers:
        if (
            low.startswith(b"anthropic-")
            or (low == b"x-api-key")
            or (low == b"user-agent" and b"claude" in value.lower())
        ):
            return "anthropic"
    return "openai"


class _Previous(msgspec.Struct):
    previous_response_id: str | None = None


_previous = msgspec.json.Decoder(_Previous)


def _previous_response(body: bytes) -> str | None:
    try:
        return _previous.decode(body).previous_response_id
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


class _Model(msgspec.Struct):
    model: str


_model = msgspec.json.Decoder(_Model)


def replace_model(body: bytes, name: str) -> bytes:
    """The body with its top-level model name replaced and every other byte as it was."""
    wanted = msgspec.json.encode(name)
    for found in re.finditer(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")', body):
        candidate = body[: found.start(1)] + wanted + body[found.end(1) :]
        try:
            if _model.decode(candidate).model == name and _model.decode(body).model != name:
                return candidate
        except msgspec.MsgspecError:
            break
    return body
