"""The control API as typed Python: the client requests further pages, and resumes the change feed, by itself.

    async with Client() as client:  # address and key as commands have them: `connection`
        async for span in client.spans("my-rollout", filter="status:failed"): ...
        async for change in client.changes(since=cursor): ...
        await client.enqueue([RolloutSpec(id="q1", input={"question": "..."})])

Lists are async iterators that ask for the next page when it is needed. `changes` reconnects after a lost connection,
with growing pauses, and continues after the last change that it gave: none is missed and none comes twice. Every error
is a `ClientError` in one line: the gateway's own words (`Refused`), or why it could not be reached (`Unreachable`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import TypeVar
from urllib.parse import quote

from pydantic import ValidationError

from penstock.gateway.client.connection import ClientError, NotFound, Params, brief
from penstock.gateway.client.exchanges import PARTS, RECORDS, CallBytes, RolloutPart, Unpacker, WholeRollout
from penstock.gateway.client.resources import (
    DefinitionClient,
    IndexClient,
    PolicyClient,
    ReleaseClient,
    RunClient,
    UpstreamClient,
    WebhookClient,
)
from penstock.gateway.model.answers import (
    TAPE_HEADER,
    AgentToken,
    AttemptList,
    AuditEntry,
    AuditPage,
    Breakdown,
    Caller,
    Change,
    ChangeKind,
    ChangePage,
    Diagnosis,
    Digest,
    ExchangeBytes,
    FilterFields,
    PriceList,
    RolloutPage,
    SpanDetail,
    SpanPage,
    Stats,
    TokenRequest,
    UnreadList,
)
from penstock.gateway.model.base import EMPTY_ACTION, ActionRequest, SpanKind
from penstock.gateway.model.codes import BreakdownDimension
from penstock.gateway.model.queue import (
    ClaimAnswer,
    ClaimRequest,
    EnqueueAnswer,
    EnqueueRequest,
    EnqueueResult,
    Event,
    EventsAnswer,
    EventsRequest,
    FeedbackAnswer,
    FeedbackRequest,
    FinishAnswer,
    FinishRequest,
    HeartbeatAnswer,
    HeartbeatRequest,
    QueueRequest,
    QueueState,
    QueueStatus,
    RewardAnswer,
    RolloutSpec,
    WorkerList,
)
from penstock.gateway.model.rollout import Attempt, Judgement, Outcome, Rollout, RolloutStatus, RolloutSummary, Worker
from penstock.gateway.model.span import Span
from penstock.gateway.model.state import SearchPage, SearchRow
from penstock.gateway.model.times import Backoff
from penstock.gateway.model.tools import ToolList, ToolUse
from penstock.gateway.model.turn import Transcript

__all__ = ["Client", "ClientError"]

PAUSES = Backoff(0.1, 5.0)
F = TypeVar("F", Change, Digest)


class Client(ReleaseClient, RunClient, PolicyClient, DefinitionClient, UpstreamClient, WebhookClient, IndexClient):
    """A connection to a gateway's control API."""

    # Reading ----------------------------------------------------------------------------------------------------------

    async def rollouts(self, filter: str = "", limit: int | None = None) -> AsyncIterator[RolloutSummary]:
        """The rollouts, newest first; all of them or up to `limit`."""
        params = {"filter": filter or None}
        async for rollout in self.rows("/api/rollouts", RolloutPage, params, limit, lambda page: page.rollouts):
            yield rollout

    async def rollout_page(self, filter: str, limit: int, cursor: str | None) -> RolloutPage:
        """A page of rollouts, newest first, without tasks, metadata and reasons."""
        params = {"filter": filter or None, "limit": limit, "cursor": cursor, "brief": "true"}
        return await self.get("/api/rollouts", RolloutPage, params)

    async def rollouts_by_id(self, ids: Sequence[str], filter: str = "") -> list[RolloutSummary]:
        """The named rollouts (at most 200) that exist and match the filter, as `rollout_page` has them."""
        if not ids:
            return []
        params = {"ids": ",".join(ids), "filter": filter or None, "brief": "true"}
        return (await self.get("/api/rollouts", RolloutPage, params)).rollouts

    async def filter_fields(self) -> FilterFields:
        """The fields of the filter language, for completion."""
        return await self.get("/api/filters", FilterFields)

    async def spans(
        self, rollout: str, attempt: str | None = None, filter: str = "", limit: int | None = None
    ) -> AsyncIterator[Span]:
        """Heads of the spans of a rollout or of one attempt, in order."""
        path, params = f"{_path(rollout, attempt)}/spans", {"filter": filter or None}
        async for span in self.rows(path, SpanPage, params, limit, lambda page: page.spans):
            yield span

    async def recent_spans(self, filter: str = "", limit: int | None = None) -> AsyncIterator[Span]:
        """Heads of the spans of all rollouts, newest change first."""
        params = {"filter": filter or None}
        async for span in self.rows("/api/spans", SpanPage, params, limit, lambda page: page.spans):
            yield span

    async def search(
        self, text: str, filter: str = "", words: bool = False, limit: int | None = None
    ) -> AsyncIterator[SearchRow]:
        """The spans that contain a text, newest change first. `words`: only matches of whole words."""
        params = {"text": text, "filter": filter or None, "words": "true" if words else None}
        async for found in self.rows("/api/search", SearchPage, params, limit, lambda page: page.rows):
            yield found

    async def prices(self) -> PriceList:
        """The prices of models that the gateway uses."""
        return await self.get("/api/prices", PriceList)

    async def rollout(self, rollout: str) -> RolloutSummary:
        """A rollout with its attempts, totals and reward. Raises `NotFound` when there is none of this name."""
        return await self.get(_path(rollout), RolloutSummary)

    async def diagnosis(self, rollout: str, model: str | None = None) -> Diagnosis:
        """The parts of a rollout that can be trained on, and why the others cannot; `model` judges only the calls of
        that model."""
        return await self.get(f"{_path(rollout)}/diagnosis", Diagnosis, {"model": model})

    async def tools(self, rollout: str, attempt: str, until: int | None = None, inside: bool = True) -> list[ToolUse]:
        """The tools that an attempt used, each with the call that asked for it, and how well that is known.
        `until`: sequence of the last span that is examined. `inside`: include tools that ran inside the agent."""
        return (await self.tool_list(rollout, attempt, until, inside)).tools

    async def tool_list(self, rollout: str, attempt: str, until: int | None = None, inside: bool = True) -> ToolList:
        """The same, with the sub-agents of the attempt and the tool calls that got no result."""
        params = {"until": until, "inside": None if inside else "false"}
        return await self.get(f"{_path(rollout, attempt)}/tools", ToolList, params)

    async def attempts(self, rollout: str) -> list[Attempt]:
        """The attempts of a rollout, oldest first."""
        return (await self.get(f"{_path(rollout)}/attempts", AttemptList)).attempts

    async def span(self, rollout: str, attempt: str, sequence: int, exchange: ExchangeBytes = "exact") -> SpanDetail:
        """A whole span; `exchange`: its bytes as recorded, without their content encodings, or left out."""
        return await self.get(_path(rollout, attempt, sequence), SpanDetail, {"exchange": exchange})

    async def transcript(self, rollout: str, attempt: str | None = None, outcome: Outcome | None = None) -> Transcript:
        """The task and every call of an attempt, as reward functions get them. The newest attempt unless one is named.
        `outcome`: how the attempt ended, if the tape does not know yet."""
        if attempt is None:
            attempts = (await self.rollout(rollout)).attempts
            if not attempts:
                raise NotFound(f"rollout {rollout!r} has no attempt", 404)
            attempt = attempts[-1].id
        found = await self.get(f"{_path(rollout, attempt)}/transcript", Transcript)
        return found if outcome is None else found.model_copy(update={"outcome": outcome})

    async def request_body(self, rollout: str, attempt: str, sequence: int, side: str | None = None) -> bytes:
        """The exact bytes of a call's request body. `side`: `agent` or `engine`, as in `model.turn.Side.who`."""
        return await self.read("GET", f"{_path(rollout, attempt, sequence)}/request", params={"side": side})

    async def response_body(self, rollout: str, attempt: str, sequence: int, side: str | None = None) -> bytes:
        """The exact bytes of a call's response body; `side` as in `request_body`."""
        return await self.read("GET", f"{_path(rollout, attempt, sequence)}/response", params={"side": side})

    async def exchanges(self, rollout: str, of: str | None = None) -> AsyncGenerator[CallBytes]:
        """The recorded bytes of all calls of a rollout, content encodings removed, in their order. `of`: `models`, the
        default, for model calls, or `tools` for exchanges with servers of tools."""
        unpacker = Unpacker(RECORDS)
        async with self.request("GET", f"{_path(rollout)}/exchanges", {"of": of}) as response:
            async for piece in response.content.iter_any():
                for call in unpacker.feed(piece):
                    yield call

    async def whole_rollouts(self, ids: Sequence[str], kinds: Sequence[SpanKind] = ()) -> AsyncGenerator[WholeRollout]:
        """The named rollouts (at most 200), each with its spans and the bytes of its model calls. They come in the
        order given; `kinds`: only these spans. It is one request, and no more than one rollout is held in memory.
        Raises `NotFound` before the first when one of them does not exist."""
        if not ids:
            return
        unpacker, whole = Unpacker(PARTS), None
        params = {"ids": ",".join(ids), "kind": ",".join(kinds) or None}
        async with self.request("GET", "/api/whole", params) as response:
            async for piece in response.content.iter_any():
                for part in unpacker.feed(piece):
                    if not isinstance(part, RolloutPart):
                        assert whole is not None, "a rollout comes before what is in it"
                        whole.add(part)
                        continue
                    if whole is not None:
                        yield whole
                    whole = WholeRollout(self._parsed("/api/whole", RolloutSummary, part.rollout))
        if whole is not None:
            yield whole

    async def stats(self, spans: int | None = None) -> Stats:
        """Figures of the gateway, with sums over the newest `spans`; over all if not given, where the gateway has an
        index."""
        return await self.get("/api/stats", Stats, {"spans": spans})

    async def breakdown(self, by: BreakdownDimension, filter: str = "", spans: int | None = None) -> Breakdown:
        """Figures of the calls that match the filter, grouped by a property such as the model. `spans`: how many of the
        newest are looked at without an index; as many as the gateway likes if None."""
        return await self.get("/api/breakdown", Breakdown, {"by": by, "filter": filter, "spans": spans})

    async def unread(self, filter: str = "") -> UnreadList:
        """The parts of answers that could not be read, with counts, the most frequent first."""
        return await self.get("/api/unread", UnreadList, {"filter": filter})

    async def readiness(self) -> str | None:
        """None when the gateway is ready for calls; else why it is not."""
        try:
            await self.read("GET", "/readyz")
        except ClientError as e:
            if e.status != 503:
                raise
            return str(e)
        return None

    async def whoami(self) -> Caller:
        """The role and the key's name under which the gateway knows this client."""
        return await self.get("/api/whoami", Caller)

    async def audit_log(self, limit: int | None = None) -> AsyncIterator[AuditEntry]:
        """The audit log, who changed what, newest first; `audit` returns the chain of one release."""
        async for entry in self.rows("/api/audit", AuditPage, {}, limit, lambda page: page.entries):
            yield entry

    async def make_token(self, rollout: str, expires_s: int | None = None) -> AgentToken:
        """Makes an agent token for one rollout."""
        try:
            request = TokenRequest(rollout=rollout, expires_s=expires_s)
        except ValidationError as e:
            raise ClientError(brief(e)) from None
        answer = await self.read("POST", "/api/tokens", body=request.model_dump_json())
        return self._parsed("/api/tokens", AgentToken, answer)

    async def changes(
        self,
        since: int = 0,
        kinds: Sequence[ChangeKind] = (),
        names: Sequence[str] = (),
        status: Iterable[RolloutStatus] = (),
    ) -> AsyncGenerator[Change]:
        """Every change after the cursor `since`, for ever. Raises only when the gateway refuses. The gateway sends only
        the wanted changes: `kinds` of changes, `names` (or NAME*) of rollouts with what is in them, of resources,
        releases and runs, `status` of rollouts."""
        wanted = {"kind": ",".join(kinds), "name": ",".join(names), "status": ",".join(status)}
        params = {name: text for name, text in wanted.items() if text}
        async with aclosing(self._followed("/api/changes", Change, params, since, None)) as feed:
            async for change in feed:
                yield change

    async def digests(
        self, since: int | None = None, every_s: float = 1.0, lost: Callable[[ClientError], None] | None = None
    ) -> AsyncGenerator[Digest]:
        """Digests of the changes after the cursor `since`, one every `every_s` seconds. None begins now.
        `lost` is called whenever the gateway cannot be reached. Raises only when the gateway refuses."""
        if since is None:
            since = (await self.stats(spans=0)).cursor
        async with aclosing(self._followed("/api/digest", Digest, {"every_s": str(every_s)}, since, lost)) as feed:
            async for digest in feed:
                yield digest

    async def _followed(
        self, path: str, model: type[F], params: Params, since: int, lost: Callable[[ClientError], None] | None
    ) -> AsyncGenerator[F]:
        """The events of a feed. After a lost connection it reconnects, with growing pauses, and continues where it was;
        the gateway refuses if it has another tape by then."""
        failures, tape = 0, list[str]()
        while True:
            try:
                at = {**params, "since": since, "tape": "".join(tape) or None}
                async with aclosing(self._stream(path, model, at, tape)) as stream:
                    async for event in stream:
                        since, failures = event.cursor, 0
                        yield event
            except ClientError as e:
                if not e.temporary:
                    raise
                if lost is not None:
                    lost(e)
            failures += 1
            await asyncio.sleep(PAUSES.after(failures))

    async def change_page(self, since: int = 0, limit: int | None = None) -> ChangePage:
        """The changes after `since` that are there already; does not wait for more."""
        return await self.get("/api/changes", ChangePage, {"since": since, "limit": limit, "follow": "false"})

    async def _stream(self, path: str, model: type[F], params: Params, tape: list[str]) -> AsyncGenerator[F]:
        """Events until the connection ends; a truncated event is dropped. `tape` is set to the name of the tape that
        they are from."""
        async with self.request("GET", path, params) as response:
            tape[:] = response.headers.getall(TAPE_HEADER, [])
            waiting = bytearray()
            async for piece in response.content.iter_any():
                waiting += piece
                *events, rest = waiting.split(b"\n\n")
                waiting = bytearray(rest)
                for data in filter(None, map(_data, events)):
                    yield self._parsed(path, model, data)

    # Work -------------------------------------------------------------------------------------------------------------

    async def enqueue(self, rollouts: Sequence[RolloutSpec]) -> list[EnqueueResult]:
        """Queues tasks, all of them or none; at most `model.queue.MOST_ROLLOUTS` in one call."""
        request = EnqueueRequest(rollouts=list(rollouts))
        return (await self.post("/api/rollouts", EnqueueAnswer, request)).rollouts

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Takes work, waiting for it as long as `request.wait_s` says."""
        return await self.post("/api/claims", ClaimAnswer, request)

    async def heartbeat(self, worker: str, request: HeartbeatRequest) -> HeartbeatAnswer:
        """Keeps the attempts that a worker has claimed."""
        return await self.post(f"/api/workers/{quote(worker, safe='')}/heartbeat", HeartbeatAnswer, request)

    async def finish(self, rollout: str, attempt: str, request: FinishRequest) -> FinishAnswer:
        """Ends an attempt; when this returns every earlier call of it is durable."""
        return await self.post(f"{_path(rollout, attempt)}/finish", FinishAnswer, request)

    async def cancel(self, rollout: str, said: ActionRequest = EMPTY_ACTION) -> Rollout:
        """Stops a rollout, whether it waits or runs; `said`: who wants it, and why."""
        return await self.post(f"{_path(rollout)}/cancel", Rollout, said)

    async def requeue(self, rollout: str, said: ActionRequest = EMPTY_ACTION) -> Rollout:
        """Queues a rollout again that has ended."""
        return await self.post(f"{_path(rollout)}/requeue", Rollout, said)

    async def reward(self, rollout: str, attempt: str, judgement: Judgement) -> RewardAnswer:
        """Records a judgement of how well an attempt went."""
        return await self.post(f"{_path(rollout, attempt)}/rewards", RewardAnswer, judgement)

    async def feedback(self, request: FeedbackRequest) -> FeedbackAnswer:
        """Records feedback on a response, found by the id that its provider gave it."""
        return await self.post("/api/feedback", FeedbackAnswer, request)

    async def add_events(self, rollout: str, attempt: str, events: Sequence[Event]) -> list[int]:
        """Adds events to an attempt; returns their sequences."""
        request = EventsRequest(events=list(events))
        return (await self.post(f"{_path(rollout, attempt)}/events", EventsAnswer, request)).sequences

    async def queue(self) -> QueueStatus:
        """The state of the queue, and the numbers of rollouts that wait or are claimed."""
        return await self.get("/api/queue", QueueStatus)

    async def set_queue(self, state: QueueState, said: ActionRequest = EMPTY_ACTION) -> QueueStatus:
        """Opens, pauses or drains the queue."""
        return await self.post(
            "/api/queue", QueueStatus, QueueRequest(state=state, **said.model_dump(exclude_unset=True))
        )

    async def workers(self) -> list[Worker]:
        """The workers that the gateway has heard from lately, by name."""
        return (await self.get("/api/workers", WorkerList)).workers


def _path(rollout: str, attempt: str | None = None, sequence: int | None = None) -> str:
    path = f"/api/rollouts/{quote(rollout, safe='')}"
    path += "" if attempt is None else f"/attempts/{quote(attempt, safe='')}"
    return path if sequence is None else f"{path}/spans/{sequence}"


def _data(event: bytes | bytearray) -> bytes:
    """The data of an event; empty for comments."""
    return b"\n".join(line[6:] for line in event.split(b"\n") if line.startswith(b"data: "))
