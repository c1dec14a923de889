"""One connection to a gateway's control API: sends requests, reads answers, and turns every error into a `ClientError`.

A gateway is at `http://HOST:PORT`, `https://HOST:PORT`, or `unix:PATH`, where PATH is that of its socket. A connection
that is given no address or no key takes that of the environment (`environment`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Final, Self, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError
from yarl import URL

from penstock.gateway.client.environment import gateway_and_key
from penstock.gateway.client.opener import CLIENT_CERT, client_context
from penstock.gateway.model.answers import ErrorAnswer, Page
from penstock.gateway.model.toml import ConfigError, sentence

M = TypeVar("M", bound=BaseModel)
P = TypeVar("P", bound=Page)
T = TypeVar("T")
Params = Mapping[str, str | int | None]

PAGE = 1000
AGENTS_URL = re.compile(r"(/rollout/.*|/v1(beta)?)$")
"""The part of an agent's base URL behind the gateway's own URL. A request there would be a model call."""
UNIX = "unix:"
CHECK_URL = "check --gateway or PENSTOCK_GATEWAY; `penstock serve` prints the address"
AWAY = (502, 503, 504)
"""Statuses with which a proxy answers while the gateway behind it is away."""
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=90)
"""The feed sends something every 15 s and no claim waits for over 60 s: a longer silence is a lost connection."""


class ClientError(Exception):
    """The base of all errors of a client; by itself, one that the classes below do not name: an address or a key that
    cannot be used, or an answer of something that is not a gateway of this version. The message is one line and says
    what to do. `status` is that of the HTTP answer; None without one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def temporary(self) -> bool:
        """True when the same request may succeed later. 501 comes from a server that knows no such method, so not from
        a gateway."""
        return self.status is None or (self.status >= 500 and self.status != 501)


class Unreachable(ClientError):
    """Nothing answers at the gateway's address, the connection broke off, or a proxy answers in the gateway's place."""


class Refused(ClientError):
    """The gateway answered with an error; the message is in its own words."""


class NotFound(Refused):
    """The gateway does not have what was named (404)."""


class NotAllowed(Refused):
    """The key is missing, wrong, or does not open this (401 or 403)."""


class Conflict(Refused):
    """The thing is in a state that does not permit this, such as an attempt that has ended (409)."""


REFUSALS: Final = {401: NotAllowed, 403: NotAllowed, 404: NotFound, 409: Conflict}
"""Classes of refusals by their statuses; all others are `Refused`."""


