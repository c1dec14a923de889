"""The parts of a gateway that are looked at as a whole: budgets, retention, the index and upstreams, with their rules,
their state, and requests to them.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from penstock.gateway.model.answers import Page
from penstock.gateway.model.base import ActionRequest, Noun
from penstock.gateway.model.span import Span
from penstock.gateway.model.times import NOTATION, nanoseconds
from penstock.gateway.model.toml import Section

# Budgets: limits on what calls may use up, and their use so far.

BudgetScope = Literal["all", "key", "agent", "rollout", "run", "arm"]
BudgetUnit = Literal["calls", "tokens", "usd"]
MOST_USD: Final = 10**9
"""Most US dollars of a budget: sums are counted in billionths of a dollar."""
LEAST_USD: Final = 1e-9
MONTH, TOTAL = "month", "total"
"""Windows that are not a length of time."""
_SECOND: Final = 10**9


class Budget(Section):
    """`[[budget]]`: what calls may use up."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name in refusals, `penstock budgets` and metrics."""
    per: BudgetScope = "all"
    """Each `key`, `agent`, `rollout`, training `run` or `arm` of a release has its own budget; `all` is one budget for
    all calls."""
    only: list[str] = Field(default=[])
    """The keys, agents, rollouts, runs or arms (`RELEASE:ARM`) that have one: names or patterns with `*` and `?`.
    Default: each."""
    model: str = Field(default="*", min_length=1, max_length=256)
    """Models whose calls it counts: a name, or a pattern with `*` and `?`."""
    unit: BudgetUnit
    """`calls`, `tokens` (of prompts and answers) or US dollars by the list of prices."""
    limit: float = Field(gt=0, le=1e15)
    """Units that may be used in a window."""
    window: str = "1d"
    """A time such as `1h`, a calendar `month`, or `total`, which never ends."""
    unknown: Literal["refuse", "pass"] = "refuse"
    """For a call whose tokens cannot be told, or whose model has no price: `refuse` it, or let it `pass` and count what
    its answer tells. With `unit = "calls"` it always passes and counts as one."""

    @field_validator("window")
    @classmethod
    def _is_a_window(cls, value: str) -> str:
        if value not in (MONTH, TOTAL) and (nanoseconds(value) or 0) < _SECOND:
            raise ValueError(f"{value!r} is neither {MONTH!r} nor {TOTAL!r} nor a time from 1s on: {NOTATION}")
        return value

    @property
    def refuses_unknown(self) -> bool:
        """True if a call whose use cannot be told is refused."""
        return self.unit != "calls" and self.unknown == "refuse"

    @model_validator(mode="after")
    def _makes_sense(self) -> Budget:
        if self.unit != "usd" and self.limit != int(self.limit):
            raise ValueError(f"limit: {self.limit:g} {self.unit} are no whole number")
        if self.unit == "usd" and self.limit > MOST_USD:
            raise ValueError(f"limit: {self.limit:g} is more than {MOST_USD} US dollars")
        if self.unit == "usd" and self.limit < LEAST_USD:
            raise ValueError(f"limit: {self.limit:g} is less than {LEAST_USD:g} US dollars")
        if self.per == "all" and self.only:
            raise ValueError('only: it names what has a budget of its own, and per = "all" gives that to none')
        return self


class BudgetUse(Noun):
    """The used and the reserved part of a budget in the present window."""

    budget: str
    """Its name."""
    per: BudgetScope
    """What has one of its own."""
    of: str = ""
    """Whose this one is: a key, an agent, a rollout, a run, or an arm; empty where it is that of all calls."""
    unit: BudgetUnit
    """What is counted."""
    limit: float
    """How much may be used."""
    used: float
    """What calls that are over have used."""
    guessed: float = 0.0
    """The part of it that nobody counted: an estimate, or what was reserved where there was not even that."""
    unread: int = 0
    """Calls that have passed although nobody can say what they have used."""
    reserved: float
    """What calls that run may use up to."""
    running: int
    """How many calls that are."""
    window: str
    """For how long, as configured."""
    since_ns: int
    """When the window began; 0 where it never ends; ns since the epoch."""
    frees_ns: int | None
    """When the next one begins; None where it never does."""

    @property
    def share(self) -> float:
        """The part of the limit that is used or reserved."""
        return (self.used + self.reserved) / self.limit


class BudgetPage(Noun):
    """Budgets and what is used of them: the fullest first."""

    budgets: list[BudgetUse]
    """As many as were asked for."""
    total: int
    """How many there are."""
    configured: list[str] = Field(default=[])
    """Names of the budgets in penstock.toml, also of those that have counted nothing."""


# Retention: rules on how long rollouts stay, records of forgotten ones, and holds that keep rollouts from being
# forgotten.


