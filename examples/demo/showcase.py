"""A gateway with data for every screen: `python -m examples.demo.showcase` runs one until Ctrl-C.

An order desk (`order_desk`) answers customers through it: tasks of the queue in groups of eight tries of which some
fail, calls that were cut off or refused, a prompt in canary and two that were rolled back, training runs, workers, a
server of tools that has changed its definitions, a call that waits for an upstream. All of it is made through the
gateway's public API. Tasks, answers, rewards by arm and metrics are the same every time; times and the arms of rollouts
are not, because a release draws its salt. Tests, recordings and pictures use it.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import aiohttp

from examples.demo.demo import address
from examples.demo.messages_agent import MessagesAgent
from examples.demo.order_desk import BUSY, CUT, LARGE, SLOW, SPARE, DeskAgent, desk
from examples.demo.showcase_parts import PATIENCE, TASKS, Showcase
from examples.demo.showcase_releases import canary_rollout, releases, resources
from examples.demo.showcase_training import SECOND_STEPS, runs, train_on
from examples.demo.tools import PATH
from penstock.console.commands.watch import poll_on_change
from penstock.gateway.client.client import Client
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.queue import ClaimRequest, Event, FinishRequest, HeartbeatRequest, HeldAttempt, RolloutSpec
from penstock.gateway.model.rollout import Judgement, Outcome, RolloutConfig, WorkerUsage

TRIES: Final = 8
NIGHT: Final = "You answer customers of Acme at night."
"""The prompt of rollouts that take part in no release."""
ANNA: Final = ActionRequest(who="anna", why="the customer withdrew the order")
PRICES: Final = """
as_of = {today}

[[price]]
model = "desk-7b"
input = 0.2
output = 0.8
"""
CONFIG: Final = """
prices = "{prices}"

[[upstream]]
name = "vllm"
dialect = "openai"
base_url = "{url}/v1"

[[upstream]]
name = "spare"
dialect = "openai"
base_url = "{url}/v1"

[[upstream]]
name = "anthropic"
dialect = "anthropic"
base_url = "{url}"

[[route]]
model = "spare-*"
upstream = "spare"

[mcp.servers.orders]
url = "{url}{path}"
on_change = "hold"

[[policy]]
name = "small-refunds"
server = "orders"
tool = "refund"
argument = [{{ at = "amount", above = 100 }}]
verdict = "deny"
message = "Refunds above 100 are for people."

