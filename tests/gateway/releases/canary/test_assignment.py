"""Which arm a rollout gets, whom a release speaks to, and that one rollout stays on one arm, case by case."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.experiment import CANDIDATE, STABLE, policy, prompt
from fakes.some import some
from fakes.transactions import begun, done, link

from penstock.gateway.app import open_store
from penstock.gateway.model.base import Mode
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.release import Pin, Release
from penstock.gateway.model.resource import Audience
from penstock.gateway.releases.canary.outcomes import Requester, are_disjoint, audience_includes, share
from penstock.gateway.releases.operations import PinRequest, ReleaseOperations
from penstock.gateway.releases.reader import ReleaseReader
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.transaction import OperationRefusedError, Transaction
from penstock.gateway.traffic.calls.call_request import CallAddress, CallRequest
from penstock.gateway.traffic.versions import PinTable, ResourceUse
from penstock.gateway.wire.dialects import find
from penstock.gateway.wire.http.redaction import Redactor

PATH = "/v1/chat/completions"
# printf 's\0r1' | sha256sum: the first 16 digits, less the last 11 bits.
SHARES = [
    ("s", "r1", 8596644949549784),
    ("s", "r2", 6846323073941030),
    ("salt 1", "r1", 5847456528461177),
    ("Ω", "task-7", 1610776615988137),
]


@pytest.mark.parametrize(("salt", "rollout", "highest"), SHARES)
def test_a_share_is_what_other_programs_work_out_too(salt: str, rollout: str, highest: int) -> None:
    assert share(salt, rollout) == highest / 2**53


def asker(agent: str = "planner", model: str = "m", mode: Mode = "online", **metadata: Any) -> Requester:
    return Requester(agent, model, mode, metadata)


@pytest.mark.parametrize(
    ("only", "spoken_to", "not_spoken_to"),
    [
        (Audience(), [asker(), asker("", "", "test")], []),
        (Audience(agents=["plan*"]), [asker()], [asker("critic"), asker("")]),
        (Audience(agents=["planner", ""]), [asker(), asker("")], [asker("critic")]),
        (Audience(models=["gpt-?"]), [asker(model="gpt-5")], [asker(), asker(model="gpt-55")]),
        (Audience(modes=["val", "test"]), [asker(mode="val"), asker(mode="test")], [asker(), asker(mode="train")]),
        (Audience(metadata={"team": "a"}), [asker(team="a", more=1)], [asker(), asker(team="b"), asker(TEAM="a")]),
        (Audience(metadata={"team": "a", "n": "1"}), [asker(team="a", n=1)], [asker(team="a"), asker(n=1)]),
        (Audience(metadata={"on": "true"}), [asker(on=True), asker(on="true")], [asker(on=False), asker(on="True")]),
        (Audience(metadata={"none": "null"}), [asker(none=None)], [asker(), asker(none="None")]),
        (Audience(metadata={"none": "None"}), [asker(none="None")], [asker(), asker(none=None)]),
        (Audience(agents=["planner"], modes=["val"]), [asker(mode="val")], [asker(), asker("critic", mode="val")]),
    ],
)
def test_every_restriction_restricts(
    only: Audience, spoken_to: Sequence[Requester], not_spoken_to: Sequence[Requester]
) -> None:
    assert all(audience_includes(only, one) for one in spoken_to)
    assert not any(audience_includes(only, one) for one in not_spoken_to)


@pytest.mark.parametrize(
    ("one", "other", "no_call_is_of_both"),
    [
        (Audience(), Audience(agents=["a"]), False),
        (Audience(agents=["a"]), Audience(agents=["b"]), True),
        (Audience(agents=["a*"]), Audience(agents=["*b"]), False),
        (Audience(modes=["val"]), Audience(modes=["test"]), True),
        (Audience(modes=["val", "test"]), Audience(modes=["test"]), False),
        (Audience(metadata={"team": "a"}), Audience(metadata={"team": "b"}), True),
        (Audience(metadata={"team": "a"}), Audience(metadata={"size": "b"}), False),
    ],
)
def test_audiences_are_apart_only_when_nothing_is_of_both(
    one: Audience, other: Audience, no_call_is_of_both: bool
) -> None:
    assert are_disjoint(one, other) == are_disjoint(other, one) == no_call_is_of_both


# --- pins, on a real tape ---


class Rig:
    """A tape with two versions of a prompt, and a switch whose recorder can be made to fail."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.full = False
        self.metrics = Metrics()
        self.pins = PinTable(
            ReleaseReader(store),
            cast(Recorder, self),
            self.metrics,
            Redactor(),
            asyncio.Future,
            lambda rollout, pins: None,
        )

    def submit(self, do: Callable[[Transaction], Any]) -> Any:
        """As the recorder does it, at once."""
        done = asyncio.get_running_loop().create_future()
        if self.full:
            done.set_exception(TapeError("disk full"))
        else:
            done.set_result(self.do(do))
        return done

    def do(self, operation: Callable[[Transaction], Any]) -> Any:
        return done(self.store, operation)

    def start(self, only: Audience | None = None, split: float = 0.999, candidate: str = "v2") -> Release:
        """A release in its canary."""
        new = Release(
            id="new", resource="travel", kind="prompt", stable="v1", candidate=candidate, policy=policy(),
            salt="s", only=only or Audience(),
        )  # fmt: skip
        made: Release = self.do(lambda transaction: begun(transaction, new, split))
        return made

    def move(self, release: Release, **update: Any) -> Release:
        made: Release = self.do(
            lambda transaction: ReleaseOperations(transaction).change(release.id, None, update, link("x"), 3)
        )
        return made

    def pin(self, agent: str, rollout: str = "r1", given: Sequence[Pin] = ()) -> list[Pin]:
        """The rollout's pins after a call of an agent."""
        wanted = PinRequest(rollout, asker(agent), ("travel",), given)
        made: list[Pin] = self.do(lambda transaction: ReleaseOperations(transaction).pin(wanted, 5))
        return made

    async def call(self, agent: str, rollout: str = "r1", known: bool = True) -> Pin:
        """What the data plane gives to a call. `known`: it has heard of all that was released."""
        if known:
            await self.pins.reload()
        address = CallAddress(rollout, "a1", agent=agent, origin="header", mode="online")
        body = b'{"model": "m"}'
        call = CallRequest(address, find("POST", PATH), PATH, body)
        found = ResourceUse(["travel"], None, None)
        pins = self.pins.pinned(call, found)
        if pins is None:
            pinning = self.pins.pin(call, found, 9)
            # What is remembered of it is so in the next turn of the loop.
            await asyncio.sleep(0)
            try:
                await pinning
            except TapeError as error:
                pins = self.pins.fallback_pins(call, found, error)
            else:
                pins = self.pins.pinned(call, found)
        assert pins is not None
        return pins["travel"]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncGenerator[Rig]:
    with open_store(tmp_path) as store:
        made = Rig(store)
        for version in (prompt(STABLE, sent=True), prompt(CANDIDATE)):
            made.do(
                lambda transaction, version=version: ReleaseOperations(transaction).add_version("travel", version, 1)
            )
        yield made