class ForgottenRollout(Noun):
    """A rollout of which the tape has nothing any more but this."""

    rollout: str
    """Its name."""
    at_ns: int
    """When it was forgotten: Unix time, ns."""
    why: str = ""
    """Why; of retention, the rule."""
    number: int
    """The cursor of its creation."""
    wiped: bool = False
    """Whether its calls are deleted; until then a gateway is at it. `overwritten` of the retention says more."""


class RetentionHold(Noun):
    """That a rollout must be kept: neither retention nor a person forgets it."""

    rollout: str
    """The rollout."""
    at_ns: int
    """Since when: Unix time, ns."""
    who: str
    """Who wants it kept."""
    why: str = ""
    """Why."""


class RetentionRule(Section):
    """`[[retention]]`: after how long the gateway forgets which rollouts."""

    filter: str = ""
    """Which rollouts: a filter of `penstock rollouts`, such as `mode:online -reward>0.5`; empty is all."""
    after: str
    """Time since a rollout's last change, such as `30d`. Only ended rollouts are forgotten."""

    @field_validator("after")
    @classmethod
    def _is_a_time(cls, value: str) -> str:
        if not nanoseconds(value):
            raise ValueError(f"{value!r} is not a time: {NOTATION}")
        return value

    @property
    def after_ns(self) -> int:
        """The time `after` in nanoseconds."""
        return nanoseconds(self.after) or 0

    def __str__(self) -> str:
        return f"after {self.after}{self.filter and f': {self.filter}'}"


class RetentionStatus(Noun):
    """The retention rules, the size of the tape, and what is still to be deleted of forgotten rollouts."""

    rules: list[RetentionRule] = Field(default_factory=list[RetentionRule])
    """As configured."""
    keep_bytes: int | None = None
    """What the tape may use before the oldest rollouts are forgotten; None where it may grow."""
    used_bytes: int
    """What the tape uses of its file; the rest is used again."""
    file_bytes: int
    """The size of its file, which never shrinks."""
    forgotten: int
    """Rollouts that were forgotten so far."""
    retired: int = 0
    """Those of them that were by a rule or for space, since the gateway started."""
    wiping: int
    """Rollouts that are out of sight, and of which calls are still on the tape."""
    overwriting: bool
    """Whether bytes of what was deleted may still be in the file; zeros are being written over them."""
    in_index: int | None
    """Rollouts that are still in files of the index; None while it does not say."""
    looked_ns: int | None = None
    """When the rules were last applied to all rollouts."""
    stuck: str = ""
    """Why a step has failed; it is tried again."""
    full: str = ""
    """Why the space cannot be had that `keep_bytes` asks for."""

    @property
    def done(self) -> bool:
        """True if nothing is left of the forgotten rollouts."""
        return not self.wiping and not self.overwriting and self.in_index == 0


class RetentionHoldList(Noun):
    """Rollouts that somebody keeps, by name."""

    holds: list[RetentionHold] = Field(default_factory=list[RetentionHold])
    """One each."""


class ForgottenPage(Page):
    """Rollouts that were forgotten, by name."""

    forgotten: list[ForgottenRollout] = Field(default_factory=list[ForgottenRollout])
    """One each."""


# The index (`followers.index`): its state, searches, SQL.

IndexStatus = Literal["ready", "reading", "starting", "busy", "small", "off", "missing", "broken"]


class IndexView(Noun):
    """The state of the tape's index, and how far it has read."""

    status: IndexStatus
    """`ready`: filters answer from it. Else they scan the tape: it is still `reading` or `starting`; it is `busy` with
    an earlier question; the tape is too `small` to need one; the configuration has turned it `off`; its extra is
    `missing`; or it is `broken` and made anew in a moment."""
    reason: str
    """The same for a person, with the way out where there is one."""
    cursor: int = 0
    """The last change of the tape that it has."""
    newest: int
    """The last change of the tape."""
    files: int = 0
    """How many files it has."""
    bytes: int = 0
    """The size of its files."""
    forgotten: int = 0
    """Forgotten rollouts that are still in its files; they are in no answer."""
    unsealed: int = 0
    """Spans that are in memory only; they are read from the tape again when the gateway starts."""


# Results of a search for a text.


class Hit(Noun):
    """A passage that has the text, around the first place where it stands."""

    answer: bool
    """True in the answer, false in the request."""
    role: str
    """Who says it: system, developer, user, assistant, tool ...; empty where nobody is known to."""
    part: str
    """What it is: text, reasoning, tool_call, tool_call_response, refusal, error, unknown, body or attribute."""
    name: str | None = None
    """Of a tool call the tool, of an attribute its name."""
    before: str
    """What stands before it, up to the length of context that was asked for."""
    match: str
    """The text as it stands there."""
    after: str
    """What stands behind it, up to the same length."""
    times: int = 1
    """How often it stands in the passage."""