[[policy]]
name = "parcels-of-others"
server = "orders"
tool = "shipping_state"
verdict = "ask"
wait = 3600.0
"""


@asynccontextmanager
async def showcase(directory: Path) -> AsyncGenerator[Showcase]:
    """Runs the gateway with all its data, its model and its tools; stops them at the end."""
    async with (
        desk() as served,
        gateway(directory, served.url) as url,
        Client(url) as client,
        aiohttp.ClientSession() as http,
    ):
        made = Showcase(url, client, http, served)
        await fill(made)
        held = (
            asyncio.ensure_future(made.agent("held", prompt=NIGHT).answer(TASKS["where-1001"], 1, False, SPARE)),
            asyncio.ensure_future(made.agent("asks").call_tool("shipping_state", {"order": "1003"})),
        )
        try:
            await wait_for_backlog(made)
            yield made
        finally:
            for one in held:
                one.cancel()
            await asyncio.gather(*held, return_exceptions=True)


@asynccontextmanager
async def gateway(home: Path, desk_url: str) -> AsyncGenerator[str]:
    """Runs a gateway process in front of the desk; yields its address."""
    config = home / "penstock.toml"
    prices = home / "prices.toml"
    await asyncio.to_thread(prices.write_text, PRICES.format(today=date.today().isoformat()))
    await asyncio.to_thread(config.write_text, CONFIG.format(prices=prices, url=desk_url, path=PATH))
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
    """Makes all data of the showcase."""
    await resources(made)
    await tasks(made)
    await make_failures(made)
    await releases(made)
    await runs(made)
    await make_work_in_progress(made)


# -- rollouts ----------------------------------------------------------------------------------------------------------


async def tasks(made: Showcase) -> None:
    """Queues groups of tries, and runs them as a worker."""
    specs = [
        RolloutSpec(id=f"{group}.{one}", input={"question": question}, group=group, metadata={"shop": "acme"})
        for group, question in TASKS.items()
        for one in range(1, TRIES + 1)
    ]
    await made.client.enqueue(specs)
    while claims := (await made.client.claim(ClaimRequest(worker="desk-1", limit=8))).claims:
        await asyncio.gather(*(_try(made, claim.rollout.id, claim.attempt.id, claim.rollout.input) for claim in claims))


async def _try(made: Showcase, rollout: str, attempt: str, task: dict[str, str]) -> None:
    """Runs one try: it succeeds when the amount given back is the price of the article."""
    seed = int(rollout.rpartition(".")[2])
    said = await made.agent(rollout, attempt).answer(task["question"], seed, stream=seed % 2 == 0)
    good = "could not" not in said and bool(said)
    await made.client.add_events(rollout, attempt, [Event(name="stdout", attributes={"text": f"{said}\n"})])
    reason = "the customer got what was asked for" if good else "the whole order was to be refunded, not the article"
    reward = Judgement(value=1.0 if good else 0.0, source="runner", reason=reason)
    outcome = Outcome(exit_code=0 if good else 1, reason=None if good else "exit code 1", output={"answer": said})
    finish = FinishRequest(worker="desk-1", status="succeeded" if good else "failed", outcome=outcome, rewards=[reward])
    await made.client.finish(rollout, attempt, finish)


async def make_failures(made: Showcase) -> None:
    """Makes failures of production: a busy model, an answer that breaks off, a tool that fails; and a sub-agent."""
    question = TASKS["where-1001"]
    await made.agent("busy").answer(question, BUSY, stream=False)
    await made.finish("busy", True, Judgement(value=1.0, source="runner", reason="answered at the second try"))
    await made.agent("broken-off").answer(question, CUT, stream=True)
    await made.finish("broken-off", False, Judgement(value=0.0, source="runner", reason="the answer broke off"))
    await made.agent("other-order").answer("Where is my order 1003?", 1, stream=True, model=LARGE)
    base = f"{made.url}/rollout/with-helper/attempt/a1/agent"
    for name in ("planner", "clerk"):
        tools = f"{made.url}/rollout/with-helper/attempt/a1/mcp/orders"
        await DeskAgent(made.http, f"{base}/{name}/v1", tools).answer("Where is my order 1004?", 3, stream=False)
    await made.agent("unknown").answer("Where is my parcel?", 4, stream=False)
    tools = made.agent("wrong-order")
    await tools.call_tool("lookup_order", {"order": "9999"})
    for name, asked, stream in (("by-night-1", question, True), ("by-night-2", TASKS["refund-1006"], False)):
        address = f"{made.url}/rollout/{name}/attempt/a1"
        said = await MessagesAgent(made.http, address, made.agent(name), NIGHT).answer(asked, stream)
        await made.finish(name, bool(said), Judgement(value=1.0 if said else 0.0, source="runner"))
    await _too_slow(made, question)
    await made.client.enqueue([RolloutSpec(id="withdrawn", input={"question": question})])
    await made.client.cancel("withdrawn", ANNA)
    made.desk.reworded = True
    await made.agent("after-the-change").answer("Where is my order 1005?", 1, stream=False)


async def _too_slow(made: Showcase, question: str) -> None:
    """Makes a try that its worker stopped: the model took longer than the task may."""
    spec = RolloutSpec(id="too-slow", input={"question": question}, config=RolloutConfig(timeout_s=60.0))
    await made.client.enqueue([spec])
    (claim,) = (await made.client.claim(ClaimRequest(worker="desk-1"))).claims
    with suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await made.agent("too-slow", claim.attempt.id, NIGHT).answer(question, SLOW, stream=False)
    outcome = Outcome(reason="no answer in time")
    await made.client.finish(
        "too-slow", claim.attempt.id, FinishRequest(worker="desk-1", status="timeout", outcome=outcome)
    )


# -- work in progress --------------------------------------------------------------------------------------------------


async def make_work_in_progress(made: Showcase) -> None:
    """Makes workers with claims, waiting tasks, and a paused upstream."""
    client = made.client
    waiting = [RolloutSpec(id=f"evening-{n}", input={"question": TASKS["where-1001"]}) for n in range(1, 7)]
    await client.enqueue(waiting)
    for worker, cpu in (("desk-1", 64.0), ("desk-2", 21.5)):
        claims = (await client.claim(ClaimRequest(worker=worker, lease_s=3600.0))).claims
        held = [HeldAttempt(rollout=claim.rollout.id, attempt=claim.attempt.id) for claim in claims]
        figures = WorkerUsage(cpu_percent=cpu, memory_bytes=180 << 20)
        await client.heartbeat(worker, HeartbeatRequest(attempts=held, figures=figures, lease_s=3600.0))
        for claim in claims:
            agent = made.agent(claim.rollout.id, claim.attempt.id, NIGHT)
            await agent.answer(claim.rollout.input["question"], 1, stream=True)
    await client.set_queue("paused", ActionRequest(who="ben", why="the night shift changes"))
    await client.set_queue("open", ActionRequest(who="ben", why="the night shift is there"))
    await client.pause_upstream("spare", 3600.0, ActionRequest(who="ben", why="its machine is being moved"))


async def wait_for_backlog(made: Showcase) -> None:
    """Waits until a call waits for the paused upstream, and one for a person."""
    views = poll_on_change(made.client, made.client.upstreams, lambda _: 0.05)
    async with asyncio.timeout(PATIENCE), aclosing(views):
        async for found in views:
            if any(view.waiting for view in found) and await made.client.waiting():
                return


async def run_traffic(made: Showcase) -> None:
    """Every second makes a few calls, a point of the run and the workers' figures, until it is cancelled."""
    draw, number = random.Random(7), 0
    while True:
        number += 1
        question = draw.choice(list(TASKS.values()))
        await made.agent(f"night-{number}", prompt=NIGHT).answer(question, draw.choice((1, 3, 4)), stream=True)
        # Only one in three takes part in the canary, so that it does not end soon.
        if number % 3 == 0:
            await canary_rollout(made, f"live-{number}")
        await train_on(made, SECOND_STEPS + number - 1, draw)
        for worker in ("desk-1", "desk-2"):
            figures = WorkerUsage(cpu_percent=round(draw.uniform(20, 70), 1), memory_bytes=180 << 20)
            request = HeartbeatRequest(complete=False, figures=figures, lease_s=3600.0)
            await made.client.heartbeat(worker, request)
        await asyncio.sleep(1.0)


async def run_showcase() -> None:
    """Runs a showcase until it is interrupted."""
    with TemporaryDirectory(prefix="penstock-showcase-") as home:
        async with showcase(Path(home)) as made:
            print(f"A gateway with work on it: {made.url}\npenstock tui --gateway {made.url}", flush=True)
            await run_traffic(made)


def main() -> int:
    """Runs a showcase; returns the exit status."""
    with suppress(KeyboardInterrupt):
        asyncio.run(run_showcase())
    return 0


if __name__ == "__main__":
    sys.exit(main())
