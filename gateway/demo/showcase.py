"""A gateway with something to see on every screen: `python -m penstock.gateway.demo.showcase` holds one until Ctrl-C.

An order desk (`order_desk`) answers customers through it: tasks of the queue in groups of eight tries of which some
fail, calls that were cut off or refused, a prompt in canary and one that was rolled back, training runs, workers, a
server of tools that has changed what it says. All of it is made through the gateway's public face, with the same seed
every time; only the times differ. Tests, recordings and pictures are made of it.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import aiohttp

from penstock.gateway.cli.watch import whenever
from penstock.gateway.client.client import Client
from penstock.gateway.demo.demo import address
from penstock.gateway.demo.order_desk import BUSY, CAREFUL, CUT, LARGE, STABLE, Agent, Desk, desk
from penstock.gateway.demo.tools import PATH
from penstock.gateway.model.audit import Said
from penstock.gateway.model.policy import Policy, Stage
from penstock.gateway.model.queue import ClaimRequest, Event, FinishRequest, HeartbeatRequest, Held, RolloutSpec
from penstock.gateway.model.release import NewRelease, ReleaseView
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.model.rollout import Figures, Judgement, Outcome
from penstock.gateway.model.run import NewRun, Point, RunChange, RunEnd, RunEvent

TRIES: Final = 8
CANARY: Final = 28
"""Rollouts that take part in the canary."""
STEPS: Final = 60
PATIENCE: Final = 30.0
TASKS: Final = {
    "refund-1002": "I want my money back for the chair of order 1002.",
    "where-1001": "Where is my order 1001?",
    "refund-1006": "The clock of order 1006 is broken, I want my money back.",
}
NIGHT: Final = "You answer customers of Acme at night."
"""The prompt of rollouts that take part in no release."""
SKIP: Final = {"checked": "skip", "replayed": "skip", "shadowed": "skip"}
ANNA: Final = Said(who="anna", why="the customer withdrew the order")
CONFIG: Final = """
[[upstream]]
name = "vllm"
dialect = "openai"
base_url = "{url}/v1"

[[upstream]]
name = "spare"
dialect = "openai"
base_url = "{url}/v1"

[mcp.servers.orders]
url = "{url}{path}"
on_change = "hold"

[[policy]]
name = "small-refunds"
server = "orders"
tool = "refund"
argument = [{{ at = "/amount", above = 100 }}]
verdict = "deny"
message = "Refunds above 100 are for people."
"""


@dataclass(slots=True)
class Showcase:
    """A running one."""

    url: str
    client: Client
    http: aiohttp.ClientSession
    desk: Desk
    release: str = ""
    """The release that is in canary."""
    running: str = ""
    """The training run that goes on."""

    def agent(self, rollout: str, attempt: str = "a1", prompt: str = STABLE) -> Agent:
        """An agent that was given the gateway's addresses of one attempt."""
        base = f"{self.url}/rollout/{rollout}/attempt/{attempt}"
        return Agent(self.http, f"{base}/v1", f"{base}/mcp/orders", prompt)


@asynccontextmanager
async def showcase(directory: Path) -> AsyncGenerator[Showcase]:
    """The gateway, its model and its tools, filled; they end with it."""
    async with (
        desk() as served,
        gateway(directory, served.url) as url,
        Client(url) as client,
        aiohttp.ClientSession() as http,
    ):
        made = Showcase(url, client, http, served)
        await fill(made)
        yield made


@asynccontextmanager
async def gateway(home: Path, desk_url: str) -> AsyncGenerator[str]:
    """A gateway process in front of the desk; its address."""
    config = home / "penstock.toml"
    await asyncio.to_thread(config.write_text, CONFIG.format(url=desk_url, path=PATH))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", "serve", "--config", config, "--data", home / "data", "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield await address(process)
    finally:
        if process.returncode is None:
            process.terminate()
        _ = await process.communicate()


async def fill(made: Showcase) -> None:
    """All that there is to see."""
    await resources(made)
    await tasks(made)
    await mishaps(made)
    await releases(made)
    await runs(made)
    await work_in_hand(made)


# -- rollouts ----------------------------------------------------------------------------------------------------------


async def tasks(made: Showcase) -> None:
    """Groups of tries from the queue; a worker runs them."""
    specs = [
        RolloutSpec(id=f"{group}.{one}", input={"question": question}, group=group, metadata={"shop": "acme"})
        for group, question in TASKS.items()
        for one in range(1, TRIES + 1)
    ]
    await made.client.enqueue(specs)
    while claims := (await made.client.claim(ClaimRequest(worker="desk-1", limit=8))).claims:
        await asyncio.gather(*(_try(made, claim.rollout.id, claim.attempt.id, claim.rollout.input) for claim in claims))


