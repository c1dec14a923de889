"""What other processes have written is noticed, whatever this one writes meanwhile."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
from fakes.entries import call
from fakes.second_writer import Second

from penstock.gateway.app import open_store
from penstock.gateway.config import TapeSettings
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.process.other_writers import OtherWriters
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.work.dispatcher import Dispatcher


@pytest.fixture
def store(tmp_path: Path) -> Generator[Store]:
    with open_store(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def seconds() -> Generator[list[Second]]:
    """Other processes; the last one lives, unless a test has ended it."""
    made = [Second()]
    yield made
    made[-1].end()


@pytest.fixture
def second(store: Store, seconds: list[Second]) -> Second:
    if seconds[-1].ended:
        seconds.append(Second())
    assert seconds[-1].does("tape", store.path) == "ready"
    return seconds[-1]


class Following:
    """A process that looks when it is told to."""

    def __init__(self, store: Store) -> None:
        self.recorder = Recorder(store, TapeSettings(), Metrics(), lambda cursor, records: None)
        dispatcher = Dispatcher(self.recorder, Metrics(), lambda: 1, False, 60.0)
        self.others = OtherWriters(store, self.recorder, dispatcher, self.followed)
        self.times = 0
        self.failing: Exception | None = None

    async def followed(self) -> None:
        if self.failing is not None:
            raise self.failing
        self.times += 1

    async def look(self) -> int:
        """How often it has followed what was released, since it looked the last time."""
        before = self.times
        self.others.poll(count=True)
        await self.others.stop()
        return self.times - before


@pytest.fixture
async def following(store: Store, second: Second) -> AsyncGenerator[Following]:
    made = Following(store)
    made.recorder.start()
    yield made
    await made.recorder.close()


async def test_a_version_that_is_registered_elsewhere_is_noticed_once(following: Following, second: Second) -> None:
    _ = await following.look()
    second.does("call", "theirs")
    assert await following.look() == 0
    second.does("version", "travel")
    assert [await following.look(), await following.look()] == [1, 0]


async def test_it_is_noticed_also_where_an_own_call_was_written_since(
    following: Following, store: Store, second: Second
) -> None:
    """Every transaction follows the tape: who looks later finds nothing that is new."""
    _ = await following.look()
    second.does("version", "travel")
    await following.recorder.submit(lambda transaction: None)
    assert not store.behind
    assert [await following.look(), await following.look()] == [1, 0]


async def test_what_this_process_releases_is_no_news(following: Following, store: Store, second: Second) -> None:
    _ = await following.look()
    store.write([call("mine")])
    second.does("call", "theirs")
    assert await following.look() == 0


@pytest.mark.parametrize("lives", [True, False])
async def test_where_following_fails_it_is_tried_again(
    following: Following, second: Second, lives: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the other one has ended since: nobody tells of it once more."""
    _ = await following.look()
    second.does("version", "travel")
    following.failing = TapeError("cannot read the tape")
    assert await following.look() == 0
    assert "that is tried again" in caplog.text
    if not lives:
        second.end()
    following.failing = None
    assert [await following.look(), await following.look()] == [1, 0]
