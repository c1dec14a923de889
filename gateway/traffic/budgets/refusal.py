"""Refusals of calls for which a budget has no room: 429, which budget, and when it frees. Pure.

The headers are `Retry-After` and those of draft-ietf-httpapi-ratelimit-headers-10. Clients are told when a retry is in
vain: OpenAI's and Anthropic's SDKs heed `x-should-retry`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from penstock.gateway.model.state import MONTH, TOTAL, Budget
from penstock.gateway.traffic.budgets.bounds import TokenBound, UnreadCall
from penstock.gateway.traffic.budgets.limits import Limit
from penstock.gateway.traffic.budgets.operations import BudgetShortfall
from penstock.gateway.wire.http.request import ClientFault, Refusal

KIND: Final = "budget"
"""The `error` of the span of a call for which a budget has no room."""
UNPRICED: Final = "budget_price"
"""The `error` of the span of a call whose model has no price."""
UNCOUNTABLE: Final = "budget_unread"
"""The `error` of the span of a call whose use cannot be counted."""
SOON_S: Final = 1
"""Seconds after which a client may retry if only running calls take the room."""
_PATIENCE_S: Final = 60
"""Seconds that SDKs wait at most by themselves."""
_UNITS: Final = {"calls": "requests", "tokens": "tokens", "usd": "usd-micros"}
"""Names of units in the headers; `requests` is the draft's own."""
_WINDOWS: Final = {TOTAL: "in all", MONTH: "in a month"}
_NEVER: Final = 10**12
_TOO_LARGE: Final = _NEVER + 1
"""Waits that never end: for a budget that is used up for good, and for a call larger than a whole budget."""
_MICROS: Final = 1000
"""Nanodollars in a microdollar."""


def refusal(short: Sequence[BudgetShortfall], now: int, asked: TokenBound) -> Refusal:
    """The refusal of a call for which these budgets have no room. `asked`: the most that it may use."""
    worst = max(short, key=lambda one: _wait(one, now))
    wait = _wait(worst, now)
    told = [b", ".join(part(one, now) for one in short) for part in (_policy, _left)]
    headers = [(b"RateLimit-Policy", told[0]), (b"RateLimit", told[1])]
    if wait < _NEVER:
        headers.append((b"Retry-After", b"%d" % wait))
    if wait > _PATIENCE_S:
        headers.append((b"x-should-retry", b"false"))
    made = ClientFault(429, KIND, _message(worst, now, asked))
    made.headers = headers
    return made


def unpriced(budget: Budget, model: str | None) -> Refusal:
    """The refusal of a call whose cost is unknown."""
    what = f"model {model!r} has no price" if model else "this request names no model, so it has no price"
    message = (
        f"budget {budget.name!r} is in US dollars and {what}: the owner of this gateway can add one to the file that "
        '`prices` of penstock.toml names (`penstock prices --builtin`), or set unknown = "pass" for the budget'
    )
    return ClientFault(403, UNPRICED, message, "model")


def uncountable(budget: Budget, call: UnreadCall) -> Refusal:
    """The refusal of a call whose use cannot be counted. It is no 429, because a retry is always in vain."""
    message = (
        f"budget {budget.name!r} counts {budget.unit}, and {call.what}, so {call.path} cannot be counted. Use an API "
        f"that Penstock reads, or the owner of this gateway can set unknown of [[budget]] {budget.name!r}: "
        '"pass" lets such calls pass and counts what their answers tell'
    )
    made = ClientFault(403, UNCOUNTABLE, message)
    made.headers = [(b"x-should-retry", b"false")]
    return made


