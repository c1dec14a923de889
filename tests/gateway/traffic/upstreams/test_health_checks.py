"""Checks of upstreams: what they find out counts before a call does."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web
from fakes.ports import steady_ports
from fakes.rig import Within
from fakes.waiting import until
from fakes.web_site import site

from penstock.gateway.traffic.upstreams import pool

ROUTE = {"model": "m", "upstream": ["checked", "spare"]}


@dataclass(slots=True)
class Server:
    """A model server that says how it is."""

    url: str = ""
    status: int = 503
    checks: list[web.Request] = field(default_factory=list[web.Request])
    calls: int = 0

    async def health(self, request: web.Request) -> web.Response:
        self.checks.append(request)
        return web.Response(status=self.status, headers={"Location": "/elsewhere"})

    async def answer(self, request: web.Request) -> web.Response:
        self.calls += 1
        return web.json_response({"by": self.url})


@asynccontextmanager
async def served() -> AsyncGenerator[Server]:
    made, application = Server(), web.Application()
    application.router.add_get("/health", made.health)
    application.router.add_post("/v1/chat/completions", made.answer)
    async with site(application) as made.url:
        yield made


async def test_one_that_fails_its_checks_costs_no_call_anything(
    within: Within, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "CHECK_EVERY_S", 0.02)
    monkeypatch.setattr(pool, "CHECK_AGAIN_S", 0.02)
    monkeypatch.setenv("UP_KEY", "sk-of-the-upstream")
    caplog.set_level(logging.INFO, "penstock.upstream")
    async with served() as checked, served() as spare:
        known = {"health_path": "/health", "key_env": "UP_KEY"}
        upstreams = [
            {"name": "checked", "base_url": checked.url + "/v1", **known},
            {"name": "spare", "base_url": spare.url + "/v1"},
        ]
        async with within(upstreams, route=[ROUTE]) as rig:

            async def shown() -> tuple[str, str, str]:
                async with http.get(rig.base.url + "/api/upstreams") as answer:
                    views = {one["name"]: one for one in (await answer.json())["upstreams"]}
                assert views["spare"]["check"] is None
                found = views["checked"]
                return found["health"], found["failing"], found["check"]

            async def is_now(health: str, failing: str, check: str) -> bool:
                return await shown() == (health, failing, check)

            async def call() -> str:
                asked = http.post(rig.base.url + "/v1/chat/completions", json={"model": "m", "messages": []})
                async with asked as answer:
                    return (await answer.json())["by"]

            await until(lambda: is_now("resting", "check_http_503", "http_503"))
            assert await call() == spare.url
            assert checked.calls == 0
            assert checked.checks[0].headers["Authorization"] == "Bearer sk-of-the-upstream"
            checked.status = 200
            await until(lambda: is_now("probing", "check_http_503", "passed"))
            assert await call() == checked.url
            assert await shown() == ("good", "", "passed")
            checked.status = 302
            await until(lambda: is_now("resting", "check_http_302", "http_302"))
            assert not spare.checks, "it has no path for that"
            counted = rig.gateway.metrics.upstream_checks
            assert counted["checked", "passed"] >= 1
            assert counted["checked", "failed"] >= 4
    assert [one.levelname for one in caplog.records if "checks" in one.message] == ["WARNING", "INFO", "WARNING"]


async def test_what_is_gone_fails_and_what_is_silent_does(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "CHECK_AGAIN_S", 0.02)
    monkeypatch.setattr(pool, "CHECK_ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        urls = [f"http://127.0.0.1:{port}" for port in (silent.getsockname()[1], *steady_ports(1))]
        named = zip(("silent", "gone"), urls, strict=True)
        upstreams = [{"name": name, "base_url": url, "health_path": "/health"} for name, url in named]
        async with within(upstreams) as rig:
            why = [rig.gateway.pools[name].health for name in ("silent", "gone")]
            await until(lambda: [one.why for one in why] == ["check_timeout", "check_connect"])


async def test_a_host_name_that_is_none_fails_again_and_again(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its resolver raises `UnicodeError`, which is no error of a connection."""
    monkeypatch.setattr(pool, "CHECK_AGAIN_S", 0.02)
    upstreams = [{"name": "odd", "base_url": f"http://{64 * 'x'}.example/v1", "health_path": "/health"}]
    async with within(upstreams) as rig:
        await until(lambda: rig.gateway.metrics.upstream_checks["odd", "failed"] > 1)
        assert rig.gateway.pools["odd"].health.why == "check_connect"
