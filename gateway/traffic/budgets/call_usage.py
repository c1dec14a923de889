"""Computes the use of a call from its span. Pure.

A call that was refused, did not reach its upstream, or was left before the first byte of the answer has used nothing.
Any other has used what its provider reports. If the provider reports no counts, the estimate of its tokens counts, and
is marked as a guess; without an estimate, the reserved amount counts as a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.gateway.model.prices import TokenCounts
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.traffic.budgets.limits import nanodollars
from penstock.gateway.traffic.budgets.operations import BudgetCharge, BudgetClaim


class CallUsage(NamedTuple):
    """The tokens that a call has used."""

    tokens: TokenCounts
    guessed: bool


def usage_of(entry: SpanEntry) -> CallUsage | None:
    """The tokens that a call has used; None if it has used nothing."""
    refused = entry.http_status is None or entry.http_status >= 400 or entry.error == "error_body"
    if entry.upstream is None or entry.first_byte_ns is None or refused:
        return None
    told, (asked, made) = TokenCounts.of(entry.usage), entry.estimate or (None, None)
    output, guessed = told.output, asked is not None or made is not None
    if entry.partial_tokens is not None and output is not None and entry.partial_tokens > output:
        # For an answer that was broken off, some providers have reported only the count at its beginning.
        output, guessed = entry.partial_tokens, True
    prompt = asked if told.input is None else told.input
    output = made if output is None else output
    return CallUsage(told._replace(input=prompt, output=output), guessed)


def charges(
    claims: Sequence[BudgetClaim], found: CallUsage | None, cost: Callable[[TokenCounts], float | None]
) -> list[BudgetCharge]:
    """The use of each budget. `cost`: dollars of tokens; None without a price."""
    return [BudgetCharge(0) if found is None else _used(claim, found, cost) for claim in claims]


def _used(claim: BudgetClaim, found: CallUsage, cost: Callable[[TokenCounts], float | None]) -> BudgetCharge:
    unit, tokens = claim.limit.budget.unit, found.tokens
    if unit == "calls":
        return BudgetCharge(1)
    if unit == "tokens":
        uncounted = tokens.input is None and tokens.output is None
        used = claim.amount if uncounted else (tokens.input or 0) + (tokens.output or 0)
        return BudgetCharge(used, uncounted or found.guessed)
    dollars = cost(tokens)
    return (
        BudgetCharge(claim.amount, guessed=True)
        if dollars is None
        else BudgetCharge(nanodollars(dollars), found.guessed)
    )