def _wait(short: BudgetShortfall, now: int) -> int:
    """Seconds until there may be room for the call; from `_NEVER` on, room does not come by itself."""
    most, needs = short.claim.limit.most, short.claim.amount
    if needs > most:
        return _TOO_LARGE
    if short.sum.used + needs <= most:
        return SOON_S
    return _NEVER if short.window.ends_ns is None else max(1, -(-(short.window.ends_ns - now) // 10**9))


def _message(short: BudgetShortfall, now: int, asked: TokenBound) -> str:
    claim, sum_, limit = short.claim, short.sum, short.claim.limit
    budget = limit.budget
    have = "all calls have" if budget.per == "all" else f"{budget.per} {claim.of!r} has"
    said = f"{have} used {_amount(limit, sum_.used)} of {_amount(limit, limit.most)} {_window(budget)}"
    if sum_.running:
        running = f"{sum_.running:,} calls that run" if sum_.running != 1 else "one call that runs"
        said += f", and {running} may use {_amount(limit, sum_.reserved)} more"
    if budget.unit != "calls":
        said += f"; this call may use up to {_amount(limit, claim.amount)} ({_tokens(budget, asked)})"
    return (
        f"budget {budget.name!r} has no room for this call{_when(short, now)}: {said}. {_way_out(short, now)}".strip()
    )


def _tokens(budget: Budget, asked: TokenBound) -> str:
    """The most that it may use, in tokens."""
    answer = f"{asked.answer_tokens:,} for the answer"
    if asked.answer is None:
        answer += ", to which it sets no limit (such as max_tokens)"
    return f"{asked.prompt:,} tokens for its prompt, {answer}"


def _when(short: BudgetShortfall, now: int) -> str:
    wait, ends = _wait(short, now), short.window.ends_ns
    if wait >= _NEVER:
        return ""
    if short.sum.used + short.claim.amount <= short.claim.limit.most or ends is None:
        return " until calls that run have ended"
    return f" until {datetime.fromtimestamp(ends // 10**9, UTC):%Y-%m-%d %H:%M:%S} UTC (in {wait:,} s)"


def _way_out(short: BudgetShortfall, now: int) -> str:
    wait, name = _wait(short, now), short.claim.limit.budget.name
    if wait == _TOO_LARGE:
        return f"That is more than the whole budget: ask for a shorter answer, or raise limit of [[budget]] {name!r}"
    if wait == _NEVER:
        return f"It does not free by itself: the owner of this gateway can raise limit of [[budget]] {name!r}"
    return ""


def _window(budget: Budget) -> str:
    return _WINDOWS.get(budget.window, f"in a window of {budget.window}")


def _amount(limit: Limit, counted: int) -> str:
    unit = limit.budget.unit
    if unit == "usd":
        return f"{limit.shown(counted):,.9f}".rstrip("0").rstrip(".") + " USD"
    return f"{counted:,} {unit if counted != 1 else unit[:-1]}"


def _policy(short: BudgetShortfall, now: int) -> bytes:
    """A quota policy item of the draft."""
    budget, window = short.claim.limit.budget, short.window
    unit = "" if budget.unit == "calls" else f';qu="{_UNITS[budget.unit]}"'
    length = "" if window.ends_ns is None else f";w={(window.ends_ns - window.since_ns) // 10**9}"
    return f'"{budget.name}";q={_integer(short, short.claim.limit.most)}{unit}{length}{_partition(short)}'.encode()


def _left(short: BudgetShortfall, now: int) -> bytes:
    """A service limit item of the draft."""
    left = max(0, short.claim.limit.most - short.sum.used - short.sum.reserved)
    wait = _wait(short, now)
    time = "" if wait >= _NEVER else f";t={wait}"
    return f'"{short.claim.limit.budget.name}";r={_integer(short, left)}{time}{_partition(short)}'.encode()


def _integer(short: BudgetShortfall, counted: int) -> int:
    return counted // _MICROS if short.claim.limit.budget.unit == "usd" else counted


def _partition(short: BudgetShortfall) -> str:
    """The owner as the partition key, a byte sequence of structured fields."""
    of = short.claim.of
    return f";pk=:{base64.b64encode(of.encode()).decode()}:" if of else ""