class ApiConnection:
    """Sends requests to a gateway. Use it as an asynchronous context manager."""

    def __init__(self, url: str | None = None, key: str | None = None, compressed: bool = False) -> None:
        """`url`, `key`: None takes those of the environment, as commands do; an empty key sends none. `compressed`:
        request answers with gzip, which is worth it only over a slow connection. Raises `ClientError`."""
        try:
            url, key = gateway_and_key(url, key)
        except ConfigError as e:
            raise ClientError(str(e)) from None
        self.url = url.rstrip("/")
        check_url(self.url)
        self._headers = {"Accept-Encoding": "gzip" if compressed else "identity"}
        if key:
            if not key.isprintable():
                raise ClientError("the gateway's key has a character that no header may have")
            self._headers["Authorization"] = f"Bearer {key}"
        self.received = 0
        """Bytes of answers received so far, as sent (compressed or not)."""
        self.changed = False
        """True once a request has changed something at the gateway."""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=TIMEOUT, headers=self._headers, connector=self.connector())
        return self

    def connector(self) -> aiohttp.BaseConnector:
        """A connector without a limit on connections: every waiting claim holds one. Raises `ClientError`."""
        if self.url.startswith(UNIX):
            return aiohttp.UnixConnector(self.url.removeprefix(UNIX), limit=0)
        try:
            return aiohttp.TCPConnector(limit=0, ssl=client_context() if self.url.startswith("https:") else True)
        except OSError as e:
            raise ClientError(str(e)) from None

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, model: type[M], params: Params | None = None) -> M:
        """The answer to a GET, as a model."""
        return self._parsed(path, model, await self.read("GET", path, params))

    async def post(self, path: str, model: type[M], body: BaseModel) -> M:
        """The answer to a POST that changes something, as a model. Fields that are not set in the body are not sent."""
        answer = await self.query(path, model, body)
        self.changed = True
        return answer

    async def query(self, path: str, model: type[M], body: BaseModel) -> M:
        """The answer to a POST that only asks, as a model. Fields that are not set in the body are not sent."""
        return self._parsed(path, model, await self.read("POST", path, body=body.model_dump_json(exclude_unset=True)))

    async def rows(
        self, path: str, model: type[P], params: Params, limit: int | None, rows: Callable[[P], Sequence[T]]
    ) -> AsyncGenerator[T]:
        """The rows of a list, page after page; all of them or up to `limit`."""
        cursor, left = None, limit
        while left is None or left > 0:
            page = await self.get(path, model, {**params, "limit": min(left or PAGE, PAGE), "cursor": cursor})
            found = rows(page)
            for row in found:
                yield row
            left, cursor = None if left is None else left - len(found), page.next
            if cursor is None:
                return

    async def read(self, method: str, path: str, params: Params | None = None, body: str | None = None) -> bytes:
        """The bytes of a successful answer."""
        async with self.request(method, path, params, body) as response:
            return await response.read()

    @asynccontextmanager
    async def request(
        self, method: str, path: str, params: Params | None = None, body: str | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """A successful response; every error, also one while it is read, becomes a `ClientError`."""
        if self._session is None:
            raise RuntimeError("use `async with Client(...)`")
        url = URL(base_of(self.url) + path, encoded=True).with_query(
            {k: v for k, v in (params or {}).items() if v is not None}
        )
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            data = None if body is None else BytesIO(body.encode())
            async with self._session.request(
                method, url, data=data, headers=headers, allow_redirects=False
            ) as response:
                if response.status >= 300:
                    raise await self._refusal(response)
                try:
                    yield response
                finally:
                    self.received += response.content.total_raw_bytes
        except (aiohttp.ClientError, TimeoutError) as e:
            raise Unreachable(f"cannot reach the gateway at {self.url}: {_reason(e)}") from e

    def _parsed(self, path: str, model: type[M], data: bytes) -> M:
        try:
            # A newer gateway may say more than we know.
            return model.model_validate_json(data, extra="ignore")
        except ValidationError as e:
            said = f"{self.url}{path} did not answer as a Penstock gateway of this version does: {brief(e)}"
            raise ClientError(said) from None

    async def _refusal(self, response: aiohttp.ClientResponse) -> ClientError:
        text = await response.text(errors="replace")
        try:
            message = ErrorAnswer.model_validate_json(text).error.message
        except ValidationError:
            said = f"answered {response.status} {response.reason or ''}".strip()
            if response.status in AWAY:
                message = f"cannot reach the gateway at {self.url}: a proxy in front of it {said}"
                return Unreachable(message, response.status)
            message = f"what answers at {self.url} is not a Penstock gateway (it {said}): {CHECK_URL}"
            return ClientError(message, response.status)
        return REFUSALS.get(response.status, Refused)(message, response.status)


def base_of(url: str) -> str:
    """The beginning of the URLs of requests to a gateway; over a Unix socket the host does not matter."""
    return "http://localhost" if url.startswith(UNIX) else url.rstrip("/")


def check_url(url: str) -> None:
    """Raises `ClientError` for a text that cannot be the URL of a gateway."""
    if url.startswith(UNIX + "/"):
        return
    try:
        parts = URL(url)
    except ValueError as e:
        raise ClientError(f"{url!r} is not the URL of a gateway: {e}") from None
    if parts.scheme not in ("http", "https"):
        raise ClientError(
            f"{url!r} is not the URL of a gateway: it must start with http:// or https://, or be unix:/PATH"
        )
    if not parts.host:
        raise ClientError(f"{url!r} is not the URL of a gateway: it names no host")
    own = AGENTS_URL.sub("", url)
    if own != url:
        raise ClientError(f"{url!r} is the base URL of an agent; the gateway's own is {own}")


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"there is no host {error.host!r}; {CHECK_URL}"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not trusted: {error.certificate_error}; SSL_CERT_FILE names whom to trust"
    if "CERTIFICATE_REQUIRED" in str(error):
        return f"it asks for a client certificate; {CLIENT_CERT} names the PEM file with it and its key"
    if isinstance(error, aiohttp.ClientSSLError):
        return f"what answers there does not speak https; is it http://{error.host}:{error.port}?"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "nothing answers there; is `penstock serve` running?"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return f"the connection was closed without an answer; does it speak https? {CHECK_URL}"
    return str(error) or type(error).__name__


def brief(error: ValidationError) -> str:
    """The first error, in one line."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the body'}: {sentence(first)}"


# Several requests at a time.

A = TypeVar("A")
B = TypeVar("B")

PARALLEL = 8
"""Number of parallel requests."""
LARGE = 1 << 20
"""Bytes of an answer above which the gateway gets one request at a time: it needs about ten times as much memory
meanwhile."""


async def map_concurrently(ask: Callable[[A], Awaitable[B]], about: Sequence[A], at_once: int = PARALLEL) -> list[B]:
    """The answers of `ask` for each item of `about`, in order, `concurrency_for` requests at a time."""
    answers: list[B] = []
    for at in range(0, len(about), at_once):
        answers += await asyncio.gather(*map(ask, about[at : at + at_once]))
    return answers


def concurrency_for(sizes: Iterable[int]) -> int:
    """The number of parallel requests for answers of these sizes in bytes."""
    return 1 if max(sizes, default=0) > LARGE else PARALLEL
