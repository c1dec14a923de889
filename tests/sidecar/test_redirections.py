"""What the sidecar, an agent's helper, a wrapper of tools and every command asks by itself follows no redirection: a
gateway makes none, and whoever is named in one would get a key or a body.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from fakes.process import PATIENCE
from fakes.web_site import everywhere, site

from penstock.gateway.client.connection import ApiConnection, ClientError
from penstock.gateway.model.queue import Event, EventsRequest
from penstock.sidecar.intercept.service import request_admin
from penstock.sidecar.intercept.session import AgentIdentity, report_egress
from penstock.sidecar.run.agent import helper
from penstock.sidecar.stdio.delivery import DeliveryRefusal, Destination, post

KEY = "pst_of-an-attempt"
STATUSES = (300, 301, 302, 303, 307, 308)


@dataclass(slots=True)
class Moved:
    """A server that sends everybody to another one."""

    url: str = ""
    status: int = 302
    elsewhere: str = ""
    asked: int = 0
    followed: list[tuple[str, str | None, str]] = field(default_factory=list[tuple[str, str | None, str]])
    """What has come to the other one: method, key and body."""

    async def move(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(status=self.status, headers={"Location": self.elsewhere})

    async def follow(self, request: web.Request) -> web.Response:
        self.followed.append((request.method, request.headers.get("Authorization"), await request.text()))
        return web.json_response({"done": 0, "open": [], "need": [], "recorded_bytes": 1})


@pytest.fixture(params=STATUSES)
async def moved(request: pytest.FixtureRequest) -> AsyncGenerator[Moved]:
    made = Moved(status=request.param)
    async with site(everywhere(made.move)) as made.url, site(everywhere(made.follow)) as there:
        made.elsewhere = f"{there}/elsewhere"
        yield made
    assert made.asked == 1
    assert made.followed == []


async def test_a_wrapper_says_so(moved: Moved) -> None:
    with pytest.raises(DeliveryRefusal, match=f"does not take what passes: {moved.status} "):
        _ = await asyncio.to_thread(post, Destination(moved.url, KEY), b"{}\n")


async def test_an_agents_helper_says_so(
    moved: Moved, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(helper, "_said", set[str]())
    sender = helper.ReportSender()
    sender.put((moved.url, KEY), helper.EVENTS, {"name": "said"})
    assert await asyncio.to_thread(sender.wait, PATIENCE)
    assert f"said of itself: {moved.status}" in capfd.readouterr().err


async def test_where_an_agent_has_been_is_not_told_elsewhere(moved: Moved) -> None:
    said = await report_egress(moved.url, AgentIdentity("r1", "a1", KEY), [Event(name="egress")])
    assert said is not None
    assert said.startswith(f"the gateway answered {moved.status}")


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
async def test_nor_whose_rollout_an_agent_has(moved: Moved, method: str) -> None:
    status, _ = await request_admin(
        method, "/agents/1", moved.url.removeprefix("http://"), {"rollout": "r1", "token": KEY}
    )
    assert status == moved.status


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_client_says_so(moved: Moved, method: str) -> None:
    body = EventsRequest(events=[Event(name="said")]).model_dump_json() if method == "POST" else None
    async with ApiConnection(moved.url, KEY) as client:
        with pytest.raises(ClientError, match=f"is not a Penstock gateway \\(it answered {moved.status} ") as found:
            _ = await client.read(method, "/api/rollouts", body=body)
    assert not found.value.temporary
