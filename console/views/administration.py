"""The state of a gateway for readers: audit log, budgets, index, prices, retention, upstreams, webhooks. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

from rich.console import Group
from rich.text import Text

from penstock.console.views.noun import (
    POSITIONAL,
    Limit,
    LimitedSelection,
    NounError,
    NounRows,
    NounSelection,
    NounView,
    all_rows,
    limited,
    only_row,
)
from penstock.console.views.table import (
    Column,
    Listing,
    age,
    ago,
    asked_by,
    clean,
    duration,
    figure,
    moment,
    number,
    plain,
    size,
)
from penstock.gateway.model.answers import AuditEntry
from penstock.gateway.model.price_lists import PriceChange
from penstock.gateway.model.prices import Price, staleness_warning
from penstock.gateway.model.release import Delivery, WebhookTestResult, WebhookView
from penstock.gateway.model.state import (
    BudgetPage,
    BudgetUse,
    ForgottenRollout,
    IndexView,
    RetentionHold,
    RetentionStatus,
    UpstreamView,
)
from penstock.gateway.model.toml import pluralized

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client


class AuditSelection(LimitedSelection):
    """The options of the audit log."""

    limit: Limit = 50
    """How many at most."""


async def _fetch(client: Client, selection: AuditSelection) -> NounRows[AuditEntry]:
    return await limited(selection.limit, client.audit_log, "Nobody has changed anything yet.")


AUDIT = NounView[AuditSelection, AuditEntry](
    "audit",
    AuditEntry,
    _fetch,
    selection=AuditSelection,
    key=lambda one: str(one.number),
    columns={
        figure("#", 3): lambda one, _: str(one.number),
        Column("when", 2): lambda one, now_ns: ago(one.at_ns, now_ns),
        Column("who"): lambda one, _: plain(asked_by(one.who, one.key)),
        Column("what"): lambda one, _: one.action.replace("_", " "),
        Column("of what", narrows="fold", least=16): lambda one, _: plain(one.target),
        Column("why", 1, narrows="fold", least=16): lambda one, _: plain(one.why),
    },
)


# The use of budgets, as people are shown it. Pure.

_FULL, _NEAR = 1.0, 0.8
"""Used shares of a budget from which on it is coloured: red, and yellow."""


class BudgetSelection(LimitedSelection):
    """The options of the list of budgets."""

    name: Annotated[str | None, POSITIONAL] = None
    """Only of this budget."""


async def _budgets_fetch(client: Client, selection: BudgetSelection) -> NounRows[BudgetUse]:
    found = await client.budgets(selection.name, selection.limit)
    none = empty_reason(found, selection.name)
    if selection.name is not None and selection.name not in found.configured:
        raise NounError(none)
    more = found.total - len(found.budgets)
    below = [Text(f"{more:,} more; --limit shows them.", style="dim")] if more else []
    return NounRows(found.budgets, none, below=below)


def empty_reason(found: BudgetPage, name: str | None) -> str:
    """The reason why there is no row. `name`: name of the only budget that was requested."""
    configured = ", ".join(found.configured)
    if not configured:
        return "The gateway's penstock.toml has no [[budget]]."
    if name is not None and name not in found.configured:
        return f"there is no budget {name!r}; the gateway's penstock.toml has {configured}"
    return f"No call was counted yet of {name or configured}."


def _whose(one: BudgetUse) -> str:
    return "all calls" if one.per == "all" else f"{one.per} {one.of}"


def _amount(one: BudgetUse, amount: float) -> str:
    return f"{amount:,.4f}".rstrip("0").rstrip(".") if one.unit == "usd" else f"{amount:,.0f}"


def _share(one: BudgetUse) -> Text:
    style = "red" if one.share >= _FULL else "yellow" if one.share >= _NEAR else ""
    return Text(f"{one.share:.0%}", style=style)


def _frees(one: BudgetUse, now_ns: int) -> str:
    if one.frees_ns is None:
        return "never"
    seconds = (one.frees_ns - now_ns) // 10**9
    return duration(seconds * 10**9) if seconds > 0 else "now"


BUDGETS = NounView[BudgetSelection, BudgetUse](
    "budgets",
    BudgetUse,
    _budgets_fetch,
    selection=BudgetSelection,
    key=lambda one: f"{one.budget} {_whose(one)}",
    columns={
        Column("budget"): lambda one, _: plain(one.budget),
        Column("of", narrows="fold", least=12): lambda one, _: plain(_whose(one)),
        Column("unit", 2): lambda one, _: one.unit,
        figure("used"): lambda one, _: _amount(one, one.used),
        figure("reserved", 1): lambda one, _: _amount(one, one.reserved),
        figure("running", 0): lambda one, _: f"{one.running:,}",
        figure("unread", 0): lambda one, _: f"{one.unread:,}",
        figure("limit"): lambda one, _: _amount(one, one.limit),
        figure("full"): lambda one, _: _share(one),
        Column("frees in"): _frees,
    },
    concerns=frozenset({"rollouts"}),
    tool=True,
)


# The state of the index, as people are shown it.


def index(view: IndexView, now_ns: int = 0) -> str:
    """The state of the index and how far it has read, in a few lines."""
    lines = [f"{view.status}: {view.reason}"]
    if view.status in ("ready", "reading"):
        share = 100 * view.cursor // view.newest if view.newest else 100
        lines.append(f"changes   {view.cursor:,} of {view.newest:,} ({share} %)")
        lines.append(f"files     {view.files:,}, {size(view.bytes)}; {view.unsealed:,} spans in memory")
        if view.forgotten:
            lines.append(f"forgotten {view.forgotten:,} rollouts are being taken out of its files")
    return "\n".join(lines)


INDEX = NounView[NounSelection, IndexView](
    "index", IndexView, only_row(lambda client: client.index()), lambda _: "index", whole=index, every_s=5.0
)


# Prices of models, as people are shown them.

_MOST = 40
"""Maximum number of differences of a kind, and of models without a price, that are named."""


async def _prices_fetch(client: Client, selection: NounSelection) -> NounRows[Price]:
    found, called = await client.prices(), await client.breakdown("model", "")
    file = "the list that comes with Penstock" if found.builtin else "the file that penstock.toml names"
    above = [Text(f"{found.currency} for a million tokens, as of {found.as_of}: {file}.")]
    if aged := staleness_warning(found.as_of, time.time_ns()):
        above.append(Text(f"Warning: {aged}.", style="yellow"))
    unpriced = [row.value for row in called.rows if row.unpriced]
    below = [Text(f"Called, and without a price: {_named(unpriced)}.")] if unpriced else []
    return NounRows(found.prices, above=above, below=below)


def _besides(price: Price) -> str:
    """Other properties of a call that change its price: length, tier, tools, factors."""
    lengths = sorted({it.above for it in price.rates if it.above is not None})
    tiers = dict.fromkeys(it.tier for it in price.rates if it.tier is not None)
    return ", ".join([*(f"> {above:,}" for above in lengths), *tiers, *price.tools, *price.factors])


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST:,} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


PRICES = NounView[NounSelection, Price](
    "prices",
    Price,
    _prices_fetch,
    key=lambda one: f"{one.model} {one.since or ''}".strip(),
    columns={
        Column("model"): lambda one, _: plain(one.model),
        Column("since", 5): lambda one, _: str(one.since or ""),
        figure("input"): lambda one, _: number(one.input),
        figure("output"): lambda one, _: number(one.output),
        figure("cached", 4): lambda one, _: number(one.cached),
        figure("cache write", 3): lambda one, _: number(one.cache_write),
        figure("long", 2): lambda one, _: number(one.cache_write_long),
        Column("besides", 1, narrows="cut", least=8): lambda one, _: plain(_besides(one)),
    },
    every_s=60.0,
)


def differences(found: Sequence[PriceChange]) -> Group:
    """The changes of an update: kept prices first, then changed and new ones."""
    listing = Listing(Column("model"), Column(""), Column("price", narrows="cut", least=8))
    heads: list[Text] = []
    for what in ("kept", "changed", "new"):
        some = [one for one in found if one.what == what]
        heads += [Text(f"{what}: {pluralized(len(some), 'price')}")] if some else []
        for one in some[:_MOST]:
            listing.add_row(plain(one.model), one.what, plain(one.said))
    return Group(*(heads or [Text("Nothing differs.")]), *([listing] if found else []))


# Retention rules, holds and forgotten rollouts, as people are shown them. Pure.

_NAMED: Final = 3
"""Maximum number of rollouts that are named; more are counted."""


def _status(view: RetentionStatus, now_ns: int) -> str:
    """The rules and the progress of retention, in a few lines."""
    lines = [f"forget    {rule}" for rule in view.rules]
    if view.keep_bytes is not None:
        lines.append(f"forget    the oldest, while the tape uses more than {size(view.keep_bytes)}")
    if not lines:
        lines.append("forget    nothing by itself: penstock.toml has neither [[retention]] nor tape.keep_bytes")
    lines.append(f"tape      {size(view.used_bytes)} in use of a file of {size(view.file_bytes)}")
    by_rule = f", {view.retired:,} of them by rules since the gateway started" if view.retired else ""
    lines.append(f"forgotten {pluralized(view.forgotten, 'rollout')}{by_rule}")
    lines.append(f"left      {_left(view)}")
    lines += [f"stuck     {why}" for why in (view.stuck, view.full) if why]
    return "\n".join(lines)


def _left(view: RetentionStatus) -> str:
    if view.done:
        return "nothing of what was forgotten"
    left: list[str] = []
    if view.wiping:
        left.append(f"calls of {pluralized(view.wiping, 'rollout')}")
    if view.overwriting:
        left.append("bytes in free parts of the file, until they are overwritten")
    if view.in_index is None:
        left.append("perhaps something in the index, which has not caught up")
    elif view.in_index:
        left.append(f"{pluralized(view.in_index, 'rollout')} in files of the index")
    return "; ".join(left)


def forgotten(gone: Sequence[ForgottenRollout]) -> str:
    """A sentence naming the rollouts that were removed from the tape."""
    names = ", ".join(one.rollout for one in gone) if len(gone) <= _NAMED else pluralized(len(gone), "rollout")
    return f"forgotten: {names}"


def wiped(view: RetentionStatus) -> str:
    """A sentence with the data of forgotten rollouts that is still left after waiting for its deletion."""
    return f"left: {_left(view)}" if not view.stuck else f"not done yet: {view.stuck}"


def held(changed: Sequence[RetentionHold], lifted: bool) -> str:
    """A sentence naming the rollouts that are kept from now on, or not any more."""
    names = ", ".join(one.rollout for one in changed) if len(changed) <= _NAMED else pluralized(len(changed), "rollout")
    verb = "is" if len(changed) == 1 else "are"
    lift = f"`penstock hold --lift {changed[0].rollout if len(changed) == 1 else 'ROLLOUT'}`"
    return f"{names} {verb} not kept any more" if lifted else f"{names} {verb} kept until {lift}"


async def _fetch_forgotten(client: Client, selection: LimitedSelection) -> NounRows[ForgottenRollout]:
    return await limited(selection.limit, client.forgotten, "Nothing was forgotten yet.")


RETENTION = NounView[NounSelection, RetentionStatus](
    "retention", RetentionStatus, only_row(lambda client: client.retention()), lambda _: "retention", whole=_status
)
HOLDS = NounView[NounSelection, RetentionHold](
    "holds",
    RetentionHold,
    all_rows(lambda client: client.holds(), "Nobody keeps a rollout."),
    key=lambda one: one.rollout,
    columns={
        Column("rollout"): lambda one, _: one.rollout,
        Column("since"): lambda one, _: moment(one.at_ns),
        Column("who"): lambda one, _: plain(one.who),
        Column("why", 1, narrows="fold", least=16): lambda one, _: plain(one.why),
    },
)
FORGOTTEN = NounView[LimitedSelection, ForgottenRollout](
    "forgotten",
    ForgottenRollout,
    _fetch_forgotten,
    selection=LimitedSelection,
    key=lambda one: one.rollout,
    columns={
        Column("rollout"): lambda one, _: one.rollout,
        Column("when"): lambda one, _: moment(one.at_ns),
        Column("why", 1, narrows="fold", least=16): lambda one, _: plain(one.why),
    },
)


# The list of upstreams, as people are shown it. Pure.


def _state(one: UpstreamView) -> Text:
    if one.paused:
        return Text("paused", style="yellow")
    made = Text("open", "green") if one.health == "good" else Text(f"{one.health}: {clean(one.failing)}", "red")
    if one.health == "good" and one.failing.startswith("auth: "):
        made = Text(f"open, {clean(one.failing)}", "red")
    if one.check is not None:
        made.append(f", check {'passed' if one.check == 'passed' else 'failed: ' + clean(one.check)}")
    return made


def _seconds(value: float | None) -> str:
    return "" if value is None else duration(int(value * 1e9))


UPSTREAMS = NounView[NounSelection, UpstreamView](
    "upstreams",
    UpstreamView,
    all_rows(
        lambda client: client.upstreams(), "No upstream is configured: `[[upstream]]` in penstock.toml names one."
    ),
    key=lambda one: one.name,
    columns={
        Column("upstream"): lambda one, _: plain(one.name),
        Column("state"): lambda one, _: _state(one),
        Column("since", 3, right=True, optional=True): lambda one, _: _seconds(one.paused_s),
        # A length of time, not a number of calls: shown while any upstream is paused.
        Column("at most", 2, right=True, optional=True): lambda one, _: _seconds(one.bound_s),
        figure("running"): lambda one, _: f"{one.running:,}",
        figure("waiting"): lambda one, _: f"{one.waiting:,}",
        figure("waited", 1): lambda one, _: f"{one.waited:,}",
        figure("refused", 4): lambda one, _: f"{one.refused:,}",
    },
    concerns=frozenset({"rollouts"}),
    every_s=3.0,
    tool=True,
)


# Webhooks and their deliveries, as people are shown them. Pure.

_STATES = {"waiting": "yellow", "delivered": "green", "given_up": "red"}


class DeliverySelection(LimitedSelection):
    """The options of the list of deliveries."""

    webhook: Annotated[str, POSITIONAL]
    """Name of a webhook of penstock.toml."""
    limit: Limit = 50
    """How many at most."""


async def _deliveries(client: Client, selection: DeliverySelection) -> NounRows[Delivery]:
    rows = await client.deliveries(selection.webhook, min(selection.limit, 10_000))
    return NounRows(rows, "It was told nothing yet.")


def tried(one: WebhookTestResult) -> Text:
    """The answer to a test, in a sentence."""
    answer = "no answer" if one.answer is None else f"answer {one.answer}"
    return plain(f"{one.webhook}: {answer} after {duration(int(one.seconds * 1e9))}, id {one.id}")


def _what(delivery: Delivery) -> str:
    return f"{delivery.event.replace('_', ' ')} of {delivery.release}"


def _ago(ns: int | None, now_ns: int) -> str:
    return "" if ns is None else ago(ns, now_ns)


def _until(ns: int | None, now_ns: int) -> str:
    """The time until then; `now` if it is due, empty for None."""
    if ns is None:
        return ""
    return "now" if ns - now_ns < 10**9 else f"in {age(now_ns, ns)}"


WEBHOOKS = NounView[NounSelection, WebhookView](
    "webhooks",
    WebhookView,
    all_rows(lambda client: client.webhooks(), "No webhook is configured: `[[webhook]]` in penstock.toml names one."),
    key=lambda one: one.name,
    columns={
        Column("webhook"): lambda one, _: plain(one.name),
        Column("state"): lambda one, _: Text("ok", "green") if one.failing_ns is None else Text("failing", "red"),
        figure("waiting"): lambda one, _: f"{one.waiting:,}",
        Column("last taken"): lambda one, now_ns: "" if one.last is None else _ago(one.last.tried_ns, now_ns),
        Column("what", 1): lambda one, _: "" if one.last is None else plain(_what(one.last)),
        Column("failing"): lambda one, now_ns: _ago(one.failing_ns, now_ns),
        Column("next try", 2): lambda one, now_ns: _until(one.next_ns, now_ns),
        figure("given up", 3): lambda one, _: f"{one.given_up:,}",
        Column("why", narrows="fold", least=16): lambda one, _: plain(one.error),
        Column("where", 0): lambda one, _: plain(one.url),
    },
    concerns=frozenset({"releases"}),
)
DELIVERIES = NounView[DeliverySelection, Delivery](
    "deliveries",
    Delivery,
    _deliveries,
    selection=DeliverySelection,
    key=lambda one: str(one.number),
    columns={
        figure("#", 3): lambda one, _: str(one.number),
        Column("when", 2): lambda one, now_ns: ago(one.made_ns, now_ns),
        Column("release"): lambda one, _: plain(one.release),
        Column("event"): lambda one, _: one.event.replace("_", " "),
        figure("entry", 1): lambda one, _: str(one.entry),
        Column("state"): lambda one, _: Text(one.status.replace("_", " "), style=_STATES[one.status]),
        figure("tries"): lambda one, _: f"{one.attempts:,}",
        Column("last try", 4): lambda one, now_ns: _ago(one.tried_ns, now_ns),
        Column("next try", 5): lambda one, now_ns: _until(one.next_ns, now_ns),
        figure("answer", 6): lambda one, _: "" if one.answer is None else str(one.answer),
        Column("why", narrows="fold", least=16): lambda one, _: plain(one.error),
    },
)
