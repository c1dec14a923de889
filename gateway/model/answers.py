"""Answers and requests of the control API, where a noun alone is not enough. `api` and `client` share them.

A page of a list names its `next` cursor: send it back to go on; None is the end. A page may be short, even empty, and
still have a `next`: a selective filter stops after a bounded number of spans, so that no page takes long.
"""

from __future__ import annotations

from base64 import b64encode
from datetime import date
from typing import Final, Literal, TypeAlias

from pydantic import Field

from penstock.gateway.model.base import Id, Noun, Role, SpanKind
from penstock.gateway.model.codes import BreakdownDimension, FindingCode, SequenceStart
from penstock.gateway.model.prices import Price
from penstock.gateway.model.rollout import (
    Attempt,
    AttemptStatus,
    RewardSource,
    Rollout,
    RolloutStatus,
    RolloutSummary,
    Totals,
)
from penstock.gateway.model.span import Span
from penstock.gateway.model.tools import ToolStats
from penstock.gateway.model.turn import Chunk, Exchange, Side, Turn

# Changes of the tape, as followers get them: one by one, or in digests.

TAPE_HEADER: Final = "Penstock-Tape"
"""The header of an answer that names the tape whose cursors it has."""
ChangeKind: TypeAlias = Literal["rollout", "attempt", "span", "resource", "release", "run", "forgotten"]


class Change(Noun):
    """One entry of the change feed."""

    cursor: int
    """Its place in the feed; ask for `since=cursor` to go on after it."""
    kind: ChangeKind
    """What changed."""
    name: str | None = None
    """Set when kind is resource, release or run: which one; when it is forgotten, which rollout was."""
    rollout: Rollout | None = None
    """Set when kind is rollout."""
    attempt: Attempt | None = None
    """Set when kind is attempt."""
    span: Span | None = None
    """Set when kind is span: its newest head."""


class Digest(Noun):
    """The changes in a piece of the feed: names of what has changed, and sums over the calls that ended in it."""

    cursor: int
    """The last change in it; ask for `since=cursor` to go on after it."""
    rollouts: list[str] = Field(default_factory=list[str])
    """Rollouts that changed, or an attempt or a span of which did: each once, the newest change last."""
    more: int = 0
    """Rollouts that changed and are not named."""
    resources: list[str] = Field(default_factory=list[str])
    """Resources that changed."""
    releases: list[str] = Field(default_factory=list[str])
    """Releases that changed."""
    runs: list[str] = Field(default_factory=list[str])
    """Training runs that changed."""
    calls: int = 0
    """Model calls that ended."""
    errors: int = 0
    """Those that ended neither ok nor cancelled."""
    cancelled: int = 0
    """Those whose client went away."""
    tool_runs: int = 0
    """Runs of tools that ended."""
    input_tokens: int = 0
    """Prompt tokens of these calls that were counted."""
    output_tokens: int = 0
    """Generated tokens of these calls that were counted."""


class Page(Noun):
    """The fields that every page of a list has."""

    next: str | None = None
    """Cursor of the next page; None when this one is the last."""
    scanned: int = 0
    """How many spans or rollouts were looked at for this page."""


class RolloutPage(Page):
    """A page of rollouts, newest first."""

    rollouts: list[RolloutSummary]
    """Those that match, each with its attempts and sums."""


class AuditPage(Page):
    """A page of the audit log, newest first."""

    entries: list[AuditEntry]
    """Those of the page."""


class SpanPage(Page):
    """A page of spans without their bodies."""

    spans: list[Span]
    """Those that match."""


class ChangePage(Noun):
    """A finite piece of the change feed."""

    changes: list[Change]
    """In the order in which they happened."""
    next: int
    """Ask for `since=next` to go on; equal to `since` at the end of the feed."""


class Body(Noun):
    """A body, readable where it can be: exactly one of `text` and `base64` is set."""

    text: str | None = None
    """The bytes as text, when they are UTF-8."""
    base64: str | None = None
    """The bytes in base64, when they are not."""
    size: int
    """Bytes of the body."""

    @classmethod
    def of(cls, body: bytes) -> Body:
        """The body as `text` if it is UTF-8, else as `base64`."""
        try:
            return cls(text=body.decode(), size=len(body))
        except UnicodeDecodeError:
            return cls(base64=b64encode(body).decode(), size=len(body))


