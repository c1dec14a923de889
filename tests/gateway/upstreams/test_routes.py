"""Which upstream serves a call, and what is said where there is none."""

from __future__ import annotations

import pytest

from penstock.gateway.dialects.family import ANTHROPIC, GEMINI, OPENAI
from penstock.gateway.http.errors import ClientFault, GatewayFault
from penstock.gateway.upstream_settings import Route, Upstream
from penstock.gateway.upstreams.pool import Pool
from penstock.gateway.upstreams.routes import Routes


def pool(name: str, dialect: str) -> Pool:
    return Pool(Upstream(name=name, base_url="http://h", dialect=dialect))


POOLS = {it.name: it for it in (pool("a", "openai"), pool("b", "anthropic"), pool("c", "openai"))}
ROUTES = Routes([Route(model="qwen*", upstream=["c", "b"], alias="x")], POOLS, {"a", "b"})


def test_a_route_comes_before_the_first_upstream_of_the_family() -> None:
    assert ROUTES.of("qwen3", ANTHROPIC) == ([POOLS["c"], POOLS["b"]], "x")
    assert ROUTES.of("gpt", OPENAI) == ([POOLS["a"]], None)
    assert ROUTES.of(None, ANTHROPIC) == ([POOLS["b"]], None)


def test_only_a_route_for_everything_takes_what_names_no_model() -> None:
    every = Routes([Route(model="?*", upstream=["a"]), Route(model="*", upstream=["c"])], POOLS, {"a", "b"})
    assert every.find(None) is None
    found = every.find("")
    assert found is not None
    assert found.upstream == ["c"]


def test_a_family_that_nobody_speaks_is_named() -> None:
    with pytest.raises(GatewayFault, match=r"no upstream speaks gemini: add an .*dialect = .gemini.") as caught:
        ROUTES.of(None, GEMINI)
    assert caught.value.status == 503
    assert ROUTES.of("qwen3", GEMINI)[0][0].name == "c"


KEY = (b"authorization", b"Authorization", b"Bearer of-whom")
TOKEN = (b"authorization", b"Authorization", b"Bearer pst_x")
PUBLIC = {it.name: it for it in (pool("openai", "openai"), pool("anthropic", "anthropic"))}


def test_an_unknown_call_goes_to_the_host_that_it_names() -> None:
    other = Pool(Upstream(name="d", base_url="https://d.example/v1"))
    routes = Routes([], POOLS | {"d": other}, {"a", "b", "d"})
    assert routes.unknown(OPENAI, "/x", [KEY, (b"host", b"Host", b"D.example")]) is other
    assert routes.unknown(OPENAI, "/x", [KEY, (b"host", b"Host", b"d.example:1")]) is POOLS["a"]


@pytest.mark.parametrize(
    ("configured", "name"), [(("b",), "b"), (("c",), "c"), (("b", "c"), "c"), (("b", "a", "c"), "a")]
)
def test_an_unknown_call_goes_to_what_was_configured(configured: tuple[str, ...], name: str) -> None:
    pools = {it: POOLS[it] for it in configured} | PUBLIC
    assert Routes([], pools, set(configured)).unknown(OPENAI, "/x", [KEY]).name == name


def test_a_public_endpoint_gets_no_unknown_call_with_a_key() -> None:
    routes = Routes([], PUBLIC, set())
    assert routes.unknown(OPENAI, "/x", []).name == "openai"
    assert routes.unknown(OPENAI, "/x", [TOKEN]).name == "openai"
    with pytest.raises(ClientFault, match="nothing tells whose API the path '/x' belongs to") as caught:
        routes.unknown(OPENAI, "/x", [KEY])
    assert caught.value.status == 404
