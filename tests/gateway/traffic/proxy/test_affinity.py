"""Upstreams that share a model: the calls of a rollout go to one of them, and elsewhere only while that is down."""

from __future__ import annotations

from time import monotonic

from fakes.faulty import ask, faulty
from fakes.provider import Seen, serving
from fakes.rig import CHAT, Within

ROLLOUTS = [f"r{number}" for number in range(12)]


async def test_a_rollout_stays_where_its_conversation_is(within: Within) -> None:
    async with faulty() as provider:
        upstreams = [{"name": name, "base_url": f"{provider.url}/{name}/v1"} for name in ("primary", "spare")]
        shared = {"model": "*", "upstream": {"primary": 1, "spare": 1}}
        async with within(upstream=upstreams, route=[shared]) as rig:

            async def served(turn: int) -> dict[str, str | None]:
                """Who serves the next call of each rollout."""
                for name in ROLLOUTS:
                    url = f"{rig.base.url}/rollout/{name}/attempt/a1{CHAT}"
                    assert (await ask(rig.tape.http, url, "well")).complete
                return {name: (await rig.tape.spans(name, turn))[-1].upstream for name in ROLLOUTS}

            health = rig.gateway.pools["primary"].health
            homes = await served(1)
            assert set(homes.values()) == {"primary", "spare"}
            assert await served(2) == homes
            health.failed("connect", monotonic() + 3600)  # it rests for longer than the test takes
            assert set((await served(3)).values()) == {"spare"}
            health.answered(monotonic() + 7200)
            assert await served(4) == homes


async def test_a_router_behind_is_told_the_rollout(within: Within) -> None:
    """Unless its agent says something in that header itself; nobody else is told."""
    async with serving() as router, serving() as plain:
        upstreams = [
            {"name": "router", "base_url": router.openai_url, "session_header": "X-Session-ID"},
            {"name": "plain", "base_url": plain.url, "dialect": "anthropic"},
        ]
        async with within(upstream=upstreams) as rig:
            body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
            for below, headers in (("", {}), ("", {"x-session-id": "my-own"}), ("/v1/messages", {})):
                url = rig.base.url + rig.path(below or CHAT)
                async with rig.tape.http.post(url, json=body, headers=headers) as answer:
                    assert answer.status == 200
            told = [("X-Session-ID", rig.rollout)], [("x-session-id", "my-own")]
            assert [sessions(seen) for seen in router.log] == [*told]
            assert [sessions(seen) for seen in plain.log] == [[]]
            await rig.tape.spans(rig.rollout, 3)


def sessions(seen: Seen) -> list[tuple[str, str]]:
    return [(name, value) for name, value in seen.headers if name.lower() == "x-session-id"]
