"""Budgets where several processes serve one port: a refusal is the same whichever of them a client comes to."""

from __future__ import annotations

import json
from pathlib import Path

from fakes.budgets import CHAT as CHAT_BODY
from fakes.budgets import budget, toml
from fakes.gateway_workers import served_by, workers
from fakes.process import running, upstreams
from fakes.provider import serving
from fakes.raw import body_of, post
from fakes.rig import CHAT

BODY = json.dumps(CHAT_BODY).encode()


async def test_every_worker_refuses_in_the_same_words(tmp_path: Path) -> None:
    """What does not fit is said by the first worker, not found out on the tape after a fault."""
    config = toml(budget(name="rollouts", per="rollout", only=["r*"], limit=1), budget(name="day", limit=2))
    async with (
        serving() as provider,
        running(tmp_path, upstreams(openai=provider.openai_url) + config, "--workers", "2") as gateway,
    ):
        pids = workers(gateway.pid)
        async with served_by(gateway, pids[0]) as first, served_by(gateway, pids[1]) as second:
            refused: list[str] = []
            for rollout, fits in (("r1", True), ("r1", False), ("r2", True), ("x", False)):
                for wire in (second,) if fits else (first, second):
                    wire.send(post(f"/rollout/{rollout}/attempt/a1{CHAT}", BODY, host="127.0.0.1"))
                    answer = await wire.message()
                    if fits:
                        assert answer.startswith(b"HTTP/1.1 200"), answer
                    else:
                        assert answer.startswith(b"HTTP/1.1 429"), answer
                        refused.append(json.loads(body_of(answer))["error"]["message"])
        assert "budget 'rollouts' has no room for this call: rollout 'r1' has used 1 call of 1 call" in refused[0]
        assert refused[0] == refused[1]
        assert "budget 'day' has no room for this call: all calls have used 2 calls of 2 calls" in refused[2]
        assert refused[2] == refused[3]
        assert await gateway.terminate() == 0
    assert gateway.log == ""
