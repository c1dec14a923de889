"""What is shown live, asked of a gateway: digests, rows by id, the filter language, and answers with gzip."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import time
import zlib
from contextlib import aclosing

import aiohttp
import pytest
from conftest import StartGateway
from fakes.local import Local
from fakes.process import PATIENCE
from fakes.provider import Provider

from penstock.gateway.api.compression import LEAST, GzipFeed, accepts_gzip
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.sync import SyncClient
from penstock.gateway.model.answers import Digest, RolloutPage
from penstock.gateway.model.queue import ClaimRequest, Event, RolloutSpec
from penstock.gateway.model.rollout import RolloutStatus
from penstock.gateway.reading.filter_fields import Target, describe_fields
from penstock.gateway.reading.filters import parse

GZIP = {"Accept-Encoding": "gzip"}


async def queued(client: Client, count: int, **spec: object) -> list[str]:
    specs = [RolloutSpec.model_validate(spec) for _ in range(count)]
    return [one.id for one in await client.enqueue(specs)]


async def until(client: Client, since: int, every_s: float, end: int) -> list[Digest]:
    found = list[Digest]()
    async with asyncio.timeout(PATIENCE), aclosing(client.digests(since, every_s)) as feed:
        async for digest in feed:
            found.append(digest)
            if digest.cursor >= end:
                break
    return found


# What a judge reads -------------------------------------------------------------------------------------------------


async def test_a_transcript_has_every_call_that_has_ended(
    client: Client, local: Local, http: aiohttp.ClientSession
) -> None:
    """A runner asks for it as soon as its agent has had the last answer, which need not be on the tape yet."""
    for count in range(1, 21):
        await local.ask(http, "r1")
        calls = (await client.transcript("r1", "a1")).calls
        assert (len(calls), all(call.turn is not None for call in calls)) == (count, True)


# A feed of what is wanted ---------------------------------------------------------------------------------------------


async def test_a_follower_gets_what_it_wants_and_where_it_stands(client: Client) -> None:
    since = (await client.stats(0)).cursor
    mine = [spec.id for spec in await client.enqueue([RolloutSpec(id=f"mine-{at}") for at in range(3)])]
    _ = await queued(client, 3)
    for one in (mine[2], mine[0]):
        _ = await client.cancel(one)
    feed = client.changes(since, ["rollout"], ["mine-*"], [RolloutStatus.CANCELLED])
    async with asyncio.timeout(PATIENCE), aclosing(feed) as changes:
        # A rollout is told as it stands now and once, so its creation comes first.
        first = [await anext(changes) for _ in range(2)]
        _ = await client.cancel(mine[1])
        last = await anext(changes)
    assert {change.rollout.id for change in first if change.rollout} == {mine[0], mine[2]}
    assert last.rollout is not None
    assert (last.rollout.id, last.rollout.status) == (mine[1], "cancelled")
    # It goes on from any cursor of the whole feed.
    async with asyncio.timeout(PATIENCE), aclosing(client.changes(since, names=[mine[1]])) as changes:
        assert {(await anext(changes)).kind for _ in range(2)} == {"rollout"}


async def test_what_cannot_be_wanted_is_refused(local: Local, http: aiohttp.ClientSession) -> None:
    for query, field in (
        ("kind=rollout,thing", "kind"),
        ("name=a,", "name"),
        ("name=a*b", "name"),
        ("status=over", "status"),
    ):
        async with http.get(f"{local.url}/api/changes?{query}") as answer:
            assert (answer.status, (await answer.json())["error"]["field"]) == (400, field), query


# Digests --------------------------------------------------------------------------------------------------------------


async def test_a_busy_gateway_has_one_digest_a_tick(client: Client, local: Local, http: aiohttp.ClientSession) -> None:
    """No rollout is missed, and calls and tokens add up."""
    every_s, rollouts, calls = 0.2, [f"r{at}" for at in range(30)], 2

    async def play(rollout: str) -> None:
        for number in range(calls):
            await local.ask(http, rollout)
            _ = await client.add_events(rollout, "a1", [Event(name=f"e{number}{n}") for n in range(4)])

    start = (await client.stats(0)).cursor
    digests = list[Digest]()
    async with asyncio.timeout(PATIENCE), aclosing(client.digests(start, every_s)) as feed:
        began = time.monotonic()
        playing = asyncio.gather(*map(play, rollouts))
        while sum(one.calls for one in digests) < len(rollouts) * calls:
            digests.append(await anext(feed))
        took = time.monotonic() - began
        await playing
    end = (await client.stats(0)).cursor
    digests += [] if digests[-1].cursor >= end else await until(client, digests[-1].cursor, every_s, end)
    totals = [one.totals async for one in client.rollouts()]
    assert end - start >= 300
    assert len(digests) <= took / every_s + 3
    assert [one.cursor for one in digests] == sorted({one.cursor for one in digests})
    assert {name for one in digests for name in one.rollouts} == set(rollouts)
    assert all(one.more == 0 and len(set(one.rollouts)) == len(one.rollouts) for one in digests)
    assert sum(one.calls for one in digests) == len(rollouts) * calls == sum(one.calls for one in totals)
    assert sum(one.input_tokens for one in digests) == sum(one.input_tokens or 0 for one in totals) > 0
    assert sum(one.output_tokens for one in digests) == sum(one.output_tokens or 0 for one in totals) > 0
    assert sum(one.errors + one.cancelled for one in digests) == 0


async def test_a_digest_names_two_hundred_and_counts_the_others(client: Client) -> None:
    since = (await client.stats(0)).cursor
    names = await queued(client, 230)
    end = (await client.stats(0)).cursor
    digests = await until(client, since, 0.1, end)
    assert sum(len(one.rollouts) + one.more for one in digests) == 230
    assert digests[-1].rollouts[-1] == names[-1]
    assert all(len(one.rollouts) <= 200 for one in digests)
    assert {name for one in digests for name in one.rollouts} <= set(names)


async def test_nothing_comes_while_nothing_changes(client: Client) -> None:
    since = (await client.stats(0)).cursor
    async with asyncio.timeout(PATIENCE), aclosing(client.digests(since, 0.1)) as feed:
        for _ in range(2):
            first = asyncio.ensure_future(anext(feed))
            done, _ = await asyncio.wait([first], timeout=0.3)
            assert not done
            (rollout,) = await queued(client, 1)
            assert (await first).rollouts == [rollout]


async def test_digests_go_on_after_a_gateway_was_killed(start_gateway: StartGateway) -> None:
    gateway = await start_gateway("")
    lost = list[ClientError]()
    async with Client(gateway.url) as client, aclosing(client.digests(0, 0.1, lost.append)) as feed:
        names = await queued(client, 3)
        found = list[Digest]()
        async with asyncio.timeout(PATIENCE):
            while not found or names[-1] not in found[-1].rollouts:
                found.append(await anext(feed))
            _ = await gateway.kill()
            waiting = asyncio.ensure_future(anext(feed))
            while not lost:
                _ = await asyncio.wait([waiting], timeout=0.05)
            await gateway.start(gateway.port)
            more = await queued(client, 2)
            found.append(await waiting)
            while more[-1] not in found[-1].rollouts:
                found.append(await anext(feed))
    assert [one for digest in found for one in digest.rollouts] == names + more
    assert all(error.temporary for error in lost)


WRONG_DIGESTS = [
    ({"every_s": "0.05"}, "every_s"),
    ({"every_s": "61"}, "every_s"),
    ({"every_s": "nan"}, "every_s"),
    ({"every_s": "soon"}, "every_s"),
    ({"since": "-1"}, "since"),
    ({"since": "99999999"}, "since must be a cursor of this feed, which ends at"),
    ({"limit": "3"}, "'limit' is not known here"),
]
WRONG_IDS = [
    ({"ids": ""}, "'' is not the id of a rollout"),
    ({"ids": "a,b c"}, "'b c' is not the id of a rollout"),
    ({"ids": ",".join(f"r{n}" for n in range(201))}, "201 are more than 200"),
    ({"ids": "a", "cursor": "x"}, "cursor does not go with ids"),
    ({"ids": "a", "filter": "statsu:ok"}, "did you mean 'status'"),
    ({"brief": "perhaps"}, "brief"),
]


async def test_wrong_values_are_refused(client: Client) -> None:
    for path, wrong in (("/api/digest", WRONG_DIGESTS), ("/api/rollouts", WRONG_IDS)):
        for asked, why in wrong:
            with pytest.raises(ClientError, match=why) as refused:
                await client.read("GET", path, asked)
            assert refused.value.status == 400


# Rows by id -----------------------------------------------------------------------------------------------------------


async def test_rows_are_looked_up_by_their_ids(client: Client) -> None:
    first, second, third = await queued(client, 3, input={"q": "?"}, metadata={"k": 1})
    _ = await client.cancel(second)
    found = await client.rollouts_by_id([first, "no-such-rollout", third, second, first])
    assert [one.id for one in found] == [third, second, first]
    assert [one.status for one in found] == ["queuing", "cancelled", "queuing"]
    assert [one.id for one in await client.rollouts_by_id([first, second], "status:cancelled")] == [second]
    assert await client.rollouts_by_id([]) == []
    page = await client.get("/api/rollouts", RolloutPage, {"ids": f"{first},{second}"})
    assert page.next is None
    assert [one.input for one in page.rollouts] == [{"q": "?"}] * 2
    brief = await client.rollout_page("", 2, None)
    assert [(one.id, one.input, one.metadata) for one in brief.rollouts] == [(third, None, None), (second, None, None)]
    assert [one.id for one in (await client.rollout_page("", 1, brief.next)).rollouts] == [first]


async def test_a_row_of_a_list_is_small(client: Client) -> None:
    """An ordinary rollout with one attempt, as the queue has handed it out, whatever its task is."""
    (rollout,) = await queued(client, 1, input={"question": "w" * 5000}, metadata={"k": "v" * 500}, priority=7)
    claims = (await client.claim(ClaimRequest(worker="gpu-worker-17"))).claims
    assert [one.rollout.id for one in claims] == [rollout]
    asked = {"ids": rollout, "brief": "true"}
    whole = await client.read("GET", "/api/rollouts", asked)
    (row,) = RolloutPage.model_validate_json(whole).rollouts
    assert [one.worker for one in row.attempts] == ["gpu-worker-17"]
    assert len(whole) < 600


# Spans without bytes, filters, readiness ------------------------------------------------------------------------------


async def test_a_span_without_its_bytes(client: Client, local: Local, http: aiohttp.ClientSession) -> None:
    await local.ask(http, "r1")
    await recorded(client)
    whole, head = await client.span("r1", "a1", 1), await client.span("r1", "a1", 1, "none")
    assert whole.exchange is not None
    assert head.exchange is None
    assert (head.span, head.turn) == (whole.span, whole.turn)
    with pytest.raises(ClientError, match="exchange"):
        await client.read("GET", "/api/rollouts/r1/attempts/a1/spans/1", {"exchange": "false"})


async def test_a_span_with_its_bytes_as_recorded_or_plain(
    client: Client, local: Local, provider: Provider, http: aiohttp.ClientSession
) -> None:
    provider.encoding = "gzip"
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    url, headers = local.openai("r1") + "/chat/completions", {"Content-Type": "application/json"} | GZIP
    async with http.post(url, data=gzip.compress(body), headers=headers | {"Content-Encoding": "gzip"}) as answer:
        assert answer.status == 200
        said = await answer.read()
    await recorded(client)
    exact, plain = await client.span("r1", "a1", 1), await client.span("r1", "a1", 1, "plain")
    assert exact.exchange is not None
    assert plain.exchange is not None
    sent = exact.exchange.request_body.base64
    assert sent is not None
    assert gzip.decompress(base64.b64decode(sent)) == body
    assert exact.exchange.response_body.text is None
    assert (plain.exchange.request_body.text, plain.exchange.response_body.text) == (body.decode(), said.decode())
    assert plain.exchange.response_headers == exact.exchange.response_headers, "headers are as received"
    assert (plain.span, plain.turn) == (exact.span, exact.turn)


async def recorded(client: Client) -> None:
    async with asyncio.timeout(PATIENCE), aclosing(client.changes()) as feed:
        async for change in feed:
            if change.span is not None and change.span.status == "ok":
                return


@pytest.mark.parametrize("target", ["spans", "rollouts"])
async def test_the_filter_language_is_what_filters_take(client: Client, target: Target) -> None:
    language = await client.filter_fields()
    fields = language.spans if target == "spans" else language.rollouts
    assert fields == describe_fields(target)
    assert len(fields) > 20
    for field in fields:
        for value in field.values:
            _ = parse(f"{field.name}{field.operators[0]}{value}", target, 0)
    assert "succeeded" in next(one.values for one in language.rollouts if one.name == "status")


async def test_readiness(client: Client, local: Local) -> None:
    assert await client.readiness() is None

    def readiness() -> str | None:
        with SyncClient(local.url) as waiting:
            return waiting.readiness()

    assert await asyncio.to_thread(readiness) is None


# Gzip -----------------------------------------------------------------------------------------------------------------


async def test_gzip_is_given_where_it_is_asked_for(local: Local) -> None:
    """Forty rows of a list: a third of the bytes or less."""
    async with Client(local.url) as plain, Client(local.url, compressed=True) as packed:
        names = await queued(plain, 40)
        read = [await plain.rollouts_by_id(names), await packed.rollouts_by_id(names)]
        assert read[0] == read[1]
        before = plain.received
        _ = await plain.rollouts_by_id(names)
        assert packed.received * 3 < plain.received - before
        before = packed.received
        assert await packed.readiness() is None
        assert packed.received - before < LEAST
        # What changes something is answered by another part of the gateway.
        before = packed.received
        made = await packed.enqueue([RolloutSpec() for _ in range(200)])
        assert len(made) == 200
        assert packed.received - before < len(made) * 17


async def test_headers_say_what_is_packed(local: Local, http: aiohttp.ClientSession) -> None:
    async def head(path: str, **headers: str) -> tuple[str | None, str | None]:
        async with http.get(local.url + path, headers={"Accept-Encoding": "identity"} | headers) as answer:
            assert answer.status == 200
            return answer.headers.get("Content-Encoding"), answer.headers.get("Vary")

    assert await head("/api/openapi.json") == (None, None)
    assert await head("/api/openapi.json", **GZIP) == ("gzip", "Accept-Encoding")
    assert await head("/healthz", **GZIP) == (None, None)
    assert await head("/api/digest", **GZIP) == ("gzip", "Accept-Encoding")
    assert await head("/api/changes") == (None, None)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("gzip", True), ("GZIP", True), ("br, gzip;q=0.5", True), ("deflate,gzip ; q = 1", True),
        ("gzip;q=0", False), ("gzip; q=0.000", False), ("identity", False), ("", False), ("gzipped", False),
        ("*", False),
    ],
)  # fmt: skip
def test_who_asks_for_gzip(asked: str, given: bool) -> None:
    assert accepts_gzip({"Accept-Encoding": asked}) is given
    assert not accepts_gzip({})


async def test_a_packed_feed_says_the_same_at_once(local: Local) -> None:
    """Events come when they happen, not when some kilobytes have gathered."""
    async with Client(local.url) as plain, Client(local.url, compressed=True) as packed:
        since = (await plain.stats(0)).cursor
        async with asyncio.timeout(PATIENCE), aclosing(packed.changes(since)) as feed:
            for _ in range(3):
                (rollout,) = await queued(plain, 1)
                change = await anext(feed)
                assert change.rollout is not None
                assert change.rollout.id == rollout


async def test_every_piece_of_a_packed_feed_is_readable_at_once() -> None:
    class Kept:
        written = b""

        async def write(self, data: bytes, /) -> None:
            self.written += data

    kept, sent, reader = Kept(), b"", zlib.decompressobj(16 + zlib.MAX_WBITS)
    feed, read = GzipFeed(kept), b""
    for piece in (b": hello\n\n", b"x" * 100_000, b"data: 1\n\n"):
        at = len(kept.written)
        await feed.write(piece)
        sent, read = sent + piece, read + reader.decompress(kept.written[at:])
        assert read == sent
    assert gzip.compress(b"")[:2] == kept.written[:2]