class SideView(Noun):
    """One party's side of a call, as JSON can hold it."""

    who: Literal["agent", "engine", "receipt"]
    """The party."""
    dialect: str
    """Wire format spoken with it."""
    path: str
    """Path and query that were called, secrets masked."""
    request_body: Body
    """As the agent sent it, or as the engine got it."""
    response_body: Body
    """As the agent got it, or as the engine sent it."""

    @classmethod
    def of(cls, side: Side) -> SideView:
        request, response = Body.of(side.request_body), Body.of(side.response_body)
        return cls(who=side.who, dialect=side.dialect, path=side.path, request_body=request, response_body=response)


class ExchangeView(Noun):
    """The recorded bytes of a call, as JSON can hold them."""

    url: str
    """What was called, secrets masked."""
    request_headers: list[tuple[str, str]]
    """As sent upstream."""
    request_body: Body
    """As sent upstream."""
    response_headers: list[tuple[str, str]]
    """As received."""
    response_body: Body
    """As received, content encoding kept."""
    trailers: list[tuple[str, str]]
    """Trailer fields after a chunked response."""
    chunks: list[Chunk]
    """Arrival of the response body, read by read."""
    sides: list[SideView]
    """Parties that were spoken with in another wire format."""

    @classmethod
    def of(cls, exchange: Exchange) -> ExchangeView:
        return cls(
            url=exchange.url,
            request_headers=exchange.request_headers,
            request_body=Body.of(exchange.request_body),
            response_headers=exchange.response_headers,
            response_body=Body.of(exchange.response_body),
            trailers=exchange.trailers,
            chunks=exchange.chunks,
            sides=[SideView.of(side) for side in exchange.sides],
        )


ExchangeBytes = Literal["exact", "plain", "none"]
"""The requested bytes of an exchange: as recorded, without their content encodings, or none."""


class SpanDetail(Noun):
    """A whole span: its summary, what it says, and the bytes that say it."""

    span: Span
    """The summary."""
    turn: Turn | None = None
    """The exchange, read; None when nothing is stored."""
    exchange: ExchangeView | None = None
    """The exchange itself; None when nothing is stored."""


class AttemptList(Noun):
    """The attempts of a rollout."""

    attempts: list[Attempt]
    """Oldest first."""


class ModelStats(Totals):
    """Sums over the calls of one model."""

    median_ns: int | None = None
    """Half of its finished calls took no longer; ns."""
    p95_ns: int | None = None
    """95 of 100 of its finished calls took no longer; ns."""


class PriceList(Noun):
    """The prices of models that costs are computed with."""

    as_of: date
    """The day by which the list was right."""
    currency: str
    """Of its numbers, which are for a million tokens."""
    builtin: bool
    """True for the list that comes with Penstock, false for one that penstock.toml names."""
    prices: list[Price]
    """In the order of the file."""


class RewardStats(Noun):
    """Counts and the mean of the rewards on a tape."""

    count: int = 0
    """Rewards that were given."""
    untrusted: int = 0
    """Those that are not trained on."""
    mean: float | None = None
    """Mean value of the trusted ones."""
    by_source: dict[RewardSource, int] = Field(default_factory=dict[RewardSource, int])
    """Rewards by who gave them."""


class ServerState(Noun):
    """A server of tools, as requests find it."""

    waiting: int = 0
    """Requests that wait for a place, because as many as `max_concurrent` allows are under way."""
    breaker: Literal["closed", "probing", "open"] = "closed"
    """Whether it is asked (`closed`), left alone because it has failed (`open`), or tried by one request."""


