"""Which upstream serves a call, and what is said where there is none."""

from __future__ import annotations

import pytest

from penstock.gateway.config import Route, Upstream
from penstock.gateway.dialects.family import ANTHROPIC, GEMINI, OPENAI
from penstock.gateway.http.errors import GatewayFault
from penstock.gateway.upstreams.pool import Pool
from penstock.gateway.upstreams.routes import Routes


def pool(name: str, dialect: str) -> Pool:
    return Pool(Upstream(name=name, base_url="http://h", dialect=dialect))


POOLS = {it.name: it for it in (pool("a", "openai"), pool("b", "anthropic"), pool("c", "openai"))}
ROUTES = Routes([Route(model="qwen*", upstream=["c", "b"], alias="x")], POOLS)


def test_a_route_comes_before_the_first_upstream_of_the_family() -> None:
    assert ROUTES.of("qwen3", ANTHROPIC) == ([POOLS["c"], POOLS["b"]], "x")
    assert ROUTES.of("gpt", OPENAI) == ([POOLS["a"]], None)
    assert ROUTES.of(None, ANTHROPIC) == ([POOLS["b"]], None)


def test_a_family_that_nobody_speaks_is_named() -> None:
    with pytest.raises(GatewayFault, match=r"no upstream speaks gemini: add an .*dialect = .gemini.") as caught:
        ROUTES.of(None, GEMINI)
    assert caught.value.status == 503
    assert ROUTES.of("qwen3", GEMINI)[0][0].name == "c"