def only_arm(pins: Sequence[Pin]) -> set[tuple[Any, ...]]:
    return {(pin.release, pin.arm, pin.version, pin.number, pin.probability, pin.mixed) for pin in pins}


async def test_every_agent_of_a_rollout_is_on_its_arm(rig: Rig) -> None:
    release = rig.start()
    rig.pin("planner")
    # The split would now give the other arm to whoever is assigned anew.
    rig.move(release, split=0.0001)
    pins = rig.pin("critic")
    assert [pin.agent for pin in pins] == ["planner", "critic"]
    assert only_arm(pins) == {(release.id, "candidate", "v2", 1, 0.999, False)}
    stored = some(ReleaseReader(rig.store).release(release.id))
    assert stored.assigned == 1


async def test_a_rollout_that_began_before_a_release_takes_no_part(rig: Rig) -> None:
    rig.pin("planner")
    rig.start()
    assert [(pin.agent, pin.version, pin.release) for pin in rig.pin("critic")] == [
        ("planner", "v1", None), ("critic", "v1", None),
    ]  # fmt: skip


async def test_an_agent_that_the_release_does_not_speak_to_is_on_no_arm(rig: Rig) -> None:
    rig.start(Audience(agents=["planner", "critic"]))
    rig.pin("planner")
    rig.pin("writer")
    pins = rig.pin("critic")
    assert [(pin.agent, pin.arm) for pin in pins] == [
        ("planner", "candidate"),
        ("writer", None),
        ("critic", "candidate"),
    ]


async def test_an_agent_that_comes_after_a_promotion_stays_on_its_rollouts_arm(rig: Rig) -> None:
    release = rig.start(split=0.0001)
    rig.pin("planner")
    rig.move(release, stage="promoted")
    assert only_arm(rig.pin("critic")) == {(release.id, "stable", "v1", 1, 0.0001, False)}
    assert rig.pin("critic", "later")[0].version == "v2"


