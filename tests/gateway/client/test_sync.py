"""The synchronous client: everything that the asynchronous one can, for code that waits."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import closing
from typing import assert_type

import pytest
from fakes.memory_tape import MemoryTape, Serving, call, chat_exchange, serving
from fakes.process import Gateway

from penstock.gateway.client import connection
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.connection import ApiConnection
from penstock.gateway.client.opener import CLIENT_CERT
from penstock.gateway.client.sync import SyncClient
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.rollout import Outcome, RolloutSummary
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Transcript


@pytest.fixture
async def served() -> AsyncGenerator[Serving]:
    tape = MemoryTape()
    for sequence in range(1, 5):
        tape.add(call(sequence, rollout="r1"), chat_exchange([{"role": "user", "content": "hi"}], {"content": "ho"}))
    async with serving(tape) as running:
        yield running


def public(kind: type) -> set[str]:
    return {name for name, found in inspect.getmembers(kind) if callable(found) and not name.startswith("_")}


def test_it_has_every_method_with_its_parameters() -> None:
    assert public(SyncClient) - {"wait", "each"} == public(Client) - public(ApiConnection)
    for name in public(Client) - public(ApiConnection):
        ours, theirs = getattr(SyncClient, name), getattr(Client, name)
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert ours.__doc__ == theirs.__doc__


def test_what_keeps_it_from_beginning_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLIENT_CERT, "/nowhere/client.pem")
    with pytest.raises(ClientError, match=CLIENT_CERT), SyncClient("https://127.0.0.1:1"):
        pass


async def test_it_reads_page_by_page(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PAGE", 3)

    def read() -> None:
        with SyncClient(served.url) as client:
            assert assert_type(client.rollout("r1"), RolloutSummary).totals.calls == 4
            spans = assert_type(client.spans("r1", "a1", limit=4), Generator[Span])
            assert [span.sequence for span in spans] == [1, 2, 3, 4]
            with pytest.raises(ClientError, match="there is no rollout 'none'"):
                client.rollout("none")
            with pytest.raises(ClientError, match="did you mean 'status'"):
                next(client.recent_spans("statsu:ok"))

    await asyncio.to_thread(read)


async def test_a_feed_can_be_left(served: Serving) -> None:
    def follow() -> list[int]:
        with SyncClient(served.url) as client, closing(client.changes(2)) as changes:
            return [next(changes).cursor for _ in range(2)]

    assert await asyncio.to_thread(follow) == [3, 4]


async def test_what_is_left_open_ends_with_the_client(served: Serving) -> None:
    def follow() -> None:
        with SyncClient(served.url) as client:
            changes = client.changes(2)
            assert next(changes).cursor == 3
        with pytest.raises(RuntimeError, match="use `with SyncClient"):
            next(changes)

    await asyncio.to_thread(follow)


async def test_several_threads_may_use_it(served: Serving) -> None:
    def read() -> None:
        found: list[int] = []
        with SyncClient(served.url) as client:
            threads = [
                threading.Thread(target=lambda: found.append(len(list(client.spans("r1", limit=3))))) for _ in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert found == [3] * 8

    await asyncio.to_thread(read)


async def test_it_works_where_a_loop_runs_and_again_after_its_end(gateway: Gateway) -> None:
    client = SyncClient(gateway.url)
    with client:
        _ = client.enqueue([RolloutSpec(id="q1", input={"n": 1})])
    with pytest.raises(RuntimeError, match="use `with SyncClient"):
        client.rollout("q1")
    with client:
        assert client.rollout("q1").input == {"n": 1}
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock"]


async def test_a_wait_can_be_interrupted(gateway: Gateway) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with SyncClient(gateway.url) as client:

            def wait() -> None:
                _ = signal.setitimer(signal.ITIMER_REAL, 0.2)
                _ = next(client.changes())

            with pytest.raises(KeyboardInterrupt):
                wait()
            assert client.queue().state == "open"
    finally:
        _ = signal.signal(signal.SIGALRM, before)


async def test_an_unreachable_gateway_is_an_error_of_the_client() -> None:
    with SyncClient("http://127.0.0.1:9") as client, pytest.raises(ClientError, match="nothing answers there"):
        client.stats()


async def test_a_transcript_is_the_newest_attempt_read(served: Serving) -> None:
    def read() -> Transcript:
        with SyncClient(served.url) as client:
            with pytest.raises(ClientError, match="rollout 'r1' has no attempt 'a7'") as raised:
                client.transcript("r1", "a7")
            assert raised.value.status == 404
            assert client.transcript("r1", "a1", Outcome(exit_code=3)).outcome.exit_code == 3
            return client.transcript("r1")

    transcript = await asyncio.to_thread(read)
    assert [one.span.sequence for one in transcript.calls] == [1, 2, 3, 4]
    assert (transcript.rollout.id, transcript.attempt.id, transcript.text) == ("r1", "a1", "ho")
    assert [message.role for message in transcript.messages] == ["user", "assistant"]
