"""The requests that exact sessions make to vLLM:

    render     POST {base}/chat/completions/render     a chat request -> its token ids and sampling parameters
    generate   POST {root}/inference/v1/generate       token ids -> token ids
    derender   POST {base}/chat/completions/derender   token ids -> a chat answer, by the server's own parsers

They need `--enable-scale-out`; seen with vLLM 0.32. `{root}` is the base URL without `/v1`. Requests carry the headers
of the call that they are made for, and the upstream's own key.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import aiohttp
import orjson
from yarl import URL

from penstock.gateway.traffic.trials.sender import DROPPED
from penstock.gateway.traffic.upstreams.pool import CONNECT_S, ConnectionPool
from penstock.gateway.wire.dialects.family import Family
from penstock.gateway.wire.dialects.loose_json import Json, loads, obj
from penstock.gateway.wire.http.request import HttpRequest, UpstreamFault

_log = logging.getLogger("penstock.exact")
RENDER, DERENDER, GENERATE = "/chat/completions/render", "/chat/completions/derender", "/inference/v1/generate"
_DELAYS: Final = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Seconds before each further try of derender."""
_PASSING: Final = (429, 500, 502, 503, 504)
"""Statuses of errors that may be over at the next try."""
_OURS: Final = DROPPED | {b"host", b"content-type", b"accept", b"expect"}
_UNTOUCHED: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
_HEADERS: Final = [("Content-Type", "application/json"), ("Accept-Encoding", "identity")]


class VllmError(Exception):
    """The engine has refused a request."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}: {body[:300].decode('utf-8', 'replace')}")
        self.status, self.body = status, body


@dataclass(frozen=True, slots=True)
class RenderResponse:
    """A conversation as its template renders it."""

    ids: bytes
    """Token ids as bytes of 32-bit integers."""
    request: Json
    """The request to generate: sampling parameters, model, and the rest."""
    plain: bool
    """True if the ids are all of it: there are no pictures."""


class ExactEngineClient:
    """One upstream, for one call."""

    def __init__(
        self,
        session: Callable[[], aiohttp.ClientSession],
        pool: ConnectionPool,
        request: HttpRequest,
        families: Sequence[Family],
    ) -> None:
        """`request`, `families`: of the call."""
        self.pool = pool
        self._session = session
        self._headers = _headers(pool, request, families)

    @property
    def generates_at(self) -> str:
        """Path of the generate endpoint at this upstream."""
        return self.pool.path.removesuffix("/v1") + GENERATE

    async def render(self, asked: Json) -> RenderResponse:
        """Render a chat request. Raises `VllmError`, `UpstreamFault` if the endpoint is not served, and aiohttp's
        errors."""
        try:
            answer = await self.request(self.pool.target("/v1" + RENDER), orjson.dumps(asked))
        except VllmError as error:
            if not _served(error):
                raise UpstreamFault(502, "scale_out", self._unserved()) from None
            raise
        return _rendered(answer)

    async def derender(self, body: bytes) -> bytes:
        """Return the server's parse of tokens. The request changes nothing and the tokens are there, so one that fails
        is repeated a few times within seconds. Raises `VllmError`, and aiohttp's errors."""
        for delay in _DELAYS:
            try:
                return await self.request(self.pool.target("/v1" + DERENDER), body)
            except (aiohttp.ClientError, TimeoutError, VllmError) as error:
                if isinstance(error, VllmError) and error.status not in _PASSING:
                    raise
                _log.warning("upstream %r could not derender and is asked again: %r", self.pool.name, error)
            await asyncio.sleep(delay)
        return await self.request(self.pool.target("/v1" + DERENDER), body)

    async def request(self, path: str, body: bytes) -> bytes:
        """Return the complete answer. These requests change nothing: one whose connection was closed is sent once
        more."""
        try:
            return await self._ask(path, body)
        except aiohttp.ServerDisconnectedError:
            return await self._ask(path, body)

    async def _ask(self, path: str, body: bytes) -> bytes:
        async with self.post(path, body) as response:
            answer = await response.read()
            if response.status >= 400:
                raise VllmError(response.status, answer)
            return answer

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a request and yield the answer; leaving the context early cancels it."""
        read_s = self.pool.config.read_timeout
        bounds = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=read_s)
        async with self._session().post(
            URL(self.pool.origin + path, encoded=True),
            data=body,
            headers=self._headers,
            skip_auto_headers=_UNTOUCHED,
            timeout=bounds,
            allow_redirects=False,
            **self.pool.transport.options,
        ) as response:
            yield response

    def _unserved(self) -> str:
        return (
            f"upstream {self.pool.name!r} ({self.pool.origin}) does not serve {RENDER}, which a route with "
            'train = "exact" needs: start vLLM (0.32 or newer) with --enable-scale-out, or set it to true'
        )


def _headers(pool: ConnectionPool, request: HttpRequest, families: Sequence[Family]) -> list[tuple[str, str]]:
    """The headers that the call itself would send, without those about its own body."""
    head, _, _ = pool.heads.compose(request, b"/", None, None, families)
    lines = [line.partition(b": ")[::2] for line in head.split(b"\r\n")[1:] if line]
    kept = [(name, value) for name, value in lines if name.lower() not in _OURS]
    return [*_HEADERS, *((name.decode("latin-1"), value.decode("latin-1")) for name, value in kept)]


def _served(error: VllmError) -> bool:
    """True if an error is about the request, and not about a missing endpoint."""
    if error.status in (404, 405):
        # An unknown model is an error of the API; an unknown path is one of the server.
        return bool(obj(loads(error.body)).get("error"))
    return error.status != 403 or b"scale-out" not in error.body


def _rendered(answer: bytes) -> RenderResponse:
    try:
        request: Json = orjson.loads(answer)
        ids = array("i", request.pop("token_ids")).tobytes()
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise VllmError(502, f"the engine's rendering cannot be read: {error!r}".encode()) from None
    return RenderResponse(ids, request, request.get("features") is None)


def id_list(ids: bytes) -> list[int]:
    """Ids as a list for JSON."""
    return array("i", ids).tolist()