async def _try(made: Showcase, rollout: str, attempt: str, task: dict[str, str]) -> None:
    """One try: it succeeds when the money that was given back is that of the article."""
    seed = int(rollout.rpartition(".")[2])
    said = await made.agent(rollout, attempt).answer(task["question"], seed, stream=seed % 2 == 0)
    good = "could not" not in said and bool(said)
    await made.client.add_events(rollout, attempt, [Event(name="stdout", attributes={"text": f"{said}\n"})])
    reason = "the customer got what was asked for" if good else "the whole order was to be refunded, not the article"
    reward = Judgement(value=1.0 if good else 0.0, source="runner", reason=reason)
    outcome = Outcome(exit_code=0 if good else 1, reason=None if good else "exit code 1", output={"answer": said})
    finish = FinishRequest(worker="desk-1", status="succeeded" if good else "failed", outcome=outcome, rewards=[reward])
    await made.client.finish(rollout, attempt, finish)


async def mishaps(made: Showcase) -> None:
    """What goes wrong in production: a busy model, an answer that breaks off, a tool that fails, a sub-agent."""
    question = TASKS["where-1001"]
    await made.agent("busy").answer(question, BUSY, stream=False)
    await made.agent("broken-off").answer(question, CUT, stream=True)
    await made.agent("other-order").answer("Where is my order 1003?", 1, stream=True, model=LARGE)
    base = f"{made.url}/rollout/with-helper/attempt/a1/agent"
    for name in ("planner", "clerk"):
        tools = f"{made.url}/rollout/with-helper/attempt/a1/mcp/orders"
        await Agent(made.http, f"{base}/{name}/v1", tools).answer("Where is my order 1004?", 3, stream=False)
    await made.agent("unknown").answer("Where is my parcel?", 4, stream=False)
    tools = made.agent("wrong-order")
    await tools.tool("lookup_order", {"order": "9999"})
    await made.client.enqueue([RolloutSpec(id="withdrawn", input={"question": question})])
    await made.client.cancel("withdrawn", ANNA)
    made.desk.reworded = True
    await made.agent("after-the-change").answer("Where is my order 1005?", 1, stream=False)


# -- resources and releases --------------------------------------------------------------------------------------------


def _prompt(text: str, version: str, parent: str | None = None, note: str = "") -> NewVersion:
    content = {"text": text, "sent": parent is None}
    return NewVersion(kind="prompt", content=content, version=version, parent=parent, author="anna", note=note)


async def resources(made: Showcase) -> None:
    """Two prompts."""
    client = made.client
    await client.add_version("desk", _prompt(STABLE, "v1"))
    await client.add_version("desk", _prompt(CAREFUL, "v2", "v1", "names the article of a refund"))
    await client.add_version("greeting", _prompt("You greet customers of Acme. Be brief.", "v1"))
    await client.add_version("greeting", _prompt("You greet customers of Acme. Be funny.", "v2", "v1", "more fun"))


async def releases(made: Showcase) -> None:
    """One release was rolled back by a person, another is in its canary and does well."""
    client = made.client
    stages = [Stage(split=0.5, rollouts=60)]
    how = Policy.model_validate(
        {"stages": stages, "margin_absolute": 0.1, "horizon": 400, "alpha_promote": 0.001} | SKIP
    )
    fun = await client.start_release("greeting", NewRelease(candidate="v2", policy=how, author="ben", why="more fun"))
    await _when(client, fun.id, lambda view: view.release.stage == "canary")
    await client.decide(fun.id, "rollback", Said(who="anna", why="two customers found it rude"))
    new = NewRelease(candidate="v2", policy=how, author="anna", why="fewer refunds of whole orders")
    started = await client.start_release("desk", new)
    made.release = started.id
    await _when(client, started.id, lambda view: view.release.stage == "canary")
    names = [f"canary-{number:02}" for number in range(1, CANARY + 1)]
    for at in range(0, CANARY, 4):
        await asyncio.gather(*(canary_rollout(made, name) for name in names[at : at + 4]))
    await _when(client, started.id, lambda view: view.release.assigned >= CANARY and not view.waiting)


async def canary_rollout(made: Showcase, name: str) -> None:
    """A rollout of the canary; the careful prompt does better."""
    draw = random.Random(name)
    await made.agent(name).answer(draw.choice(list(TASKS.values())), draw.choice((1, 3, 4)), stream=draw.random() < 0.5)
    pins = await made.client.pins(name)
    better = any(pin.arm == "candidate" for pin in pins)
    value = 1.0 if draw.random() < (0.9 if better else 0.6) else 0.0
    await made.client.reward(name, "a1", Judgement(value=value, source="judge"))


async def _when(client: Client, release: str, so: Callable[[ReleaseView], bool]) -> None:
    """Waits until a release is as wanted."""
    looks = whenever(client, lambda _: True, lambda: client.release(release), lambda _: 0.2)
    async with asyncio.timeout(PATIENCE), aclosing(looks):
        async for view in looks:
            if so(view):
                return


