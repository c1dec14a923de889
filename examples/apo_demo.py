"""`make demo-apo`: the prompt of an unmodified agent gets better, without a network, without a key, in two minutes.

    python -m examples.apo_demo [--seed 0]

The models are scripts (`examples.shop_model`). Everything else is the real thing: a gateway, `penstock run` with the
agent of `examples/shop.py`, whose prompt is in its code, `penstock train apo`, and a canary that decides whether
customers get what it has found. What is printed is the reward on customers that the search has never seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from examples import shop, shop_model
from penstock.gateway.cli.watch import whenever
from penstock.gateway.client.client import Client
from penstock.gateway.demo.demo import gateway, run, run_cli, say
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.resource import NewVersion

ROOT: Final = Path(__file__).parents[1]
PATIENCE: Final = 120.0
CUSTOMERS: Final = 240
"""Rollouts of production that the canary sees at most."""
AT_ONCE: Final = 40
POLICY: Final = """\
replayed = "skip"
shadowed = "skip"
margin_absolute = 0.1

[[stages]]
split = 0.5
rollouts = 20
"""
APO: Final = """\
engine = "ours"

[run]
name = "shop"
directory = "{home}/run"
seed = {seed}

[texts]
prompts = ["shop"]

[tasks]
file = "{home}/tasks.jsonl"
key = "customer"

[budget]
rollouts = 320
reflections = 60

[reflection]
model = "thinker"

[rollouts]
run = ["--workers=8", "--callable=examples.shop:agent", "--preload", "--reward=examples.shop:reward"]

[publish]
release = "auto"
policy = "{home}/policy.toml"
"""


async def demo(seed: int) -> None:
    """The whole demo."""
    with TemporaryDirectory(prefix="penstock-apo-") as given:
        home = Path(given)
        (home / "tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in shop.tasks()))
        (home / "policy.toml").write_text(POLICY)
        (home / "apo.toml").write_text(APO.format(home=home, seed=seed))
        async with shop_model.serving() as model, gateway(home, model) as url, Client(url) as client:
            say(
                f"Scripted models at {model}, a gateway in front of them at {url}. The agent's prompt:\n\n{shop.PROMPT}"
            )
            await client.add_version("shop", NewVersion(kind="prompt", content={"text": shop.PROMPT, "sent": True}))
            say("$ penstock train apo apo.toml")
            await run(["-m", "penstock", "train", "apo", str(home / "apo.toml")], {"PENSTOCK_GATEWAY": url})
            (release,) = await client.releases("shop")
            await run_cli(url, "resource", "diff", "shop", release.stable, release.candidate)
            say(f"Customers come, and the release {release.id} decides by their rewards:")
            await customers(url, client, release.id, home)
            await run_cli(url, "release", "status", release.id)
    say("Everything is stopped.")


async def customers(url: str, client: Client, release: str, home: Path) -> None:
    """Production, until the release has ended."""
    serve = ["--workers", "8", "--callable", "examples.shop:agent", "--preload", "--reward", "examples.shop:reward"]
    tasks = shop.tasks()
    for start in range(0, CUSTOMERS, AT_ONCE):
        names = range(start, start + AT_ONCE)
        specs = [RolloutSpec(id=f"customer-{at}", input=tasks[at % len(tasks)], mode="online") for at in names]
        await client.enqueue(specs)
        await run(["-m", "penstock", "run", "--mode", "online", *serve], {"PENSTOCK_GATEWAY": url})
        looks = whenever(client, lambda _: True, lambda: client.release(release), lambda _: 0.2)
        async with asyncio.timeout(PATIENCE), aclosing(looks):
            async for view in looks:
                if not view.release.live or not view.waiting:
                    break
        if not (await client.release(release)).release.live:
            return


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(demo(parser.parse_args().seed))


if __name__ == "__main__":
    main()
