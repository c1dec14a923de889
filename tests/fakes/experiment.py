"""An agent's traffic through a running release: rollouts of several calls, each with a reward at its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
from fakes import waiting
from fakes.provider import Provider

from penstock.console.commands.verify import verify_release
from penstock.gateway.client.client import Client
from penstock.gateway.model.release import NewRelease, Release, ReleaseView
from penstock.gateway.model.release_policy import CanaryStage, ReleasePolicy
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.model.rollout import Judgement

STABLE = "You are a travel agent of Acme Air. Today is {date}. Never refund a basic fare."
CANDIDATE = "You are a careful travel agent of Acme Air. It is {date}.\nAsk before you book. Never refund a basic fare."
GUARDS = {"margin": 0.3}
"""Few rollouts are enough to see that no guard is worse by so much."""
SKIP = {"checked": "skip", "replayed": "skip", "shadowed": "skip"}


def prompt(text: str, sent: bool = False, version: str | None = None) -> NewVersion:
    """A version of a prompt."""
    return NewVersion(kind="prompt", content={"text": text, "sent": sent}, version=version)


def policy(*splits: float, rollouts: int = 3, **more: object) -> ReleasePolicy:
    """A short ramp without preparation and, unless given, without a holdback."""
    stages = [CanaryStage(split=split, rollouts=rollouts) for split in splits or (0.5,)]
    return ReleasePolicy.model_validate(
        {"stages": stages, "margin_absolute": 0.1, "outcome_deadline_s": 600.0, "horizon": 2000, "guards": GUARDS}
        | {"holdback": {"rollouts": 0}}
        | SKIP
        | more
    )


def names(prefix: str, count: int) -> list[str]:
    """Of so many rollouts."""
    return [f"{prefix}-{number}" for number in range(count)]


def sent(provider: Provider) -> list[str]:
    """System texts that the provider has seen."""
    return [json.loads(seen.body)["messages"][0]["content"] for seen in provider.log]


async def faults(client: Client, release: str) -> list[str]:
    """What `penstock release verify` finds: also of one that moves on meanwhile."""
    return (await verify_release(client, release)).problems


@dataclass
class Traffic:
    """Agents that send the stable prompt by themselves."""

    url: str
    http: aiohttp.ClientSession
    client: Client
    text: str = STABLE.replace("{date}", "Tuesday")
    model: str = "m"
    failures: list[str] = field(default_factory=list[str])
    waved: int = 0

    async def call(self, rollout: str, text: str | None = None, **headers: str) -> dict[str, object]:
        """A call of a rollout; what does not answer 200 is noted."""
        messages = [{"role": "system", "content": text or self.text}, {"role": "user", "content": "Hello"}]
        url = f"{self.url}/rollout/{rollout}/v1/chat/completions"
        async with self.http.post(url, json={"model": self.model, "messages": messages}, headers=headers) as answer:
            if answer.status != 200:
                self.failures.append(f"{answer.status} {await answer.text()}")
                return {}
            return json.loads(await answer.read())

    async def rollout(self, name: str, reward: Callable[[str | None], float | None], calls: int = 2) -> str | None:
        """A whole rollout: its calls, then its reward, which may depend on its arm; the arm."""
        for _ in range(calls):
            await self.call(name)
        pins = await self.client.pins(name)
        arm = pins[0].arm if pins else None
        value = reward(arm)
        if value is not None:
            await self.client.reward(name, "a1", Judgement(value=value))
        return arm

    async def run(
        self, names: list[str], reward: Callable[[str | None], float | None], at_once: int = 8
    ) -> list[str | None]:
        """Rollouts, some of them at the same time; their arms."""
        limit = asyncio.Semaphore(at_once)

        async def one(name: str) -> str | None:
            async with limit:
                return await self.rollout(name, reward)

        return list(await asyncio.gather(*map(one, names)))

    async def waves(
        self,
        release: str,
        reward: Callable[[str | None], float | None],
        over: Callable[[ReleaseView], bool] = lambda view: not view.release.live,
        size: int = 16,
    ) -> ReleaseView:
        """Rollouts, so many at a time, until that holds for the release; by default, until it has ended."""
        view = await self.client.release(release)
        for _ in range(100):
            if over(view):
                return view
            self.waved += 1
            _ = await self.run(names(f"wave{self.waved}", size), reward)
            view = await self.client.release(release)
        raise AssertionError(f"the release is {view}")

    async def start(self, resource: str, candidate: str, how: ReleasePolicy, **more: object) -> Release:
        """Starts a release and comes back when it is in its canary."""
        new = NewRelease.model_validate({"candidate": candidate, "policy": how} | more)
        release = await self.client.start_release(resource, new)
        return (await self.when(release.id, lambda view: view.release.stage == "canary")).release

    async def when(self, release: str, condition: Callable[[ReleaseView], bool]) -> ReleaseView:
        """The release as soon as the condition holds."""
        return await waiting.when(lambda: self.client.release(release), condition, release, pause_s=0.25)
