"""`make demo-apo`: the prompt of an unmodified agent gets better, without a network, without a key, in two minutes.

    python -m examples.apo_demo [--seed 0]

The models are scripts (`examples.shop_model`). Everything else is the real thing: a gateway, `penstock run` with the
agent of `examples/shop.py`, whose prompt is in its code, `penstock train apo`, and a canary that decides whether
customers get what it has found. A reward is the share of what the shop wants that is in an answer; the test is on
customers that the search has never seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import Final

from examples import shop, shop_model
from examples.demo.demo import DemoError, environment, gateway, run_cli, say
from penstock.console.commands.watch import poll_on_change
from penstock.gateway.client.client import Client
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

[guards]
margin = 0.1

[[stages]]
split = 0.5
rollouts = 20

[holdback]
rollouts = 0
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


SCORE: Final = re.compile(r"nobody has seen: ([0-9.]+) before, ([0-9.]+) with")
BEGIN: Final = """\
An agent answers customers of a shop. Its models are scripts at {model}, and a gateway at {url} stands between. \
Its prompt is in its code, and nobody will change that:"""
ABOUT: Final = """\
The shop wants more than this prompt asks for: a greeting, the order number, the price, the day of arrival and a \
closing line. The agent does not know that; the judge of its answers does. There are {tasks} questions of \
{customers} customers. A search for a better prompt sees some of the customers, its candidates are compared on \
others, and the test at the end is on customers that nobody has seen."""
END: Final = """\
In short: on customers that nobody had seen, {before} of what the shop wants was in an answer before, and \
{after} is with the prompt that was found. The canary has {stage} it: production has {candidate} now, and the \
agent's code is what it was."""


async def demo(seed: int) -> None:
    """The whole demo."""
    with TemporaryDirectory(prefix="penstock-apo-") as given:
        home = Path(given)
        (home / "tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in shop.tasks()))
        (home / "policy.toml").write_text(POLICY)
        (home / "apo.toml").write_text(APO.format(home=home, seed=seed))
        async with shop_model.serving() as model, gateway(home, model) as url, Client(url) as client:
            tell(BEGIN.format(model=model, url=url))
            say(shop.PROMPT)
            tell(ABOUT.format(tasks=len(shop.tasks()), customers=len(shop.ORDERS)))
            await client.add_version("shop", NewVersion(kind="prompt", content={"text": shop.PROMPT, "sent": True}))
            say("$ penstock train apo apo.toml")
            before, after = await search(home, url)
            releases = await client.releases("shop")
            if not releases:
                tell("No prompt is shown to be better, so production keeps the one that it has.")
                return
            release = releases[0]
            tell("What has changed in the prompt:")
            await run_cli(url, "resource", "diff", "shop", release.stable, release.candidate)
            tell(f"New customers come. Half of them get the new prompt, until the release {release.id} decides:")
            await customers(url, client, release.id)
            await run_cli(url, "release", "status", release.id)
            ended = (await client.release(release.id)).release
            tell(END.format(before=before, after=after, stage=ended.stage, candidate=ended.candidate))
    say("Everything is stopped.")


async def search(home: Path, url: str) -> tuple[str, str]:
    """Runs `penstock train apo` and shows what it says; the rewards of the test before and after."""
    found = ("not measured", "not measured")
    words = ("-m", "penstock", "train", "apo", str(home / "apo.toml"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, env=environment(url), stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    async for line in process.stderr:
        text = line.decode().rstrip()
        if shown(text):
            tell(text, "  ")
        if score := SCORE.search(text):
            found = score[1], score[2]
    if await process.wait() != 0:
        raise DemoError("penstock train apo failed; what it said is above")
    return found


def shown(line: str) -> bool:
    """Whether a first reader wants to see it: of its many candidates the command says how often each was tried."""
    return not line.startswith("candidate ") or " is " in line


def tell(text: str, indent: str = "") -> None:
    """A paragraph for 80 columns."""
    lines = wrap(text, 78, initial_indent=indent, subsequent_indent=indent + ("  " if indent else ""))
    say("\n".join(lines)) if not indent else print("\n".join(lines), flush=True)


async def customers(url: str, client: Client, release: str) -> None:
    """Production, until the release has ended."""
    serve = ["--workers", "8", "--callable", "examples.shop:agent", "--preload", "--reward", "examples.shop:reward"]
    tasks = shop.tasks()
    for start in range(0, CUSTOMERS, AT_ONCE):
        names = range(start, start + AT_ONCE)
        specs = [RolloutSpec(id=f"customer-{at}", input=tasks[at % len(tasks)], mode="online") for at in names]
        await client.enqueue(specs)
        print(f"  {await quietly(url, ['run', '--mode', 'online', *serve])}", flush=True)
        looks = poll_on_change(client, lambda: client.release(release), lambda _: 0.2)
        async with asyncio.timeout(PATIENCE), aclosing(looks):
            async for view in looks:
                if not view.release.live or not view.waiting:
                    break
        if not (await client.release(release)).release.live:
            return


async def quietly(url: str, words: Sequence[str]) -> str:
    """Runs a `penstock` command; the last line that it prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", *words),
        env=environment(url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = (await process.communicate())[0].decode()
    if process.returncode != 0:
        raise DemoError(f"penstock {' '.join(words)} failed:\n{output}")
    return output.rstrip().rpartition("\n")[2]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    try:
        asyncio.run(demo(parser.parse_args().seed))
    except DemoError as error:
        raise SystemExit(f"demo-apo: {error}") from None


if __name__ == "__main__":
    main()
