"""The control API as typed Python: pages turn themselves, and the change feed resumes by itself.

    async with Client("http://127.0.0.1:4747", key) as client:
        async for span in client.spans("my-rollout", filter="status:failed"): ...
        async for change in client.changes(since=cursor): ...

Lists are async iterators that ask for the next page when it is needed. `changes` comes back after a lost connection,
with growing pauses, and goes on after the last change that it gave: none is missed and none comes twice. Everything
that goes wrong is a `ClientError` in one line: the gateway's own words, or what stood in the way of reaching it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Self, TypeVar
from urllib.parse import quote

import aiohttp
from pydantic import BaseModel, ValidationError
from yarl import URL

from gateway.model import Attempt, Change, RolloutSummary, Span
from gateway.views import (
    AttemptList,
    ChangePage,
    ErrorAnswer,
    RolloutPage,
    SpanDetail,
    SpanPage,
    Stats,
    Token,
    TokenRequest,
)

M = TypeVar("M", bound=BaseModel)
P = TypeVar("P", RolloutPage, SpanPage)
Params = Mapping[str, str | int | None]

PAGE = 1000
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60)
"""The feed says something every 15 s, so that a minute of silence is a lost connection."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class ClientError(Exception):
    """The gateway refused, or could not be reached. `status` is None in the second case."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def passing(self) -> bool:
        """True when the same request may succeed later."""
        return self.status is None or self.status >= 500


class Client:
    """A connection to a gateway's control API."""

    def __init__(self, url: str, key: str | None = None) -> None:
        if URL(url).scheme not in ("http", "https"):
            raise ClientError(f"{url!r} is not the URL of a gateway: it must start with http:// or https://")
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=TIMEOUT, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def rollouts(self, filter: str = "", limit: int | None = None) -> AsyncIterator[RolloutSummary]:
        """Rollouts, newest first; all of them or up to `limit`."""
        async for page in self._pages("/api/rollouts", filter, limit, RolloutPage):
            for rollout in page.rollouts:
                yield rollout

    async def spans(
        self, rollout: str, attempt: str | None = None, filter: str = "", limit: int | None = None
    ) -> AsyncIterator[Span]:
        """Heads of the spans of a rollout or of one attempt, in order."""
        async for page in self._pages(f"{_path(rollout, attempt)}/spans", filter, limit, SpanPage):
            for span in page.spans:
                yield span

    async def recent(self, filter: str = "", limit: int | None = None) -> AsyncIterator[Span]:
        """Heads of the spans of all rollouts, newest change first."""
        async for page in self._pages("/api/spans", filter, limit, SpanPage):
            for span in page.spans:
                yield span

    async def rollout(self, rollout: str) -> RolloutSummary:
        """One rollout."""
        return await self._get(_path(rollout), RolloutSummary)

    async def attempts(self, rollout: str) -> list[Attempt]:
        """The attempts of a rollout, oldest first."""
        return (await self._get(f"{_path(rollout)}/attempts", AttemptList)).attempts

    async def span(self, rollout: str, attempt: str, sequence: int) -> SpanDetail:
        """A whole span."""
        return await self._get(_path(rollout, attempt, sequence), SpanDetail)

    async def request_body(self, rollout: str, attempt: str, sequence: int) -> bytes:
        """The exact bytes of a call's request body."""
        return await self._read("GET", f"{_path(rollout, attempt, sequence)}/request")

    async def response_body(self, rollout: str, attempt: str, sequence: int) -> bytes:
        """The exact bytes of a call's response body."""
        return await self._read("GET", f"{_path(rollout, attempt, sequence)}/response")

    async def stats(self, spans: int | None = None) -> Stats:
        """Figures, with sums over the newest `spans`."""
        return await self._get("/api/stats", Stats, {"spans": spans})

    async def token(self, rollout: str, expires_s: int | None = None) -> Token:
        """An agent token for one rollout."""
        try:
            asked = TokenRequest(rollout=rollout, expires_s=expires_s)
        except ValidationError as e:
            raise ClientError(_brief(e)) from None
        return Token.model_validate_json(await self._read("POST", "/api/tokens", body=asked.model_dump_json()))

    async def changes(self, since: int = 0) -> AsyncGenerator[Change]:
        """Every change after the cursor `since`, for ever. Raises only when the gateway refuses."""
        pause = FIRST_PAUSE_S
        while True:
            try:
                async with aclosing(self._stream(since)) as stream:
                    async for change in stream:
                        since, pause = change.cursor, FIRST_PAUSE_S
                        yield change
            except ClientError as e:
                if not e.passing:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_S)

    async def change_page(self, since: int = 0, limit: int | None = None) -> ChangePage:
        """What changed after `since`, without waiting for more."""
        return await self._get("/api/changes", ChangePage, {"since": since, "limit": limit, "follow": "false"})

    async def _stream(self, since: int) -> AsyncGenerator[Change]:
        """Changes until the connection ends. An event that was cut off is not given."""
        async with self._asked("GET", "/api/changes", {"since": since}) as response:
            waiting = bytearray()
            async for piece in response.content.iter_any():
                waiting += piece
                *events, rest = waiting.split(b"\n\n")
                waiting = bytearray(rest)
                for data in filter(None, map(_data, events)):
                    yield Change.model_validate_json(data)

    async def _pages(self, path: str, filter: str, limit: int | None, model: type[P]) -> AsyncGenerator[P]:
        cursor, left = None, limit
        while left is None or left > 0:
            params = {"filter": filter or None, "limit": min(left or PAGE, PAGE), "cursor": cursor}
            page = await self._get(path, model, params)
            yield page
            left, cursor = None if left is None else left - _rows(page), page.next
            if cursor is None:
                return

    async def _get(self, path: str, model: type[M], params: Params | None = None) -> M:
        data = await self._read("GET", path, params)
        try:
            return model.model_validate_json(data)
        except ValidationError as e:
            raise ClientError(f"{self.url}{path} did not answer as a Penstock gateway does: {_brief(e)}") from None

    async def _read(self, method: str, path: str, params: Params | None = None, body: str | None = None) -> bytes:
        async with self._asked(method, path, params, body) as response:
            return await response.read()

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, params: Params | None = None, body: str | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """A good response; whatever else happens, also while it is read, is a ClientError."""
        if self._session is None:
            raise RuntimeError("use `async with Client(...)`")
        url = URL(self.url + path, encoded=True).with_query({k: v for k, v in (params or {}).items() if v is not None})
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            async with self._session.request(method, url, data=body, headers=headers) as response:
                if response.status >= 400:
                    raise await _refusal(response)
                yield response
        except (aiohttp.ClientError, TimeoutError) as e:
            raise ClientError(f"cannot reach the gateway at {self.url}: {_reason(e)}") from e


def _rows(page: RolloutPage | SpanPage) -> int:
    return len(page.rollouts if isinstance(page, RolloutPage) else page.spans)


def _path(rollout: str, attempt: str | None = None, sequence: int | None = None) -> str:
    path = f"/api/rollouts/{quote(rollout, safe='')}"
    path += "" if attempt is None else f"/attempts/{quote(attempt, safe='')}"
    return path if sequence is None else f"{path}/spans/{sequence}"


def _data(event: bytes | bytearray) -> bytes:
    """The data of an event; empty for comments."""
    return b"\n".join(line[6:] for line in event.split(b"\n") if line.startswith(b"data: "))


async def _refusal(response: aiohttp.ClientResponse) -> ClientError:
    text = await response.text(errors="replace")
    try:
        message = ErrorAnswer.model_validate_json(text).error.message
    except ValidationError:
        message = f"{response.url} answered {response.status}: {' '.join(text.split())[:200]}"
    return ClientError(message, response.status)


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return "nothing answers there; is `penstock serve` running?"
    return str(error) or type(error).__name__


def _brief(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}"
