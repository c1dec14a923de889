"""A receiver of webhooks: a real server that keeps what it is sent and answers what a test wants.

async with hooked() as hook:
    hook.script = [Failing(500), Failing(429, {"Retry-After": "2"})]  # in turn; then it takes everything
    ...
    await hook.until(lambda: len(hook.taken) == 3)
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from types import MappingProxyType
from typing import Any, NamedTuple

from aiohttp import web
from fakes.process import ROOT
from fakes.waiting import News
from fakes.web_site import everywhere, site

SECRET = "whsec_" + "c2VjcmV0LW9mLWEtcmVjZWl2ZXItaW4tdGVzdHM="
PAGE = ROOT / "docs" / "webhooks.md"
Verify = Callable[[str, dict[str, str], bytes], Any]


def documented() -> Verify:
    """The function that the documentation gives to receivers."""
    code = re.search(r"```python\n(import base64.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    return names["verified"]


class Failing(NamedTuple):
    """An answer that does not take a message."""

    status: int
    headers: Mapping[str, str] = MappingProxyType({})


class Sent(NamedTuple):
    """A request as it came, and when; monotonic seconds."""

    at: float
    path: str
    headers: dict[str, str]
    body: bytes
    taken: bool

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def message(self) -> dict[str, Any]:
        return json.loads(self.body)


@dataclass
class Hook:
    """A running receiver."""

    url: str = ""
    port: int = 0
    log: list[Sent] = field(default_factory=list[Sent])
    script: list[Failing] = field(default_factory=list[Failing])
    hold: asyncio.Event | None = None
    """Requests wait for it before they are answered."""
    news: News = field(default_factory=News)

    @property
    def taken(self) -> list[Sent]:
        return [one for one in self.log if one.taken]

    @property
    def types(self) -> list[str]:
        """Of the messages that were taken, in the order in which they came."""
        return [one.message["type"] for one in self.taken]

    async def handle(self, request: web.Request) -> web.Response:
        body, failing = await request.read(), self.script.pop(0) if self.script else None
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.log.append(Sent(monotonic(), request.path_qs, headers, body, failing is None))
        self.news.tell()
        if self.hold is not None:
            await self.hold.wait()
        return web.Response(status=204) if failing is None else web.Response(status=failing[0], headers=failing[1])

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition on what came holds."""
        await self.news.until(condition, lambda: [(one.message, one.taken) for one in self.log])


@asynccontextmanager
async def hooked(port: int = 0) -> AsyncGenerator[Hook]:
    """A receiver on a free port, or on this one."""
    made = Hook()
    async with site(everywhere(made.handle), port) as url:
        made.port = int(url.rpartition(":")[2])
        made.url = f"{url}/hook?token=t0ken-of-the-receiver"
        yield made
