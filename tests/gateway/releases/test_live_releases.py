"""Releases as agents and people meet them: a real gateway, real calls, rewards, restarts, kills."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from contextlib import suppress
from random import Random
from typing import Any

import aiohttp
import pytest
from fakes.experiment import CANDIDATE, STABLE, Traffic, faults, names, policy, prompt, sent
from fakes.formats import Failure
from fakes.local import KILLED
from fakes.mistakes import tells
from fakes.process import PATIENCE, Gateway
from fakes.provider import Outcome, Provider
from fakes.tape import Tape

from examples.demo.model import decide
from penstock.console.commands.check import examine
from penstock.gateway.client.client import Client
from penstock.gateway.client.connection import ClientError
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.queue import Event
from penstock.gateway.model.release import AuditTrailEntry, NewRelease, Pin, ReleaseView
from penstock.gateway.model.release_policy import CONSTANTS, EARLY, CanaryStage
from penstock.gateway.model.resource import Audience, NewVersion
from penstock.gateway.model.rollout import Judgement
from penstock.gateway.releases.canary.outcomes import share

AGENTS = ("planner", "critic")
ANN = ActionRequest(who="ann")


async def test_without_a_release_the_stable_version_is_sent_and_nothing_changes(
    traffic: Traffic, provider: Provider, tape: Tape
) -> None:
    await traffic.rollout("r1", lambda arm: None)
    assert sent(provider) == [traffic.text] * 2
    spans = await tape.spans("r1", 2)
    assert [(span.versions, span.arm) for span in spans] == [({"travel": "v1"}, None)] * 2


def better(arm: str | None) -> float:
    return 0.95 if arm == "candidate" else 0.05


def worse(arm: str | None) -> float:
    return 0.0 if arm == "candidate" else 1.0


async def test_a_better_candidate_is_promoted(
    traffic: Traffic, provider: Provider, client: Client, tape: Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It climbs the ramp, stays good in the holdback, and every call of a rollout is of one version."""
    monkeypatch.setitem(CONSTANTS["holdback"], "share", 0.3)
    how, splits = policy(0.3, 0.5, holdback={"rollouts": 20}), set[float]()

    def over(view: ReleaseView) -> bool:
        splits.add(view.release.split)
        return not view.release.live

    release = await traffic.start("travel", "v2", how)
    view = await traffic.waves(release.id, better, over, size=8)
    assert (view.release.stage, splits >= {0.3, 0.5, 0.7}) == ("promoted", True), view
    assert view.release.reason.startswith("holdback: no harm after 20 rollouts")
    arms = await traffic.run(names("r", 4), better)
    assert (arms, traffic.failures) == ([None] * 4, [])
    new = CANDIDATE.replace("{date}", "Tuesday")
    assert set(sent(provider)) == {traffic.text, new}
    async for rollout in client.rollouts(""):
        spans = [span for span in await tape.spans(rollout.id, 3) if span.kind == "llm"]
        assert len({json.dumps(span.versions) for span in spans}) == 1
        (pin,) = await client.pins(rollout.id)
        assert {span.arm for span in spans} == {None if pin.arm is None else f"{release.id}:{pin.arm}"}
    assert await faults(client, release.id) == []
    assert (await client.resource("travel")).stable.version == "v2"
    assert sent(provider)[-1] == new


async def test_a_worse_candidate_is_rolled_back_and_its_rollouts_fall_back(
    traffic: Traffic, provider: Provider, client: Client
) -> None:
    release = await traffic.start("travel", "v2", policy(0.5))
    waiting = names("slow", 40)
    for name in waiting:
        await traffic.call(name)
    pinned = {name: (await client.pins(name))[0] for name in waiting}
    on_candidate = [name for name, pin in pinned.items() if pin.arm == "candidate"]
    assert 5 < len(on_candidate) < 35
    for name in waiting:
        # Their first outcomes are awaited: the order is that of the assignment.
        await traffic.client.reward(name, "a1", Judgement(value=0.0 if name in on_candidate else 1.0))
    view = await traffic.waves(release.id, worse)
    assert view.release.stage == "rolled_back"
    assert "harm" in view.release.reason
    before = len(provider.log)
    for name in waiting:
        await traffic.call(name)
    assert set(sent(provider)[before:]) == {traffic.text}
    for name in waiting:
        (pin,) = await client.pins(name)
        assert (pin.version, pin.mixed) == ("v1", name in on_candidate)
    assert traffic.failures == []
    assert await faults(client, release.id) == []