class Stats(Noun):
    """Figures of the gateway. The sums are over all spans, or over the newest, as many as `counted_spans` says."""

    counted_spans: int
    """How many spans the sums are over: all, or the newest."""
    complete: bool
    """True when these are all spans of the tape."""
    since_ns: int | None
    """Start of the earliest span counted; ns since the epoch."""
    totals: Totals
    """Sums over the counted spans. What was asked for to try a release is in none: replays, shadows, rehearsals."""
    by_model: dict[str, ModelStats]
    """The same for each model asked for."""
    by_status: dict[str, int]
    """Counted calls of agents by how they ended."""
    by_kind: dict[SpanKind, int]
    """Counted spans by what happened."""
    told: int = 0
    """Calls of models that only telemetry tells of, among the newest 10,000 spans. They are in no sum here, but in
    those of their rollouts."""
    by_tool: list[ToolStats] = Field(default_factory=list[ToolStats])
    """Runs of the tools of servers behind the gateway, the busiest first."""
    rewards: RewardStats
    """Sums over the counted rewards."""
    tape: dict[str, int]
    """Figures of the whole tape, such as `rollouts`, `spans`, `used_bytes` and `map_bytes`."""
    cursor: int
    """Where the change feed stands: follow it from here to see only what is new."""
    gaps: int
    """Calls that were answered but could not be recorded since the gateway started."""
    servers: dict[str, ServerState] = Field(default_factory=dict[str, ServerState])
    """Servers of tools (MCP), by name: who waits, and how their breakers stand."""


# Figures of calls, grouped by a value that they share.


class BreakdownRow(ModelStats):
    """Sums over the calls that have a value in common."""

    value: str
    """What they have in common; empty where they have nothing there."""
    rollouts: int = 0
    """Rollouts with such calls."""
    rewarded: int = 0
    """Those of them that have a reward."""
    reward: float | None = None
    """Mean reward of those."""
    reward_quartiles: list[float] | None = None
    """Their least reward, that below which a quarter of them is, the middle, three quarters, and the highest."""


class UnreadRow(Noun):
    """A path of keys that stood in answers and was not read."""

    dialect: str
    """Their wire format."""
    key: str
    """The path, without the places in arrays."""
    kind: str
    """What stands there: text, tool_calls, token_ids, token_counts, logprobs or usage."""
    calls: int
    """How many answers had it."""
    first_ns: int
    """When the first of them began; ns since the epoch."""
    last_ns: int
    """When the last of them began; ns since the epoch."""
    example: str
    """The last of them: ROLLOUT/ATTEMPT#SEQUENCE."""


class UnreadList(Noun):
    """The parts of a tape's answers that were not read when they were recorded, the most frequent first."""

    rows: list[UnreadRow] = Field(default_factory=list[UnreadRow])
    """A row for each path of a wire format."""
    complete: bool
    """True when all calls that the filter takes were looked at; else these are the newest of them."""


class Breakdown(Noun):
    """Sums over the calls of agents that a filter takes, the busiest value first. Calls that were made to try a release
    are in none."""

    by: BreakdownDimension
    """What they are broken down by."""
    rows: list[BreakdownRow] = Field(default_factory=list[BreakdownRow])
    """A row for each value."""
    more: int = 0
    """How many more values there are."""
    currency: str = "USD"
    """Of costs."""
    prices_as_of: date
    """The day by which the list of prices was right."""
    complete: bool
    """True when the sums are over the whole tape; else they are over its newest spans, because there is no index, it is
    behind, or the filter is about the bytes of calls."""
    looked_at: int | None = None
    """How many of the newest spans were looked at, where not all were."""


class Finding(Noun):
    """Something about an attempt or a call that training cares about."""

    code: FindingCode
    """What it is."""
    blocks: bool
    """True when this keeps it out of training; else it is only worth knowing."""
    reason: str
    """What was found, for a person."""
    fix: str
    """The command that repairs it, or what to change before the next attempt."""


class CallDiagnosis(Noun):
    """The diagnosis of a model call: whether it can be trained on, and what prevents it."""

    sequence: int
    """Its span within the attempt."""
    model: str | None
    """Model asked for."""
    prompt_tokens: int | None
    """Token ids of the prompt, as the engine returned them; None when it did not."""
    output_tokens: int | None
    """Token ids of all its choices; None when the engine returned none."""
    trainable: bool
    """True when neither it nor its attempt has a finding that blocks."""
    goes_on: int | None
    """Sequence of the call whose tokens its prompt begins with: both are one training sequence."""
    begins: list[SequenceStart]
    """Why sequences begin with it, one for each choice that continues no other."""
    findings: list[Finding]
    """What was found, the gravest first."""


