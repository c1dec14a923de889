"""A link of an audit chain that cannot be read keeps back nothing that follows it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from fakes.experiment import prompt
from fakes.hook import Hook
from fakes.releasing import Bench
from fakes.waiting import until

from penstock.gateway.followers import webhooks
from penstock.gateway.followers.webhooks import WebhookService
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.release import Delivery, Release
from penstock.gateway.model.settings import Webhook
from penstock.gateway.releases.operations import ReleaseOperations
from penstock.gateway.releases.transitions import PERSON_CHANGES, entry
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.feed import ChangeFeed
from penstock.gateway.tape.store.transaction import Transaction


@asynccontextmanager
async def telling(made: Bench, hook: Hook) -> AsyncGenerator[WebhookService]:
    """The webhooks of a gateway, with one that is told of everything."""
    context = made.context
    hooks = [Webhook(name="pager", url=hook.url, secret_env="PAGER_SECRET")]
    feed = ChangeFeed(context.tape.cursor())
    patched = pytest.MonkeyPatch()
    patched.setattr(context.recorder, "_committed", feed.committed)
    webhooks = WebhookService(hooks, context.tape, context.recorder, feed, Metrics(), context.now_ns)
    await webhooks.start()
    try:
        yield webhooks
    finally:
        await webhooks.stop()
        patched.undo()


async def damaged(made: Bench, release: Release) -> None:
    """One more link of its chain, which cannot be read."""

    def abort(tape: Transaction) -> None:
        link = entry("abort", "ann", "it is worse")
        _ = ReleaseOperations(tape).change(
            release.id, None, PERSON_CHANGES["abort"](release), link, made.context.now_ns()
        )
        tape.put("audit", keys.numbered_key(release.id, 2), b"damaged")

    await made.do(abort)


async def add_other(made: Bench) -> None:
    await made.add("other", prompt("You are a helpful librarian. Never lend a rare book.", sent=True))
    await made.add("other", prompt("You are a helpful librarian. Never lend a rare book to anybody."))


@pytest.mark.parametrize("before", [True, False], ids=["before the start", "later"])
async def test_others_are_told_of(made: Bench, hook: Hook, before: bool) -> None:
    await add_other(made)
    async with telling(made, hook) as service:
        bad = await made.release()

        async def is_told() -> bool:
            return [one.status for one in service.reader.newest()] == ["delivered"]

        # What was taken and not written down would be told again.
        await until(is_told)
        if not before:
            await damaged(made, bad)
    if before:
        await damaged(made, bad)
    _ = await made.release("other")
    async with telling(made, hook):
        await hook.until(lambda: len(hook.taken) == 2)
    assert hook.types == ["release.start", "release.start"]
    assert [one.message["data"]["resource"] for one in hook.taken] == ["travel", "other"]


async def test_what_cannot_be_sent_is_given_up(made: Bench, hook: Hook) -> None:
    async with telling(made, hook):
        release = await made.release()
        await hook.until(lambda: len(hook.taken) == 1)
    await made.do(lambda tape: tape.put("audit", keys.numbered_key(release.id, 1), b"damaged"))
    waits = Delivery(number=1, webhook="pager", id="m", event="start", release=release.id, entry=1, made_ns=1)
    await made.do(lambda tape: tape.put("deliveries", keys.number(1), waits.model_dump_json().encode()))
    async with telling(made, hook) as service:

        async def is_given_up() -> bool:
            return [one.status for one in service.reader.newest()] == ["given_up"]

        await until(is_given_up)


async def test_a_delivery_that_cannot_be_read_is_passed_over(
    made: Bench, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "KEPT", 1)
    await add_other(made)
    async with telling(made, hook):
        _ = await made.release()
        await hook.until(lambda: len(hook.taken) == 1)
    await made.do(lambda tape: tape.put("deliveries", keys.number(1), b"damaged"))
    async with telling(made, hook) as service:
        assert [one.name for one in service.views()] == ["pager"]
        _ = await made.release("other")
        await hook.until(lambda: len(hook.taken) == 2)
        assert [one.number for one in service.reader.newest()] == [2]
    await made.do(lambda tape: tape.put("meta", b"note webhooks", b'["gone"]'))
    async with telling(made, hook):
        pass


async def test_a_tape_that_takes_nothing_is_told_of_once(
    made: Bench, hook: Hook, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(webhooks, "RETRY_S", 0.01)
    async with telling(made, hook) as told:
        collect, tries = told._collect, list[int]()

        async def full() -> None:
            tries.append(1)
            if len(tries) < 4:
                raise TapeError("the disk is full")
            await collect()

        monkeypatch.setattr(told, "_collect", full)
        _ = await made.release()
        await hook.until(lambda: len(hook.taken) == 1)
    (said,) = [one.message for one in caplog.records if "wait for the tape" in one.message]
    assert "the disk is full" in said
