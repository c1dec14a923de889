"""The key that only reads, asked of a real gateway process: what it opens, and what it does not."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest
from conftest import StartGateway
from fakes.process import Gateway, upstreams
from fakes.provider import Provider
from fakes.shell import Shell
from yarl import URL

from penstock.gateway.api.openapi import EVENTS, Route
from penstock.gateway.api.routes import ROUTES
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.answers import ErrorAnswer

ADMIN, READ = "the-key-of-the-owner-1", "the-key-of-a-guest-2"
KEYS = {"PENSTOCK_ADMIN_KEY": ADMIN, "PENSTOCK_READ_KEY": READ}

NEEDS = {"operate": "'operate' or 'release' or 'admin'", "release": "'release' or 'admin'", "admin": "'admin'"}


@pytest.fixture
async def keyed(start_gateway: StartGateway, provider: Provider) -> Gateway:
    return await start_gateway("require_token = true\n" + upstreams(openai=provider.openai_url), env=KEYS)


@pytest.fixture
async def guest() -> AsyncGenerator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {READ}"}) as made:
        yield made


def path_of(route: Route) -> str:
    """A path of the route, with some id in every place."""
    return re.sub(r"\{(\w+)\}", lambda found: "1" if found[1] == "sequence" else "x1", route.path)


async def asked(session: aiohttp.ClientSession, url: str, route: Route) -> tuple[int, str]:
    """(status, message of a refusal); of a feed only its beginning is read."""
    async with session.request(route.method, url + path_of(route), json=None if route.body is None else {}) as answer:
        if answer.status < 400:
            first = await answer.content.readline() if route.answer == EVENTS else await answer.read()
            assert first
            return answer.status, ""
        return answer.status, ErrorAnswer.model_validate_json(await answer.read()).error.message


async def test_it_opens_what_changes_nothing(keyed: Gateway, guest: aiohttp.ClientSession) -> None:
    opened, closed = list[str](), list[str]()
    for route in ROUTES:
        status, message = await asked(guest, keyed.url, route)
        name = f"{route.method} {route.path}"
        if route.method == "GET" or route.reads:
            assert status not in (401, 403), (name, message)
            opened.append(name)
        else:
            assert (status, message) == (
                403,
                f"the key 'read' has the role 'read'; {name} needs {NEEDS[route.needs]}",
            )
            closed.append(name)
    assert [name for name in opened if name.startswith("POST")] == ["POST /api/policy/test", "POST /api/sql"]
    assert len(closed) > 20
    async with Client(keyed.url, ADMIN) as owner:
        assert [entry async for entry in owner.audit_log()] == []
        assert (await owner.queue()).state == "open"


@pytest.mark.parametrize("path", ["/api/%71ueue", "/api/policy/../queue", "/api/queue?x=/api/policy/test"])
async def test_no_way_of_writing_a_path_opens_more(keyed: Gateway, guest: aiohttp.ClientSession, path: str) -> None:
    async with guest.post(URL(keyed.url + path, encoded=True), json={"state": "paused"}) as answer:
        assert answer.status in (403, 404)
    async with Client(keyed.url, READ) as client:
        assert (await client.queue()).state == "open"


async def test_it_opens_no_calls(keyed: Gateway, guest: aiohttp.ClientSession, provider: Provider) -> None:
    async with guest.post(keyed.openai("r1") + "/chat/completions", json={"model": "m", "messages": []}) as answer:
        assert answer.status == 401
    assert provider.log == []


async def test_who_am_i(keyed: Gateway, start_gateway: StartGateway) -> None:
    async with (
        Client(keyed.url, ADMIN) as owner,
        Client(keyed.url, READ) as reader,
        Client(keyed.url, "guess") as other,
    ):
        assert (await owner.whoami()).role == "admin"
        caller = await reader.whoami()
        assert caller.role == "read"
        assert caller.started_ns > 0
        with pytest.raises(ClientError, match="this is not the gateway's admin key") as refused:
            await other.whoami()
        assert refused.value.status == 401
        token = await owner.make_token("r1")
        with pytest.raises(ClientError, match="the key 'read' has the role 'read'; POST /api/tokens needs 'operate'"):
            await reader.make_token("r1")
    async with Client(keyed.url, token.token) as agent:
        with pytest.raises(ClientError, match="an agent token opens the data plane for its own rollout only"):
            await agent.whoami()
    free = await start_gateway("")
    async with Client(free.url) as anybody:
        assert (await anybody.whoami()).role == "admin"


async def test_commands_take_the_key_that_is_there(keyed: Gateway) -> None:
    shell = Shell(keyed.url, keyed.data)
    assert (await shell.run("queue", PENSTOCK_READ_KEY=READ)).code == 0
    done = await shell.run("pause", PENSTOCK_READ_KEY=READ)
    assert done.code == 1
    assert "the key 'read' has the role 'read'; POST /api/queue needs 'operate' or 'release' or 'admin'" in done.err
    assert (await shell.run("pause", PENSTOCK_READ_KEY=READ, PENSTOCK_ADMIN_KEY=ADMIN)).code == 0


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"PENSTOCK_READ_KEY": READ}, "PENSTOCK_READ_KEY is set and PENSTOCK_ADMIN_KEY is not"),
        (KEYS | {"PENSTOCK_READ_KEY": ADMIN}, "PENSTOCK_READ_KEY is the same as PENSTOCK_ADMIN_KEY"),
        (KEYS | {"PENSTOCK_READ_KEY": "pst_abc"}, r"must not be empty nor start with 'pst_'"),
    ],
)
async def test_a_read_key_that_does_not_hold_is_refused(tmp_path: Path, keys: dict[str, str], why: str) -> None:
    home = tmp_path
    done = await Shell("http://127.0.0.1:9", home).run(
        "serve", "--port", "0", "--data", str(home / "data"), stdin=None, **keys
    )
    assert done.code != 0
    assert why in done.err
    assert "Traceback" not in done.err
    assert keys["PENSTOCK_READ_KEY"] not in done.err.replace("'pst_'", "")


@pytest.mark.parametrize("variable", ["PENSTOCK_ADMIN_KEY", "PENSTOCK_READ_KEY", "PENSTOCK_AUDIT_KEY"])
async def test_a_key_that_is_empty_is_refused(tmp_path: Path, variable: str) -> None:
    """Its value was to come from a variable that is not there: without a word everybody could do everything."""
    shell, keys = Shell("http://127.0.0.1:9", tmp_path), KEYS | {variable: ""}
    for more in ((), ("--workers", "2")):
        done = await shell.run("serve", "--port", "0", "--data", str(tmp_path / "data"), *more, stdin=None, **keys)
        assert (done.code, done.out) == (1, b"")
        assert done.err == f"penstock: {variable} is set and empty, which is no key: give it a value, or unset it\n"


async def test_nothing_is_verified_with_an_empty_key(keyed: Gateway) -> None:
    keys = {"PENSTOCK_ADMIN_KEY": ADMIN, "PENSTOCK_AUDIT_KEY": ""}
    done = await Shell(keyed.url, keyed.data).run("release", "verify", "r", stdin=None, **keys)
    assert done.code == 1
    assert "PENSTOCK_AUDIT_KEY is set and empty" in done.err