class SearchRow(Noun):
    """A span that says it."""

    span: Span
    """Its head."""
    hits: list[Hit]
    """A hit for each passage that has the text, in the order in which they are said; the first ten."""
    more: int = 0
    """How many more passages have it."""


class SearchPage(Page):
    """Spans that say a text, newest first."""

    rows: list[SearchRow]
    """Each with the passages that have it."""


# SQL over the tape: requests and answers.


class SqlRequest(Noun):
    """A query in SQL, with the form and the limits of its answer."""

    query: str = Field(min_length=1, max_length=100_000)
    """One SELECT, DESCRIBE or SUMMARIZE of DuckDB's SQL, over the views."""
    format: Literal["rows", "csv", "parquet"] = "rows"
    """How the answer has its rows."""
    limit: int = Field(default=1000, ge=1, le=1_000_000)
    """How many rows at most."""
    timeout_s: float = Field(default=10.0, gt=0, le=60)
    """How long it may take; s."""


class SqlColumn(Noun):
    """A column of an answer."""

    name: str
    """As the query names it."""
    type: str
    """DuckDB's type."""


class SqlAnswer(Noun):
    """The rows of a query."""

    columns: list[SqlColumn]
    """In their order."""
    count: int
    """How many rows there are here."""
    more: bool
    """There are more than were asked for, or than fit into 8 MiB."""
    rows: list[list[Any]]
    """With `rows`: a list for each. Times are ISO texts in UTC, bytes base64; integers beyond 2^53, NaN and infinity
    are texts."""
    file: str = ""
    """With `csv` the text, with `parquet` the file in base64."""


class SqlViewColumn(SqlColumn):
    """A column of a view."""

    help: str
    """What it is."""


class SqlView(Noun):
    """A view that queries may read."""

    name: str
    """Its name."""
    help: str
    """What a row is."""
    columns: list[SqlViewColumn]
    """Its columns."""


class SqlViews(Noun):
    """The views that a query in SQL may read, with their columns."""

    views: list[SqlView]
    """Rollouts first, then what is in them."""


# Upstreams as shown to people and trainers, and requests to hold one.

LONGEST_HOLD_S: Final = 3600.0
"""The longest hold, in seconds: no client waits for longer."""


class PauseRequest(ActionRequest):
    """The request that pauses an upstream, and the time for which its calls may wait."""

    bound_s: float = Field(default=60.0, gt=0, le=LONGEST_HOLD_S)
    """Seconds from now after which calls are refused unless it was opened or paused again."""


class UpstreamView(Noun):
    """An upstream, as calls meet it."""

    name: str
    """Its name in the configuration."""
    paused: bool
    """Whether calls to it wait."""
    paused_s: float | None
    """Seconds since it was first paused; None while it is open."""
    bound_s: float | None
    """Seconds that the last hold allows; None while it is open."""
    waiting: int
    """Calls that wait: it is paused, or has no place (`max_concurrent`)."""
    running: int
    """Connections with a call on them: none is left when the weights may be changed."""
    waited: int
    """Calls that have waited since the gateway started, or still do, for either reason."""
    refused: int
    """Those of them that were refused because it was paused."""
    health: Literal["good", "resting", "probing"] = "good"
    """How calls to it go: `resting` after it failed, so that others serve what they can; `probing` when that is over,
    until a call has shown how it is."""
    failing: str = ""
    """Why the last call to it failed, while it is not good, or why there are no fresh credentials (`auth`)."""
    rests_s: float | None = None
    """Seconds that it still rests; None while it does not."""
    check: str | None = None
    """What the last check of its `health_path` has found: `passed`, or why it failed; None where there was none."""
    checked_s: float | None = None
    """How many seconds ago that was."""


class RouteView(Noun):
    """A `[[route]]` of the configuration: which upstreams serve a model."""

    model: str
    """Model name that agents send, or a pattern (`qwen*`)."""
    upstreams: list[str]
    """Names of the upstreams that are tried in turn."""
    alias: str | dict[str, str] | None
    """Model name that is sent instead."""
    train: bool | Literal["exact"]
    """Whether its calls are recorded with token ids, as training needs them."""

    def matches(self, model: str) -> bool:
        """True if this route serves the model."""
        return fnmatchcase(model, self.model)


class UpstreamList(Noun):
    """All upstreams, and the routes to them."""

    upstreams: list[UpstreamView]
    """One each, by name."""
    routes: list[RouteView]
    """In the order of the configuration: the first that matches a model counts."""