# -- training ----------------------------------------------------------------------------------------------------------


def _point(step: int, draw: random.Random, dropped: int) -> Point:
    """The metrics of a GRPO step, by the names that `penstock train` reports."""
    share = step / STEPS
    reward = 0.2 + 0.6 * (1 - math.exp(-3 * share)) + draw.gauss(0, 0.05)
    values: dict[str, float | None] = {
        "reward": round(reward, 4),
        "loss": round(0.4 * math.exp(-2 * share) + draw.gauss(0, 0.02), 4),
        "kl": round(0.02 * share + abs(draw.gauss(0, 0.002)), 5),
        "entropy": round(1.6 - 0.7 * share + draw.gauss(0, 0.03), 4),
        "tokens_per_rollout": round(180 + 40 * share + draw.gauss(0, 8), 1),
        "rollouts": 32.0,
        "groups/informative": float(round(4 - 2 * share)),
        "samples": 90.0 - dropped,
        "updates": 2.0,
        "dropped/rollouts_equal": float(round(8 * share)),
        "dropped/samples_long": float(dropped),
        "staleness/mean": round(abs(draw.gauss(0.6, 0.2)), 2),
    }
    if step % 10 == 0:
        values["evaluation/reward"] = round(reward - 0.05, 4)
    return Point(step=step, values=values)


async def runs(made: Showcase) -> None:
    """One run has ended, its successor goes on."""
    client = made.client
    config = {"kind": "grpo", "model": {"path": "models/desk-7b"}, "optimizer": {"lr": 1e-5}, "group_size": 8}
    first = await client.start_run(NewRun(id="grpo-1", kind="grpo", name="first try", config=config, steps=STEPS))
    await _report(client, first.id, STEPS, 1)
    await client.add_run_events(first.id, [RunEvent(step=20, text="published desk-7b@v2"),
                                           RunEvent(step=41, level="warning", text="kl above 0.02")])  # fmt: skip
    await client.finish_run(first.id, RunEnd(status="succeeded", message="all steps done"))
    again = config | {"optimizer": {"lr": 5e-6}, "group_size": 16}
    second = await client.start_run(NewRun(id="grpo-2", kind="grpo", name="half the step", config=again, steps=STEPS))
    await _report(client, second.id, 34, 2)
    await client.change_run(second.id, RunChange(message="collecting step 34"))
    made.running = second.id


async def _report(client: Client, run: str, steps: int, seed: int) -> None:
    draw = random.Random(seed)
    await client.add_points(run, [_point(step, draw, step % 3) for step in range(steps)])


# -- what goes on ------------------------------------------------------------------------------------------------------


async def work_in_hand(made: Showcase) -> None:
    """Workers that work, tasks that wait, an upstream that is held."""
    client = made.client
    waiting = [RolloutSpec(id=f"evening-{n}", input={"question": TASKS["where-1001"]}) for n in range(1, 7)]
    await client.enqueue(waiting)
    for worker, cpu in (("desk-1", 64.0), ("desk-2", 21.5)):
        claims = (await client.claim(ClaimRequest(worker=worker, lease_s=3600.0))).claims
        held = [Held(rollout=claim.rollout.id, attempt=claim.attempt.id) for claim in claims]
        figures = Figures(cpu_percent=cpu, memory_bytes=180 << 20)
        await client.heartbeat(worker, HeartbeatRequest(attempts=held, figures=figures, lease_s=3600.0))
        for claim in claims:
            agent = made.agent(claim.rollout.id, claim.attempt.id, NIGHT)
            await agent.answer(claim.rollout.input["question"], 1, stream=True)
    await client.pause_upstream("spare", 3600.0, Said(who="ben", why="its machine is being moved"))


async def goes_on(made: Showcase) -> None:
    """A few calls and a point of the run every second, until it is cancelled."""
    draw, number = random.Random(7), 0
    while True:
        number += 1
        names = [f"live-{number}.{one}" for one in range(2)]
        await asyncio.gather(*(canary_rollout(made, name) for name in names))
        await made.client.add_points(made.running, [_point(33 + number, draw, number % 3)])
        await asyncio.sleep(1.0)


async def hold() -> None:
    """Shows one until it is interrupted."""
    with TemporaryDirectory(prefix="penstock-showcase-") as home:
        async with showcase(Path(home)) as made:
            print(f"A gateway with work on it: {made.url}\npenstock tui --gateway {made.url}", flush=True)
            await goes_on(made)


def main() -> int:
    """Holds a showcase."""
    with suppress(KeyboardInterrupt):
        asyncio.run(hold())
    return 0


if __name__ == "__main__":
    sys.exit(main())
