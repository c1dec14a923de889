"""The keys of a gateway: what each opens and what it does not, and that the audit names it."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.experiment import CANDIDATE, STABLE, policy, prompt
from fakes.local import Local, locally
from fakes.mistakes import tells
from fakes.process import upstreams
from fakes.provider import Provider
from fakes.shell import Shell
from yarl import URL

from penstock.gateway.api.openapi import EVENTS, ApiRoute
from penstock.gateway.api.routes import ROUTES
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.config import GatewayConfig
from penstock.gateway.model.answers import ErrorAnswer
from penstock.gateway.model.base import ROLES, ActionRequest
from penstock.gateway.model.release import NewRelease
from penstock.gateway.traffic.calls.admission import Auth, Holder, key_hash, make_key

ADMIN, READ = "the-key-of-the-owner-1", "the-key-of-a-guest-2"
OWN = {"PENSTOCK_ADMIN_KEY": ADMIN, "PENSTOCK_READ_KEY": READ}
NEEDS = {"operate": "'operate' or 'release' or 'admin'", "release": "'release' or 'admin'", "admin": "'admin'"}
KEYS = {name: make_key() for name in ("ron", "opal", "rita")}
NAMED = dict(zip(KEYS, ("read", "operate", "release"), strict=True))
TABLES = "".join(
    f'[[key]]\nname = "{name}"\nrole = "{role}"\nsha256 = "{key_hash(KEYS[name])}"\n' for name, role in NAMED.items()
)


@pytest.fixture
async def keyed(provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Local]:
    for name, key in OWN.items():
        monkeypatch.setenv(name, key)
    config = "require_token = true\n" + upstreams(openai=provider.openai_url) + TABLES
    async with locally(tmp_path, config) as made:
        yield made


@pytest.fixture
async def guest() -> AsyncGenerator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {READ}"}) as made:
        yield made


def path_of(route: ApiRoute) -> str:
    """A path of the route, with some id in every place."""
    return re.sub(r"\{(\w+)\}", lambda found: "1" if found[1] == "sequence" else "x1", route.path)


async def asked(session: aiohttp.ClientSession, url: str, route: ApiRoute) -> tuple[int, str]:
    """(status, message of a refusal); of a feed only its beginning is read."""
    async with session.request(route.method, url + path_of(route), json=None if route.body is None else {}) as answer:
        if answer.status < 400:
            first = await answer.content.readline() if route.answer == EVENTS else await answer.read()
            assert first
            return answer.status, ""
        return answer.status, ErrorAnswer.model_validate_json(await answer.read()).error.message


async def test_it_opens_what_changes_nothing(keyed: Local, guest: aiohttp.ClientSession) -> None:
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
                f"the key 'read' has the role 'read'; {name} needs {NEEDS[route.required_role]}",
            )
            closed.append(name)
    assert [name for name in opened if name.startswith("POST")] == ["POST /api/policy/test", "POST /api/sql"]
    assert len(closed) > 20
    async with Client(keyed.url, ADMIN) as owner:
        assert [entry async for entry in owner.audit_log()] == []
        assert (await owner.queue()).state == "open"


async def test_no_way_of_writing_a_path_opens_more(keyed: Local, guest: aiohttp.ClientSession) -> None:
    for path in ("/api/%71ueue", "/api/policy/../queue", "/api/queue?x=/api/policy/test"):
        async with guest.post(URL(keyed.url + path, encoded=True), json={"state": "paused"}) as answer:
            assert answer.status in (403, 404), path
    async with Client(keyed.url, READ) as client:
        assert (await client.queue()).state == "open"


async def test_it_opens_no_calls(keyed: Local, guest: aiohttp.ClientSession, provider: Provider) -> None:
    async with guest.post(keyed.openai("r1") + "/chat/completions", json={"model": "m", "messages": []}) as answer:
        assert answer.status == 401
    assert provider.log == []


async def test_who_am_i(keyed: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        with pytest.raises(ClientError, match=r"the key 'read' .* POST /api/tokens needs 'operate'"):
            await reader.make_token("r1")
    async with Client(keyed.url, token.token) as agent:
        with pytest.raises(ClientError, match="an agent token opens the data plane for its own rollout only"):
            await agent.whoami()
    for name in OWN:
        monkeypatch.delenv(name)
    async with locally(tmp_path / "free") as free, Client(free.url) as anybody:
        assert (await anybody.whoami()).role == "admin"


@pytest.mark.slow
async def test_commands_take_the_key_that_is_there(keyed: Local) -> None:
    shell = Shell(keyed.url, keyed.data)
    assert (await shell.run("queue", PENSTOCK_READ_KEY=READ)).code == 0
    done = await shell.run("pause", PENSTOCK_READ_KEY=READ)
    assert (done.code, f"POST /api/queue needs {NEEDS['operate']}" in done.err) == (1, True)
    assert (await shell.run("pause", PENSTOCK_READ_KEY=READ, PENSTOCK_ADMIN_KEY=ADMIN)).code == 0


@pytest.mark.slow
async def test_read_keys_that_do_not_hold_are_refused(tmp_path: Path) -> None:
    shell = Shell("http://127.0.0.1:9", tmp_path)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"PENSTOCK_READ_KEY": READ}, "PENSTOCK_READ_KEY is set and PENSTOCK_ADMIN_KEY is not"),
        (OWN | {"PENSTOCK_READ_KEY": ADMIN}, "PENSTOCK_READ_KEY is the same as PENSTOCK_ADMIN_KEY"),
        (OWN | {"PENSTOCK_READ_KEY": "pst_abc"}, "must not be empty nor start with 'pst_'"),
    ]
    for keys, why in wrong:
        done = await shell.run("serve", "--port", "0", "--data", "data", **keys)
        assert (done.code != 0, why in done.err, "Traceback" in done.err) == (True, True, False), done.err
        assert keys["PENSTOCK_READ_KEY"] not in done.err.replace("'pst_'", "")


@pytest.mark.slow
async def test_keys_that_are_empty_are_refused(tmp_path: Path) -> None:
    """Its value was to come from a variable that is not there: without a word everybody could do everything."""
    shell = Shell("http://127.0.0.1:9", tmp_path)
    for variable in ("PENSTOCK_ADMIN_KEY", "PENSTOCK_READ_KEY", "PENSTOCK_AUDIT_KEY"):
        for more in ((), ("--workers", "2")):
            done = await shell.run(
                "serve", "--port", "0", "--data", "data", *more, **dict[str, Any](OWN | {variable: ""})
            )
            told = tells(done.err, f"{variable} is set and empty", "unset it")
            assert (done.code, done.out, told) == (1, b"", True), done.err


@pytest.mark.slow
async def test_nothing_is_verified_with_an_empty_key(keyed: Local) -> None:
    keys: dict[str, Any] = {"PENSTOCK_ADMIN_KEY": ADMIN, "PENSTOCK_AUDIT_KEY": ""}
    done = await Shell(keyed.url, keyed.data).run("release", "verify", "r", **keys)
    assert (done.code, "PENSTOCK_AUDIT_KEY is set and empty" in done.err) == (1, True)


# -- named keys --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def clients(keyed: Local) -> AsyncGenerator[dict[str, Client]]:
    async with AsyncExitStack() as stack:
        keys = {"admin": ADMIN} | KEYS
        yield {name: await stack.enter_async_context(Client(keyed.url, key)) for name, key in keys.items()}


async def test_every_route_is_opened_by_its_role_and_those_above(keyed: Local, http: aiohttp.ClientSession) -> None:
    keys = KEYS | {"admin": ADMIN}
    for name, role in (NAMED | {"admin": "admin"}).items():
        for route in (route for route in ROUTES if route.method == "POST"):
            url = keyed.url + path_of(route)
            # A body of another kind is refused behind the key and changes nothing.
            async with http.post(url, data=b"x", headers={"x-api-key": keys[name]}) as answer:
                opened = ROLES.index(role) >= ROLES.index(route.required_role)
                assert (answer.status != 403) == opened, (name, route.path, answer.status)
    assert {route.required_role for route in ROUTES} == set(ROLES)
    for route in ROUTES:
        url = keyed.url + path_of(route)
        async with http.request(route.method, url, data=b"x" if route.method == "POST" else None) as answer:
            assert (answer.status == 401) is not route.public, (route.method, route.path, answer.status)


@pytest.mark.slow
async def test_roles_and_the_audit(clients: dict[str, Client], keyed: Local) -> None:
    whoami = {name: await client.whoami() for name, client in clients.items()}
    assert {name: (it.key, it.role) for name, it in whoami.items()} == {
        name: (name, role) for name, role in ({"admin": "admin"} | NAMED).items()
    }
    with pytest.raises(ClientError, match=r"the key 'ron' has the role 'read'; .* needs 'operate' or 'release'"):
        await clients["ron"].make_token("r1")
    with pytest.raises(ClientError, match=r"the key 'opal' has the role 'operate'; .* needs 'release' or 'admin'"):
        await clients["opal"].add_version("travel", prompt(STABLE, sent=True))
    await clients["opal"].make_token("r1")
    await clients["rita"].add_version("travel", prompt(STABLE, sent=True))
    await clients["rita"].add_version("travel", prompt(CANDIDATE))
    await clients["rita"].start_release("travel", NewRelease(candidate="v2", policy=policy(0.5), author="bob"))
    await clients["admin"].decide("travel-1", "hold", ActionRequest(who="ann", why="lunch"))
    start, *_, hold = [entry for entry in await clients["ron"].audit("travel-1") if entry.who != "gateway"]
    assert [(it.who, it.key) for it in (start, hold)] == [("bob", "rita"), ("ann", "admin")]
    listed = [entry async for entry in clients["ron"].audit_log()]
    assert [(it.action, it.who, it.key) for it in listed] == [
        ("hold_release", "ann", "admin"), ("start_release", "bob", "rita"),
    ]  # fmt: skip
    shown = await Shell(keyed.url, keyed.data).run("audit", PENSTOCK_ADMIN_KEY=KEYS["ron"])
    assert "rita (says bob)" in shown.text
    tape = (keyed.data / "tape" / "data.mdb").read_bytes()
    assert not any(key.encode() in tape for key in KEYS.values())


async def test_a_named_key_opens_no_calls_and_goes_nowhere(
    keyed: Local, http: aiohttp.ClientSession, provider: Provider
) -> None:
    headers = {"Authorization": f"Bearer {KEYS['rita']}"}
    async with http.post(keyed.openai("r1") + "/chat/completions", json={"model": "m"}, headers=headers) as answer:
        assert answer.status == 401
    assert provider.log == []


@pytest.mark.slow
async def test_a_key_is_made_that_opens_the_gateway(keyed: Local, tmp_path: Path) -> None:
    shell = Shell(keyed.url, keyed.data)
    key, table = (await shell.run("key", "ann", "--role", "operate")).text.split("\n\n")
    async with locally(tmp_path / "other", table) as other, Client(other.url, key) as client:
        assert (await client.whoami()).key == "ann"
    refused = await shell.run("key", "an n")
    assert (refused.code != 0, "name" in refused.err) == (True, True)


def test_named_keys_that_protect_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="there are named keys and PENSTOCK_ADMIN_KEY is not set"):
        Auth(None, b"s" * 32, named=[("00" * 32, Holder("ann", "read"))])


@pytest.mark.parametrize(
    ("names", "hashes"), [(("a", "a"), ("0", "1")), (("a", "b"), ("0", "0")), (("admin",), ("0",))]
)
def test_names_and_hashes_differ(names: tuple[str, ...], hashes: tuple[str, ...]) -> None:
    keys = [{"name": name, "role": "read", "sha256": it * 64} for name, it in zip(names, hashes, strict=True)]
    with pytest.raises(ValueError, match=r"another key|same sha256"):
        GatewayConfig.model_validate({"key": keys})
