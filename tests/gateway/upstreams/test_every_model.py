"""A route for every model takes what names none, too. What cannot be read may name one, and goes nowhere."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from fakes.engine import engine
from fakes.rig import CHAT, MESSAGES, inside


@pytest.mark.parametrize(
    ("body", "served"),
    [(b"{no json", None), (b"{}", "every"), (b'{"model":null}', "every"), (b"[]", None)],
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_what_names_no_model_goes_where_every_model_goes(
    tmp_path: Path, http: aiohttp.ClientSession, body: bytes, served: str | None, path: str
) -> None:
    async with engine() as first, engine() as every:
        upstreams = [{"name": "first", "base_url": first.openai_url}, {"name": "every", "base_url": every.openai_url}]
        route = [{"model": "gpt-*", "upstream": ["first"]}, {"model": "*", "upstream": ["every"]}]
        async with inside(tmp_path, http, upstream=upstreams, route=route) as made:
            async with http.post(made.base.url + made.path(path), data=body) as response:
                await response.read()
            (span,) = await made.tape.spans(made.rollout, 1)
    assert (span.upstream, span.error == "unreadable") == (served, served is None)
