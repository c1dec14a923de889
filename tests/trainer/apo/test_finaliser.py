"""A whole run against a real gateway, with real agents: what it keeps is complete, and agrees with the tape."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("openai", reason="the agent is one on the SDK of OpenAI: pip install '.[demo]'")

from conftest import StartGateway
from fakes.engines import LEAK
from fakes.process import PATHS, upstreams
from fakes.shell import Shell

from examples import shop, shop_model
from penstock.gateway.client.client import Client
from penstock.gateway.model.resource import NewVersion
from penstock.trainer.apo.result import RunResult

# A guard against hanging only: dozens of agents on a machine that may be slow.
pytestmark = pytest.mark.timeout(600)
APO = """\
engine = "fakes.engines:leaks"
run = {name = "shop", directory = "run"}
texts = {prompts = ["shop"]}
tasks = {file = "tasks.jsonl", key = "customer"}
budget = {rollouts = 40}
reflection = {model = "thinker", price = [0.0, 10.0]}
test = {repeats = 1}
publish = {release = "auto"}

[rollouts]
run = ["--workers=4", "--callable=fakes.light_shop:agent", "--preload", "--reward=fakes.light_shop:reward"]
"""


async def test_a_run_keeps_what_it_has_come_to_and_is_over(start_gateway: StartGateway, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in shop.tasks()[::3]))
    (tmp_path / "apo.toml").write_text(APO)
    async with shop_model.serving() as models:
        gateway = await start_gateway(upstreams(openai=f"{models}/v1"))
        shell = Shell(gateway.url, tmp_path)
        shell.patience = 300.0
        shell.env["PYTHONPATH"] = PATHS
        async with Client(gateway.url) as client:
            _ = await client.add_version(
                "shop", NewVersion(kind="prompt", content={"text": shop.PROMPT, "sent": True}, version="v1")
            )
            done = await shell.run("train", "apo", "apo.toml")
            assert done.code == 0, done.err
            kept = RunResult.model_validate_json((tmp_path / "run" / "result.json").read_bytes())
            await check_tape(kept, client)
            check_result(kept)
            assert f"copied from task t0: Ann, in {LEAK!r}" in done.err
            assert "Leak test: 2 found." in done.text
            assert "<h1>shop" in (tmp_path / "run" / "report.html").read_text()
            (release,) = await client.releases("shop")
            assert release.policy.stages[-1].approval, "what leaks waits for a person"
            before = [one.model_dump() async for one in client.rollouts()]
            again = await shell.run("train", "apo", "apo.toml")
            assert again.code == 0, again.err
            assert "shop is over: " in again.err
            assert again.text.splitlines()[:6] == done.text.splitlines()[:6]
            assert [one.id for one in await client.releases("shop")] == [release.id]
            assert [one.model_dump() async for one in client.rollouts()] == before, "nothing runs twice"


def check_result(kept: RunResult) -> None:
    assert kept.winner is not None
    assert (kept.run, kept.seed.versions, kept.placebo) == ("shop", {"shop": "v1"}, False)
    assert kept.winner.versions == {"shop": f"shop.{kept.winner.id}"}
    assert [one.state for one in kept.candidates] == ["seed", "winner"]
    seed, winner = kept.candidates
    assert (winner.parent, winner.claim, len(winner.causes)) == (seed.id, "much is missing", 2)
    assert kept.line_causes[LEAK] == winner.causes
    (raced,) = kept.race
    assert (raced.candidate, raced.state) == (kept.winner.id, "better")
    assert raced.e_value >= raced.needed
    assert raced.pairs == winner.pairs == len(kept.validation) // 2
    tested = Counter((one.candidate, one.task) for one in kept.tests)
    assert tested == {(one, task.id): 1 for one in (seed.id, kept.winner.id) for task in kept.tasks}
    assert [(one.kind, one.line) for one in kept.leaks] == [("task", LEAK), ("grader", LEAK)]
    assert kept.used.reflections == 1
    assert kept.used.tokens > 0
    assert 0 < kept.used.money < kept.used.tokens * 10 / 1e6
    assert any("waits for a person" in one for one in kept.published)


async def check_tape(kept: RunResult, client: Client) -> None:
    run = await client.run("shop")
    assert run.status == "succeeded"
    assert run.message == kept.why
    assert run.tree is not None
    assert [one.id for one in run.tree.candidates] == [one.id for one in kept.candidates]
    assert [one.state for one in run.tree.candidates] == ["seed", "winner"]
    assert kept.winner is not None
    assert [made.version for made in run.made] == [kept.winner.versions["shop"]]
    names = {one.id: one async for one in client.rollouts() if one.id.startswith("shop.") and one.group}
    assert Counter(one.mode for one in names.values()) == kept.used.rollouts
    for one in (*kept.validation, *kept.tests):
        assert names[one.rollout].reward == one.reward