async def test_an_agent_that_comes_after_a_rollback_falls_back_with_its_rollout(rig: Rig) -> None:
    release = rig.start()
    rig.pin("planner")
    rig.move(release, stage="rolled_back", split=0.0)
    planner, critic = rig.pin("critic")
    assert (planner.version, planner.mixed) == ("v2", False), "it has not called since"
    assert (critic.version, critic.mixed) == ("v1", True)
    assert rig.pin("planner")[0].model_copy(update={"agent": "critic"}) == critic


async def test_a_rollout_that_began_while_the_tape_was_full_takes_no_part_when_it_is_back(rig: Rig) -> None:
    rig.start()
    rig.full = True
    assert (await rig.call("planner")).version == "v1"
    rig.full = False
    critic = await rig.call("critic")
    assert (critic.version, critic.arm) == ("v1", None)
    assert (await rig.call("planner")).version == "v1"
    assert [(pin.agent, pin.version) for pin in ReleaseReader(rig.store).pins("r1")] == [
        ("planner", "v1"),
        ("critic", "v1"),
    ]


async def test_what_is_remembered_never_changes_what_the_tape_has(rig: Rig) -> None:
    release = rig.start()
    (first,) = rig.pin("planner")
    other = first.model_copy(update={"version": "v1", "arm": "stable"})
    assert rig.pin("planner", given=[other]) == [first]
    remembered = Pin(resource="travel", agent="critic", version="v2", release=release.id, arm="candidate")
    rig.move(release, stage="rolled_back")
    pins = rig.pin("critic", given=[remembered])
    assert [(pin.agent, pin.version, pin.mixed) for pin in pins] == [("planner", "v2", False), ("critic", "v1", True)]
    assert not remembered.mixed, "the switch's own pins are not written to by the tape's thread"


async def test_an_agent_joins_its_rollouts_arm_while_the_tape_is_full(rig: Rig) -> None:
    rig.start()
    assert (await rig.call("planner")).arm == "candidate"
    rig.full = True
    critic = await rig.call("critic")
    assert (critic.agent, critic.arm, critic.version) == ("critic", "candidate", "v2")
    rig.full = False
    await rig.call("writer")
    assert {(pin.agent, pin.arm) for pin in ReleaseReader(rig.store).pins("r1")} == {
        ("planner", "candidate"), ("critic", "candidate"), ("writer", "candidate"),
    }  # fmt: skip


async def test_a_rollback_reaches_rollouts_while_the_tape_is_full(rig: Rig) -> None:
    release = rig.start()
    await rig.call("planner")
    rig.move(release, stage="rolled_back", split=0.0)
    rig.full = True
    assert (await rig.call("planner")).version == "v1"
    rig.full = False
    critic = await rig.call("critic")
    assert (critic.version, critic.mixed) == ("v1", True)


async def test_what_was_held_before_its_checks_cannot_be_promoted(rig: Rig) -> None:
    new = Release(id="new", resource="travel", kind="prompt", stable="v1", candidate="v2", policy=policy(), salt="s")
    made: Release = rig.do(lambda transaction: ReleaseOperations(transaction).start(new, link("start"), 2))
    rig.move(made, stage="held", held_in="draft")
    with pytest.raises(OperationRefusedError, match="was held in draft: nobody has seen its candidate work yet"):
        rig.move(made, stage="promoted")
    rig.move(made, stage="draft", held_in=None)
    assert ReleaseReader(rig.store).resources()["travel"][0].version == "v1"


async def test_a_prompt_that_is_named_and_not_there_is_counted(rig: Rig) -> None:
    await rig.pins.reload()
    address = CallAddress("r1", "a1", agent="", origin="header", mode="online")
    body = b'{"model": "m", "messages": [{"role": "system", "content": "Hello {{penstock:nobody}}"}]}'
    call = CallRequest(address, find("POST", PATH), PATH, body)
    before = rig.metrics.prompt_misses[("unknown",)]
    assert rig.pins.find(call, None) is None
    assert rig.metrics.prompt_misses[("unknown",)] == before + 1


async def test_a_call_is_given_what_another_process_has_just_registered(rig: Rig) -> None:
    await rig.pins.reload()
    third = prompt("You are a friend. Today is {date}.")
    _ = rig.do(lambda transaction: ReleaseOperations(transaction).add_version("travel", third, 1))
    release = rig.start(candidate="v3")
    pin = await rig.call("a", known=False)
    assert (pin.version, pin.release) == ("v3", release.id)
    assert rig.pins.catalog.has(pin), "it can be written into the call"