async def test_a_candidate_that_turns_bad_in_the_holdback_is_taken_back(
    traffic: Traffic, provider: Provider, client: Client, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was good on the ramp; then nearly everybody gets it, and it fails."""
    monkeypatch.setitem(CONSTANTS["holdback"], "share", 0.3)
    release = await traffic.start("travel", "v2", policy(0.5, holdback={"rollouts": 300}))
    view = await traffic.waves(release.id, better, lambda view: view.release.split != 0.5)
    assert (view.release.stage, view.release.step, view.release.split) == ("canary", 1, 0.7)
    assert (await client.resource("travel")).stable.version == "v1"
    await gateway.restart()
    view = await traffic.waves(release.id, worse)
    assert view.release.stage == "rolled_back"
    assert view.release.reason.endswith("in the holdback")
    await traffic.call("later")
    assert sent(provider)[-1] == traffic.text
    assert traffic.failures == []
    assert await faults(client, release.id) == []


async def test_a_prompt_may_be_named_by_header_path_or_placeholder(
    traffic: Traffic, provider: Provider, tape: Tape, http: aiohttp.ClientSession, gateway: Gateway, client: Client
) -> None:
    await client.add_version("rules", prompt("Be kind."))
    await traffic.call("r1", "anything", **{"x-penstock-prompt": "rules"})
    await traffic.call("r2/attempt/a1/prompt/rules", "anything")
    await traffic.call("r3", 'Before. {{penstock:travel date="Monday"}} After.')
    travel = STABLE.replace("{date}", "Monday")
    assert sent(provider) == ["Be kind.", "Be kind.", f"Before. {travel} After."]
    assert all(seen.header("x-penstock-prompt") is None for seen in provider.log)
    for name, resource in (("r1", "rules"), ("r2", "rules"), ("r3", "travel")):
        (span,) = await tape.spans(name, 1)
        assert span.versions == {resource: "v1"}
        assert list((span.attributes or {})["penstock.prompts.sha256"]) == [resource]


async def test_what_is_not_recognised_passes_untouched_and_is_counted(
    traffic: Traffic, provider: Provider, tape: Tape, gateway: Gateway, http: aiohttp.ClientSession
) -> None:
    await traffic.call("r1", "Something else entirely.")
    (span,) = await tape.spans("r1", 1)
    assert (span.versions, sent(provider)) == (None, ["Something else entirely."])
    async with http.get(gateway.url + "/metrics") as answer:
        assert 'penstock_prompt_misses_total{why="miss"} 1.0' in await answer.text()


async def test_a_release_for_one_agent_leaves_the_others_alone(
    traffic: Traffic, provider: Provider, client: Client, tape: Tape
) -> None:
    only = {"agents": ["planner"]}
    release = await traffic.start("travel", "v2", policy(0.5), only=only)
    for name in names("r", 20):
        await traffic.call(f"{name}/agent/planner")
        await traffic.call(f"{name}/agent/critic")
    for name in names("r", 20):
        found = {pin.agent: pin for pin in await client.pins(name)}
        assert found["planner"].release == release.id
        assert (found["critic"].version, found["critic"].release) == ("v1", None)
    with pytest.raises(ClientError, match="is live for the same calls"):
        await traffic.start("travel", "v2", policy(0.5))
    await client.decide(release.id, "promote", ActionRequest(who="ann", why="planners like it"))
    await traffic.call("later/agent/planner")
    await traffic.call("later/agent/critic")
    assert [(await tape.spans("later", 2))[at].versions for at in (0, 1)] == [{"travel": "v2"}, {"travel": "v1"}]


async def test_people_hold_resume_approve_and_their_names_are_kept(traffic: Traffic, client: Client) -> None:
    steps = policy(0.5).model_copy(update={"stages": [CanaryStage(split=0.5, rollouts=1, approval=True)]})
    release = await traffic.start("travel", "v2", steps)
    await client.decide(release.id, "hold", ActionRequest(who="ann", why="a holiday"))
    await traffic.rollout("r-held", lambda arm: 1.0)
    assert (await client.pins("r-held"))[0].release is None
    await client.decide(release.id, "resume", ANN)
    _ = await traffic.waves(release.id, better, lambda view: view.release.waits == "approval")
    await client.decide(release.id, "approve", ActionRequest(who="bob", why="looks good"))
    view = await traffic.when(release.id, lambda view: not view.release.live)
    assert view.release.stage == "promoted"
    said = [(entry.who, entry.action) for entry in await client.audit(release.id)]
    assert [it for it in said if it[0] != "gateway"] == [
        ("api", "start"),
        ("ann", "hold"),
        ("ann", "resume"),
        ("bob", "approve"),
    ]
    assert said[-1] == ("gateway", "promote")
    assert await faults(client, release.id) == []


async def test_a_hard_violation_on_the_candidate_ends_it_at_once(traffic: Traffic, client: Client) -> None:
    release = await traffic.start("travel", "v2", policy(0.5))
    arms = {name: await traffic.rollout(name, lambda arm: None) for name in names("r", 20)}
    good = next(name for name, arm in arms.items() if arm == "stable")
    bad = next(name for name, arm in arms.items() if arm == "candidate")
    await client.add_events(good, "a1", [Event(name="violation", attributes={"hard": True})])
    assert (await client.release(release.id)).release.live
    await client.add_events(bad, "a1", [Event(name="violation", attributes={"hard": True})])
    view = await client.release(release.id)
    assert view.release.stage == "rolled_back"
    assert "violations" in view.release.reason
    assert await faults(client, release.id) == []


async def test_a_candidate_whose_every_call_fails_is_rolled_back_while_no_reward_ever_comes(
    traffic: Traffic, provider: Provider, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outcomes are awaited for ten minutes here; errors are seen within the early guard's seconds. There are some of
    these: a call of the candidate must have failed by then, also where the machine stands still meanwhile."""

    def fails_candidates(request: dict[str, Any]) -> Outcome:
        careful = "careful" in request["messages"][0]["content"]
        return Failure(500, "out of order") if careful else decide(request)

    provider.script = fails_candidates
    monkeypatch.setitem(CONSTANTS["guards"], EARLY, {"alpha": 0.005, "deadline_s": 8.0})
    release = await traffic.start("travel", "v2", policy(0.2))
    _ = await traffic.waves(release.id, lambda arm: None, lambda view: not view.release.live or traffic.waved == 5)
    view = await traffic.when(release.id, lambda view: not view.release.live)
    assert view.release.stage == "rolled_back"
    assert view.release.reason.startswith("guard early_error: e = ")
    assert (view.release.counted, view.waiting) == (0, view.release.assigned)
    assert view.waiting_early == view.release.assigned - view.release.early
    assert 3 <= view.figures["candidate.early"] <= 10
    assert (view.figures["candidate.early_error"], view.figures["stable.early_error"]) == (0.0, 1.0)
    before = len(provider.log)
    await traffic.call("later")
    assert sent(provider)[before:] == [traffic.text]
    assert await faults(client, release.id) == []


async def test_another_of_the_name_of_a_forgotten_rollout_is_given_its_own(
    traffic: Traffic, client: Client, gateway: Gateway
) -> None:
    release = await traffic.start("travel", "v2", policy(0.5))
    arms = await traffic.run(names("r", 60), worse)
    _ = await traffic.when(release.id, lambda view: not view.release.live)
    counted = {one.rollout for one in [seen async for _, seen in client.assignments(release.id)] if one is not None}
    going = [name for name, arm in zip(names("r", 60), arms, strict=True) if arm == "candidate" and name in counted][:3]
    for name in going:
        await client.cancel(name)
        await client.forget(name)
    assert await faults(client, release.id) == []
    for name in going[1:]:
        await traffic.call(name)
        gone, mine = await client.pins(name)
        assert (gone.release, gone.arm, gone.forgotten) == (release.id, "candidate", True)
        assert (mine.release, mine.version, mine.mixed, mine.forgotten) == (None, "v1", False, False)
    again = await traffic.start("travel", "v2", policy(0.5))
    await traffic.call(going[0])
    _, mine = await client.pins(going[0])
    assert (mine.release, mine.forgotten) == (again.id, False)
    for one in (release, again):
        assert await faults(client, one.id) == []
    _ = await gateway.terminate()
    assert examine(gateway.data)[1] == []


async def test_the_name_of_a_forgotten_rollout_may_take_part_once_more(
    traffic: Traffic, client: Client, gateway: Gateway
) -> None:
    release = await traffic.start("travel", "v2", policy(0.5, rollouts=1000))
    _ = await traffic.run(names("r", 6), lambda arm: 1.0)
    _ = await traffic.when(release.id, lambda view: view.release.counted == 6)
    await client.cancel("r-0")
    await client.forget("r-0")
    _ = await traffic.run(["r-0"], lambda arm: 1.0)
    _ = await traffic.when(release.id, lambda view: view.release.counted == 7)
    gone, mine = await client.pins("r-0")
    assert (gone.forgotten, mine.forgotten, mine.release, mine.number) == (True, False, release.id, 7)
    assert await faults(client, release.id) == []
    _ = await gateway.terminate()
    assert examine(gateway.data)[1] == []


async def test_wrong_input_is_refused_by_name(traffic: Traffic, client: Client) -> None:
    for name, new, message in (
        ("travel", prompt("No slots here, but long enough."), r"missing \{date\}"),
        ("travel", NewVersion(kind="model", content={"upstream": "fake-openai", "base": "m"}), "cannot be a model"),
        ("m", NewVersion(kind="model", content={"upstream": "nowhere", "base": "m"}), "nowhere.* is not configured"),
        ("travel", NewVersion(kind="prompt", version="v1", content={"text": "{date} else"}), "versions never change"),
        ("travel", NewVersion(kind="prompt", parent="v9", content={"text": "{date} else"}), "has no version 'v9'"),
    ):
        with pytest.raises(ClientError, match=message):
            await client.add_version(name, new)
    with pytest.raises(ClientError, match="no version 'v7'"):
        await client.start_release("travel", NewRelease(candidate="v7", policy=policy()))
    with pytest.raises(ClientError, match="is the stable version already"):
        await client.start_release("travel", NewRelease(candidate="v1", policy=policy()))
    with pytest.raises(ClientError, match="no reward of it has been recorded"):
        await client.start_release("travel", NewRelease(candidate="v2"))
    with pytest.raises(ClientError, match="there is no release"):
        await client.decide("travel-9", "hold", ActionRequest())
    assert (await client.add_version("travel", prompt(CANDIDATE))).version == "v2"


@pytest.mark.slow
@KILLED
@pytest.mark.smoke
async def test_a_kill_in_the_middle_of_transitions_leaves_no_rollout_between_two_versions(
    traffic: Traffic, gateway: Gateway, client: Client
) -> None:
    """The gateway is killed while people change releases and agents call; whatever was answered before holds after."""
    rng = Random(11)
    seen: dict[str, Pin] = {}
    steps = 0

    async def call(name: str) -> None:
        with suppress(aiohttp.ClientError, ClientError):
            await traffic.call(name)
            seen[name] = (await client.pins(name))[0]

    async def change() -> None:
        """One release after the other, each taken back."""
        nonlocal steps
        with suppress(ClientError, AssertionError):
            while True:
                release = await traffic.start("travel", "v2", policy(0.3, 0.6))
                for action in ("hold", "resume", "rollback"):
                    steps += 1
                    await client.decide(release.id, action, ANN)

    for life in range(3):
        running = asyncio.ensure_future(change())
        calls = [asyncio.ensure_future(call(f"{life}-{number}")) for number in range(30)]
        due = steps + rng.randint(2, 9)
        async with asyncio.timeout(PATIENCE):
            while steps < due:  # noqa: ASYNC110 - a step is under way then
                await asyncio.sleep(0.001)
        await gateway.kill()
        _ = await asyncio.gather(running, *calls)
        await gateway.start(gateway.port)
        for release in await client.releases(live=True):
            await client.decide(release.id, "rollback", ANN)
    for name, pin in seen.items():
        (now,) = await client.pins(name)
        assert (now.release, now.arm, now.number) == (pin.release, pin.arm, pin.number)
        assert now.version == pin.version
    for release in await client.releases():
        assert release.stage == "rolled_back"
        assert await faults(client, release.id) == []
    _ = await gateway.terminate()
    assert examine(gateway.data)[1] == []


async def test_weights_are_sent_by_the_name_of_their_version(
    gateway: Gateway, client: Client, provider: Provider, tape: Tape, http: aiohttp.ClientSession
) -> None:
    for base in ("one", "two"):
        content = {"upstream": "fake-openai", "base": base}
        await client.add_version("policy", NewVersion(kind="model", content=content))
    traffic = Traffic(gateway.url, http, client, model="policy")
    release = await traffic.start("policy", "v2", policy(0.5))
    arms = await traffic.run(names("r", 20), lambda arm: 1.0)
    assert {seen.model for seen in provider.log} == {"one", "two"}
    for name, arm in zip(names("r", 20), arms, strict=True):
        for span in (await tape.spans(name, 3))[:2]:
            assert span.model == "policy"
            assert span.versions == {"policy": "v2" if arm == "candidate" else "v1"}
    await client.decide(release.id, "promote", ActionRequest(who="ann", why="it is better"))
    await traffic.call("later")
    assert provider.log[-1].model == "two"
    with pytest.raises(ClientError, match="has ended"):
        await client.decide(release.id, "hold", ANN)


async def test_a_candidate_that_agents_send_too_must_keep_the_slots(traffic: Traffic, client: Client) -> None:
    """Agents may send whatever they like; what takes another text's place must have its slots."""
    await client.add_version("travel", prompt("Agents send this as well, without a date.", sent=True))
    new = NewRelease(candidate="v3", policy=policy(0.5, checked="required"))
    release = await client.start_release("travel", new)
    view = await traffic.when(release.id, lambda view: not view.release.live)
    assert view.release.stage == "rolled_back"
    assert tells(view.release.reason, "its slots", "stable version", "missing {date}")
    (check_entry,) = [entry for entry in await client.audit(release.id) if entry.action == "roll_back"]
    assert check_entry.evidence["ok"] is False


async def test_a_tool_text_that_no_agent_is_known_to_send_is_not_released(traffic: Traffic, client: Client) -> None:
    """Nothing would ever be rewritten, and the release would wait for ever."""
    for text in ("Looks things up.", "Looks things up quickly."):
        content = {"tool": "lookup", "text": text}
        await client.add_version("lookup-text", NewVersion(kind="tool-text", content=content))
    new = NewRelease(candidate="v2", policy=policy(0.5, checked="required"))
    release = await client.start_release("lookup-text", new)
    view = await traffic.when(release.id, lambda view: not view.release.live)
    assert view.release.stage == "rolled_back"
    assert tells(view.release.reason, "check: no version of lookup-text", "`penstock resource")


async def test_a_prompt_that_only_named_calls_get_is_released_and_says_so(traffic: Traffic, client: Client) -> None:
    for text in ("You are a planner. Plan well.", "You are a planner. Plan very well."):
        await client.add_version("planner", prompt(text))
    new = NewRelease(candidate="v2", policy=policy(1 - 1e-9, checked="required"))
    release = await client.start_release("planner", new)
    await traffic.when(release.id, lambda view: view.release.stage == "canary")
    (entry,) = [entry for entry in await client.audit(release.id) if entry.action == "check"]
    assert tells(entry.why, "(--sent)", "only calls that name it")
    await traffic.call("r1", "You are a planner. Plan well.", **{"x-penstock-prompt": "planner"})
    assert (await client.pins("r1"))[0].version == "v2"


async def test_a_forecast_is_made_of_what_the_stable_version_did_before_the_start(
    traffic: Traffic, client: Client
) -> None:
    for number, name in enumerate(names("before", 40)):
        await traffic.rollout(name, lambda arm, good=number % 4 > 0: float(good), calls=1)
    release = await traffic.start("travel", "v2", policy(0.5, margin_absolute=None, guards={"margin": 0.1}))
    assert (release.baseline, release.margin) == (0.75, pytest.approx(0.075))
    found = await client.forecast(release.id)
    assert (found.past, found.mean) == (40, 0.75)
    assert found.rollouts is not None
    assert found.per_day is not None
    assert found.days == pytest.approx(found.rollouts / found.per_day)
    assert found.promoted is not None
    assert found.promoted > 0.5
    # What happens after the start does not change it.
    _ = await traffic.run(names("after", 20), lambda arm: 0.0)
    assert await client.forecast(release.id) == found
    with pytest.raises(ClientError, match="there is no release"):
        await client.forecast("travel-9")


async def test_missing_rewards_are_warned_of_and_count_as_the_worst_where_the_policy_says_so(
    traffic: Traffic, client: Client
) -> None:
    """Only successes are told, and the candidate never succeeds. They are told before a rollout takes part, so that
    none comes after its deadline."""
    how = policy(0.5, missing="worst", missing_limit=1.0, outcome_deadline_s=1.0)
    release = await traffic.start("travel", "v2", how)
    for at in range(0, 400, 40):
        every = names(f"r{at}", 40)
        await asyncio.gather(*(traffic.call(name, "A text that nobody has registered.") for name in every))
        for name in every:
            if share(release.salt, name) >= 0.5:
                await client.reward(name, "a1", Judgement(value=1.0))
        await asyncio.gather(*map(traffic.call, every))
        if not (await client.release(release.id)).release.live:
            break
    view = await traffic.when(release.id, lambda view: not view.release.live)
    assert (view.release.stage, view.release.reason.split(":")[0]) == ("rolled_back", "harm")
    assert (view.figures["candidate.reward"], view.figures["stable.reward"]) == (0.0, 1.0)
    assert view.figures["candidate.missing"] == view.figures["candidate.assigned"]
    assert await faults(client, release.id) == []


@pytest.mark.slow
@KILLED
async def test_what_the_provider_got_of_a_rollout_is_one_version_whatever_happens(
    traffic: Traffic, gateway: Gateway, provider: Provider, client: Client
) -> None:
    """Two agents, through a ramp, a kill, a promotion, and the next release that takes it all back."""
    every = [f"{name}-{agent}" for name in "abcd" for agent in range(12)]

    async def call(name: str, agent: str) -> None:
        # Its own name is in the slot, so that the provider's log tells whose call it was.
        await traffic.call(f"{name}/agent/{agent}", STABLE.replace("{date}", name))

    async def wave(agents: tuple[str, ...], known: int) -> None:
        await asyncio.gather(*(call(name, agent) for name in every[:known] for agent in agents))

    release = await traffic.start("travel", "v2", policy(0.4, 0.6, rollouts=1))
    await wave(AGENTS[:1], 12)
    await gateway.kill()
    await gateway.start(gateway.port)
    await wave(AGENTS, 24)
    await client.decide(release.id, "promote", ANN)
    await wave(AGENTS[::-1], 36)
    back = await traffic.start("travel", "v1", policy(0.5))
    await wave(AGENTS, 48)
    await client.decide(back.id, "abort", ANN)
    await wave(AGENTS, 48)
    assert traffic.failures == []
    got = defaultdict[str, set[str]](set)
    for text in sent(provider):
        for name in every:
            for version, template in (("v1", STABLE), ("v2", CANDIDATE)):
                if text == template.replace("{date}", name):
                    got[name].add(version)
    assert got.keys() == set(every)
    assert {name: versions for name, versions in got.items() if len(versions) > 1} == {}
    for name in every:
        assert got[name] == {pin.version for pin in await client.pins(name)}
    assert {"v1", "v2"} == set().union(*(got[name] for name in every[:24])), "both arms were used"
    assert {"v2"} == set().union(*(got[name] for name in every[24:36])), "they began after the promotion"
    assert await faults(client, release.id) == []
    assert await faults(client, back.id) == []


async def test_agents_that_call_at_the_same_time_are_on_one_arm(traffic: Traffic, client: Client) -> None:
    await traffic.start("travel", "v2", policy(0.5))
    every = [f"{name}/agent/{agent}" for agent in ("a", "b", "c") for name in names("r", 20)]
    await asyncio.gather(*(traffic.call(one) for one in every * 3))
    assert traffic.failures == []
    for name in names("r", 20):
        pins = await client.pins(name)
        assert len(pins) == 3
        assert len({(pin.arm, pin.number, pin.version) for pin in pins}) == 1
    assert (await client.release("travel-1")).release.assigned == 20


async def test_two_releases_are_assigned_independently(traffic: Traffic, client: Client) -> None:
    rules = "Be kind and short to everybody."
    await client.add_version("rules", prompt(rules, sent=True))
    await client.add_version("rules", prompt("Be kinder."))
    await traffic.start("travel", "v2", policy(0.5))
    await traffic.start("rules", "v2", policy(0.5))
    both: set[tuple[str | None, ...]] = set()
    for name in names("r", 48):
        await traffic.call(name)
        await traffic.call(name, rules)
        both.add(tuple(pin.arm for pin in await client.pins(name)))
    assert len(both) == 4


def last(entries: list[AuditTrailEntry], action: str) -> AuditTrailEntry:
    return next(entry for entry in reversed(entries) if entry.action == action)


async def test_what_a_person_decides_has_the_evidence_of_the_moment(traffic: Traffic, client: Client) -> None:
    release = await traffic.start("travel", "v2", policy(0.5, margin_absolute=0.01))
    _ = await traffic.run(names("r", 30), lambda arm: 0.5)
    await traffic.call("awaited")
    view = await traffic.when(release.id, lambda view: view.release.counted == 30)
    assert (view.oldest, view.rewarded) == ("awaited", int(view.figures["candidate.assigned"]))
    await client.decide(release.id, "hold", ANN)
    await client.decide(release.id, "resume", ANN)
    _ = await traffic.run(names("s", 5), lambda arm: 0.5)
    await client.decide(release.id, "promote", ANN)
    entries = await client.audit(release.id)
    held = last(entries, "hold")
    assert (held.assignment, held.evidence) == (30, view.figures | {"split": 0.5})
    promoted = last(entries, "promote")
    assert promoted.evidence["seen"] == promoted.assignment == 30, "the outcome of the oldest is awaited"
    assert promoted.split == 0.0
    assert promoted.evidence["split"] == 0.5
    assert last(entries, "start").evidence == {}
    assert await faults(client, release.id) == []


async def test_before_the_canary_there_is_no_evidence(traffic: Traffic, client: Client) -> None:
    how = policy(0.5, shadowed="required")
    release = await client.start_release("travel", NewRelease(candidate="v2", policy=how))
    await traffic.when(release.id, lambda view: view.doing == "shadow")
    await client.decide(release.id, "abort", ANN)
    assert last(await client.audit(release.id), "abort").evidence == {}
    assert await faults(client, release.id) == []


async def test_what_cannot_be_done_is_refused_with_what_can(traffic: Traffic, client: Client) -> None:
    stages = {"stages": [CanaryStage(split=0.5, rollouts=1, approval=True)]}
    release = await traffic.start("travel", "v2", policy(0.5).model_copy(update=stages))
    with pytest.raises(ClientError, match=r"travel-1 \(canary\) does not wait for approval: there is nothing"):
        await client.decide(release.id, "approve", ANN)
    await client.decide(release.id, "hold", ANN)
    with pytest.raises(ClientError, match="is held already: resume, promote, rollback or abort it"):
        await client.decide(release.id, "hold", ANN)
    await client.decide(release.id, "promote", ANN)
    with pytest.raises(ClientError, match="penstock release start travel --candidate v1 takes it back"):
        await client.decide(release.id, "rollback", ANN)
    only = Audience(agents=["the planner"], metadata={"team": "a"})
    other = await traffic.start("travel", "v1", policy(0.5), only=only.model_dump())
    await client.decide(other.id, "promote", ANN)
    again = "--candidate v2 --only 'agent=the planner' --only metadata.team=a takes it back"
    with pytest.raises(ClientError, match=again):
        await client.decide(other.id, "rollback", ANN)
