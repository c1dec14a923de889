"""Named keys: each opens what its role says, refusals name the role that is needed, and the audit names the key."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import aiohttp
import pytest
from conftest import StartGateway
from fakes.experiment import CANDIDATE, STABLE, policy, prompt
from fakes.process import Gateway, upstreams
from fakes.provider import Provider
from fakes.shell import Shell

from penstock.gateway.api.routes import ROUTES
from penstock.gateway.calls.auth import Auth, Holder, key_hash, make_key
from penstock.gateway.client.client import Client
from penstock.gateway.client.connection import ClientError
from penstock.gateway.config import Config
from penstock.gateway.model.audit import ROLES, Said
from penstock.gateway.model.release import NewRelease

ADMIN = "the-key-of-the-owner-1"
KEYS = {name: make_key() for name in ("ron", "opal", "rita")}
NAMED = dict(zip(KEYS, ("read", "operate", "release"), strict=True))
TABLES = "".join(
    f'[[key]]\nname = "{name}"\nrole = "{role}"\nsha256 = "{key_hash(KEYS[name])}"\n' for name, role in NAMED.items()
)


@pytest.fixture
async def keyed(start_gateway: StartGateway, provider: Provider) -> Gateway:
    config = "require_token = true\n" + upstreams(openai=provider.openai_url) + TABLES
    return await start_gateway(config, env={"PENSTOCK_ADMIN_KEY": ADMIN})


@pytest.fixture
async def clients(keyed: Gateway) -> AsyncGenerator[dict[str, Client]]:
    async with AsyncExitStack() as stack:
        keys = {"admin": ADMIN} | KEYS
        yield {name: await stack.enter_async_context(Client(keyed.url, key)) for name, key in keys.items()}


async def test_every_route_is_opened_by_its_role_and_those_above(keyed: Gateway, http: aiohttp.ClientSession) -> None:
    keys = KEYS | {"admin": ADMIN}
    for name, role in (NAMED | {"admin": "admin"}).items():
        for route in (route for route in ROUTES if route.method == "POST"):
            url = keyed.url + re.sub(r"\{\w+\}", "x1", route.path)
            # A body of another kind is refused behind the key and changes nothing.
            async with http.post(url, data=b"x", headers={"x-api-key": keys[name]}) as answer:
                opened = ROLES.index(role) >= ROLES.index(route.needs)
                assert (answer.status != 403) == opened, (name, route.path, answer.status)
    assert {route.needs for route in ROUTES} == set(ROLES)
    for route in ROUTES:
        url = keyed.url + re.sub(r"\{\w+\}", "x1", route.path)
        async with http.request(route.method, url, data=b"x" if route.method == "POST" else None) as answer:
            assert (answer.status == 401) is not route.public, (route.method, route.path, answer.status)


async def test_roles_and_the_audit(clients: dict[str, Client], keyed: Gateway) -> None:
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
    await clients["admin"].decide("travel-1", "hold", Said(who="ann", why="lunch"))
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
    keyed: Gateway, http: aiohttp.ClientSession, provider: Provider
) -> None:
    headers = {"Authorization": f"Bearer {KEYS['rita']}"}
    async with http.post(keyed.openai("r1") + "/chat/completions", json={"model": "m"}, headers=headers) as answer:
        assert answer.status == 401
    assert provider.log == []


async def test_a_key_is_made_that_opens_the_gateway(start_gateway: StartGateway, keyed: Gateway) -> None:
    shell = Shell(keyed.url, keyed.data)
    key, table = (await shell.run("key", "ann", "--role", "operate")).text.split("\n\n")
    gateway = await start_gateway(table, env={"PENSTOCK_ADMIN_KEY": ADMIN})
    async with Client(gateway.url, key) as client:
        assert (await client.whoami()).key == "ann"
    refused = await shell.run("key", "an n")
    assert refused.code != 0
    assert "name" in refused.err


def test_named_keys_that_protect_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="there are named keys and PENSTOCK_ADMIN_KEY is not set"):
        Auth(None, b"s" * 32, named=[("00" * 32, Holder("ann", "read"))])


@pytest.mark.parametrize(
    ("names", "hashes"), [(("a", "a"), ("0", "1")), (("a", "b"), ("0", "0")), (("admin",), ("0",))]
)
def test_names_and_hashes_differ(names: tuple[str, ...], hashes: tuple[str, ...]) -> None:
    keys = [{"name": name, "role": "read", "sha256": it * 64} for name, it in zip(names, hashes, strict=True)]
    with pytest.raises(ValueError, match=r"another key|same sha256"):
        Config.model_validate({"key": keys})
