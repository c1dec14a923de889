"""Prompt optimisation as a user runs it: a gateway process, scripted models, agents, and `penstock train apo`.

    async with Optimising(tmp_path, gateway, provider, http) as here:
        async with here.agents():
            ended = await here.apo(here.config(budget={"rollouts": 100}))

The models are those of `examples.shop_model`, but the same question always gets the same answer, so that two runs can
be compared. Agents of `agents` are functions in this process: thousands of rollouts cost seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from fakes.preloaded import penstock
from fakes.process import PATHS, ROOT, Gateway
from fakes.provider import Provider
from fakes.settings import Sections, merged, toml
from fakes.workers import beside

from examples import shop, shop_model
from examples.demo.model import DemoAnswer, Json, chat, chat_events, last_text
from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import Claim, ClaimRequest, FinishRequest
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.model.rollout import Judgement
from penstock.gateway.model.span import Span

PATIENCE = 600.0
CHAT = "/v1/chat/completions"
AGENT_KEY = {"OPENAI_API_KEY": "none-needed"}


class Done(NamedTuple):
    """What an agent has done."""

    reward: float | None
    reason: str = ""
    status: str = "succeeded"


class Ended(NamedTuple):
    """A command that has ended."""

    code: int
    output: str
    """Of stdout and stderr."""


def answers(asked: Json) -> DemoAnswer:
    """What the models say: always the same to the same question."""
    draw = random.Random(json.dumps(asked["messages"]))
    question = last_text(asked["messages"], "user")
    if asked["model"] == shop_model.THINKER:
        return DemoAnswer(json.dumps({"hypotheses": shop_model.reflect(question, draw)}))
    return DemoAnswer(shop_model.serve(last_text(asked["messages"], "system"), question, draw))


def weighed(asked: Json, answer: DemoAnswer) -> Json:
    """A chat completion that counts a token for every four characters."""
    made = chat(asked, answer)
    read = sum(len(str(message["content"])) for message in asked["messages"]) // 4
    written = len(answer.text) // 4
    made["usage"] = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return made


@dataclass
class Optimising:
    """A place to run it in."""

    home: Path
    gateway: Gateway
    provider: Provider
    http: aiohttp.ClientSession
    client: Client = field(init=False)

    async def __aenter__(self) -> Optimising:
        self.client = await Client(self.gateway.url).__aenter__()
        self.provider.script = answers
        self.provider.formats = {**self.provider.formats, CHAT: (weighed, chat_events)}
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.__aexit__(None, None, None)

    # The run ----------------------------------------------------------------------------------------------------------

    def config(self, name: str = "shop", of: Sequence[Any] | None = None, **sections: Any) -> Path:
        """An apo.toml in the home. `of`: the tasks, those of the shop unless given; `sections` add to what it has."""
        given = self.home / f"{name}.jsonl"
        given.write_text("".join(json.dumps(one) + "\n" for one in (shop.tasks() if of is None else of)))
        whole: dict[str, dict[str, Any]] = {
            "run": {"name": name, "directory": self.home / f"run-{name}"},
            "texts": {"prompts": ["shop"]},
            "tasks": {"file": given, "key": "customer"},
            "budget": {"rollouts": 160},
            "reflection": {"model": shop_model.THINKER},
            "rollouts": {},
            "test": {"repeats": 1},
        }
        top = {key: value for key, value in sections.items() if not isinstance(value, dict)}
        more: Sections = {name: values for name, values in sections.items() if isinstance(values, dict)}
        path = self.home / f"{name}.toml"
        path.write_text(toml(merged(whole, more), **top))
        return path

    async def register(self, name: str = "shop", text: str = shop.PROMPT) -> None:
        """The prompt that agents send."""
        await self.client.add_version(name, NewVersion(kind="prompt", content={"text": text, "sent": True}))

    async def start(self, *words: str | Path, env: Mapping[str, str] | None = None) -> asyncio.subprocess.Process:
        """`penstock` with these words; its output is one stream."""
        more = (
            {"PENSTOCK_GATEWAY": self.gateway.url, "PYTHONPATH": PATHS, "COLUMNS": "80"} | AGENT_KEY | dict(env or {})
        )
        return await penstock(
            *words,
            cwd=ROOT,
            env=os.environ | more,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )

    async def apo(self, config: Path, *words: str) -> Ended:
        """`penstock train apo`, to its end."""
        return await self.ended(await self.start("train", "apo", config, *words))

    async def ended(self, process: asyncio.subprocess.Process) -> Ended:
        """What a process has said when it ends."""
        try:
            async with asyncio.timeout(PATIENCE):
                output, _ = await process.communicate()
        except BaseException:
            if process.returncode is None:
                process.kill()
            await process.wait()
            raise
        assert process.returncode is not None
        return Ended(process.returncode, output.decode())

    # Agents -----------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def agents(
        self,
        act: Callable[[Claim], Awaitable[Done]] | None = None,
        modes: Sequence[str] = ("train", "val", "test"),
    ) -> AsyncGenerator[None]:
        """Agents that take rollouts of these modes."""

        async def all_of_them() -> None:
            names = [f"w{number}" for number in range(8)]
            await asyncio.gather(*(self._worker(name, act or self.answer, modes) for name in names))

        async with beside(all_of_them()):
            yield

    async def _worker(self, name: str, act: Callable[[Claim], Awaitable[Done]], modes: Sequence[Any]) -> None:
        async with Client(self.gateway.url) as client:
            while True:
                answer = await client.claim(ClaimRequest(worker=name, wait_s=10, modes=list(modes)))
                for claim in answer.claims:
                    done = await act(claim)
                    judged = [] if done.reward is None else [Judgement(value=done.reward, reason=done.reason or None)]
                    asked = FinishRequest.model_validate(
                        {"worker": name, "status": done.status, "rewards": [one.model_dump() for one in judged]}
                    )
                    await client.finish(claim.rollout.id, claim.attempt.id, asked)

    async def ask(self, claim: Claim, system: str, question: str, model: str = shop.MODEL) -> str:
        """A call of an agent."""
        body = {"model": model, "messages": [dict(role="system", content=system), dict(role="user", content=question)]}
        url = f"{self.gateway.url}{claim.address}/v1/chat/completions"
        async with self.http.post(url, json=body, headers={"Authorization": f"Bearer {claim.token}"}) as answer:
            assert answer.status == 200, await answer.text()
            return (await answer.json())["choices"][0]["message"]["content"]

    async def answer(self, claim: Claim) -> Done:
        """What the agent of `examples.shop` does, and its judge."""
        task: dict[str, Any] = claim.rollout.input
        answer = await self.ask(claim, shop.PROMPT.format(date="2026-11-24"), task["question"])
        judged = shop.reward(task, {"answer": answer}, None)
        return Done(judged["reward"], judged["reason"])

    # The tape ---------------------------------------------------------------------------------------------------------

    async def counted(self) -> Counter[str]:
        """Rollouts of runs on the tape, by mode; those of reflections are not among them."""
        return Counter(
            [one.mode async for one in self.client.rollouts() if not one.id.endswith(".reflections")],
        )

    async def reflections(self, run: str = "shop") -> list[Span]:
        """Calls of the reflecting model."""
        return [span async for span in self.client.spans(f"{run}.reflections")]

    async def events(self, run: str = "shop") -> list[str]:
        """What the run has said."""
        return [event.text async for event in self.client.run_events(run)]

    async def seen(self, enough: Callable[[Any], bool]) -> None:
        """Waits for a change on the tape, from its beginning."""
        async with asyncio.timeout(PATIENCE), aclosing(self.client.changes(0)) as changes:
            async for change in changes:
                if enough(change):
                    return