class AttemptDiagnosis(Noun):
    """The diagnosis of an attempt: how many of its calls can be trained on, and what prevents it."""

    attempt: Id
    """Its name."""
    status: AttemptStatus
    """Where it stands."""
    reward: float | None
    """Its reward."""
    trainable: int
    """How many of its calls can be trained on."""
    sequences: int
    """How many training sequences these make, as `penstock samples` has rows: calls that go on from each other's exact
    tokens are one."""
    findings: list[Finding]
    """What concerns the attempt as a whole."""
    calls: list[CallDiagnosis]
    """Its model calls, in order."""


class Diagnosis(Noun):
    """The diagnosis of a rollout, call by call: whether it can be trained on, and if not why."""

    rollout: Id
    """Its name."""
    status: RolloutStatus
    """Where it stands."""
    model: str | None
    """The model that is judged: the one asked for, else the one that most calls asked for."""
    reward: float | None
    """Its reward."""
    trainable: bool
    """True when at least one call can be trained on, of the attempt that counts: the newest that succeeded, else the
    newest."""
    sequences: int
    """How many training sequences that attempt makes."""
    verdict: str
    """The same in a sentence."""
    findings: list[Finding]
    """What concerns the rollout as a whole."""
    attempts: list[AttemptDiagnosis]
    """Its attempts, oldest first."""
    skipped: int
    """Calls that were not looked at, because there are too many."""


class FilterField(Noun):
    """A field of the filter language."""

    name: str
    """What stands before the operator."""
    help: str
    """What it is."""
    operators: list[str]
    """What may stand behind it, the usual one first."""
    values: list[str] = Field(default_factory=list[str])
    """Its values where there is a choice; else it takes any of its kind."""


class FilterFields(Noun):
    """The filter language, for whoever completes filters; `metadata.KEY` is a field of both besides."""

    spans: list[FilterField]
    """Fields of filters of spans."""
    rollouts: list[FilterField]
    """Fields of filters of rollouts."""


class TokenRequest(Noun):
    """Asks for an agent token."""

    rollout: Id
    """The only rollout that the token opens."""
    expires_s: int | None = Field(default=None, ge=1, le=10 * 365 * 86400)
    """How long it is valid; s. None is for ever."""


class AgentToken(Noun):
    """An agent token: what an agent uses as its API key."""

    token: str
    """Starts with `pst_`."""
    rollout: Id
    """The only rollout that it opens."""
    expires_ns: int | None
    """When it ends; ns since the epoch. None is never."""


class Health(Noun):
    """The answer of `/healthz` and `/readyz`: the gateway is alive, or ready for calls."""

    status: Literal["ok"]
    """Always `ok`: anything else is an error of status 503."""


class Caller(Noun):
    """Whom the gateway takes a client for."""

    role: Role
    """What its key may do. Without keys everybody is `admin`."""
    key: str = ""
    """Name of its key; empty where the gateway has none."""
    version: str
    """Version of the gateway."""
    started_ns: int
    """When the gateway started; ns since the epoch."""


class AuditEntry(Noun):
    """One change that was asked for."""

    number: int
    """From 1, ascending."""
    at_ns: int
    """When; ns since the epoch."""
    who: str
    """Who, as the request claimed; `api` where it did not say."""
    key: str = ""
    """Name of the key that it came with; empty where the gateway has none."""
    action: str
    """What was done: `cancel_rollout`, `requeue_rollout`, `open_queue`, `pause_queue`, `drain_queue`, `pause_upstream`,
    `open_upstream`, `rebuild_index`, `approve_definitions`, `approve_call`, `refuse_call`, `sign_in`; of a
    release `start_release`, `approve_release`, `promote_release`, `rollback_release`, `hold_release`,
    `resume_release`, `abort_release`."""
    target: str
    """What it was done to: a rollout, an upstream, a release, a server with what was approved (`github tools 3`), a
    tool call (`r1/a1 github.search`), or the key that signed in a client. Empty for the queue."""
    why: str
    """Why, as the request said."""


class Problem(Noun):
    """The error of a request, for people and for programs."""

    message: str
    """For a person."""
    type: Literal["invalid_request", "unauthorized", "forbidden", "not_found", "conflict", "unavailable", "internal"]
    """For a program."""
    field: str | None = None
    """Parameter or field at fault."""
    value: str | None = None
    """What it was."""
    allowed: list[str] | None = None
    """What it may be."""


class ErrorAnswer(Noun):
    """The body of every answer of status 400 and above."""

    error: Problem
    """What was wrong."""
