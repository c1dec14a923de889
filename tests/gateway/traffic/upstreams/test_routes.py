"""Which upstream serves a call, and what is said where there is none."""

from __future__ import annotations

import pytest

from penstock.gateway.config import RouteSettings, UpstreamSettings
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.traffic.upstreams.routes import RouteTable
from penstock.gateway.wire.dialects import OPAQUE, find
from penstock.gateway.wire.dialects.family import ANTHROPIC, CHATGPT, GATEWAY, GEMINI, OPENAI, VERTEX, Family
from penstock.gateway.wire.http.request import ClientFault


def pool(name: str, dialect: str) -> ConnectionPool:
    return ConnectionPool(UpstreamSettings(name=name, base_url="http://h", dialect=dialect))


POOLS = {it.name: it for it in (pool("a", "openai"), pool("b", "anthropic"), pool("c", "openai"))}
CHAT, MESSAGES = find("POST", "/v1/chat/completions"), find("POST", "/v1/messages")
ROUTES = RouteTable([RouteSettings(model="qwen*", upstream={"c": 0, "b": 0}, alias="x")], POOLS, {"a", "b"})


def test_a_route_leads_to_those_of_its_upstreams_that_speak_what_a_call_does() -> None:
    route = ROUTES.find("qwen3")
    assert route is not None
    assert ROUTES.candidates(route, (OPENAI,), CHAT) == [POOLS["c"]]
    assert ROUTES.candidates(route, (ANTHROPIC,), MESSAGES) == [POOLS["c"], POOLS["b"]]
    assert ROUTES.candidates(route, (ANTHROPIC,), OPAQUE) == [POOLS["b"]], "what is not read is not an engine's"
    assert ROUTES.candidates(route, (), OPAQUE) == [POOLS["c"], POOLS["b"]]
    assert ROUTES.candidates(route, (GEMINI,), OPAQUE) == []
    assert ROUTES.owner((OPENAI,), CHAT, "/x", []) is POOLS["a"]
    assert ROUTES.owner((ANTHROPIC,), MESSAGES, "/x", []) is POOLS["b"]


def test_only_a_route_for_everything_takes_what_names_no_model() -> None:
    every = RouteTable(
        [RouteSettings(model="?*", upstream={"a": 0}), RouteSettings(model="*", upstream={"c": 0})], POOLS, {"a", "b"}
    )
    assert every.find(None) is None
    found = every.find("")
    assert found is not None
    assert list(found.upstream) == ["c"]


@pytest.mark.parametrize(
    ("families", "said"),
    [
        ((GEMINI,), ["gemini", 'dialect = "gemini"', "a (openai), b (anthropic)", "'/x?key=***'"]),
        ((VERTEX, GEMINI), ["vertex or gemini", 'dialect = "vertex"']),
        ((GATEWAY,), ["gateway's own"]),
        ((), ["nothing tells"]),
    ],
)
def test_what_nobody_serves_is_refused(families: tuple[Family, ...], said: list[str]) -> None:
    with pytest.raises(ClientFault) as caught:
        ROUTES.owner(families, OPAQUE, "/x?key=AIzaSyA1234567890123456789", [KEY])
    assert (caught.value.status, caught.value.field) == (404, "path")
    assert [one for one in said if one not in caught.value.message] == []


KEY = (b"authorization", b"Authorization", b"Bearer of-whom")
TOKEN = (b"authorization", b"Authorization", b"Bearer pst_x")
PUBLIC = {it.name: it for it in (pool("openai", "openai"), pool("anthropic", "anthropic"))}


def test_an_unknown_call_goes_to_the_host_that_it_names() -> None:
    other = ConnectionPool(UpstreamSettings(name="d", base_url="https://d.example/v1"))
    routes = RouteTable([], POOLS | {"d": other}, {"a", "b", "d"})
    assert routes.owner((), OPAQUE, "/x", [KEY, (b"host", b"Host", b"D.example")]) is other
    assert routes.owner((ANTHROPIC, OPENAI), OPAQUE, "/x", [KEY, (b"host", b"Host", b"D.example")]) is other
    assert routes.owner((ANTHROPIC, GEMINI), OPAQUE, "/x", [KEY, (b"host", b"Host", b"d.example")]) is POOLS["b"]
    with pytest.raises(ClientFault):
        routes.owner((), OPAQUE, "/x", [KEY, (b"host", b"Host", b"d.example:1")])


@pytest.mark.parametrize(
    ("families", "configured", "name"),
    [
        ((), ("b",), "b"),
        ((), ("a", "c"), "a"),
        ((), ("b", "c"), None),
        ((OPENAI, ANTHROPIC), ("b",), "b"),
        ((OPENAI, ANTHROPIC), ("b", "c"), "c"),
        ((GEMINI, VERTEX), ("b", "c"), None),
    ],
)
def test_a_call_that_may_be_of_several_goes_to_what_was_configured(
    families: tuple[Family, ...], configured: tuple[str, ...], name: str | None
) -> None:
    routes = RouteTable([], {it: POOLS[it] for it in configured} | PUBLIC, set(configured))
    if name is None:
        with pytest.raises(ClientFault):
            routes.owner(families, OPAQUE, "/x", [KEY])
    else:
        assert routes.owner(families, OPAQUE, "/x", [KEY]).name == name


def test_a_public_endpoint_gets_no_unknown_call_with_a_key() -> None:
    routes = RouteTable([], PUBLIC, set())
    for families in ((), (OPENAI, ANTHROPIC)):
        assert routes.owner(families, OPAQUE, "/x", []).name == "openai"
        assert routes.owner(families, OPAQUE, "/x", [TOKEN]).name == "openai"
        with pytest.raises(ClientFault) as caught:
            routes.owner(families, OPAQUE, "/x", [KEY])
        assert caught.value.status == 404
    assert routes.owner((OPENAI, CHATGPT), find("POST", "/v1/responses"), "/v1/responses", [KEY]).name == "openai"
