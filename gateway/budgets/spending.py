"""Computes the use of a call from its span. Pure.

A call that was refused, did not reach its upstream, or was left before the first byte of the answer has used nothing.
Any other has used what its provider reports. If the provider reports no counts, the estimate of its tokens counts, and
is marked as a guess; without an estimate, the reserved amount counts as a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.gateway.budgets.limits import nanodollars
from penstock.gateway.budgets.operations import Claim, Used
from penstock.gateway.model.prices import Tokens
from penstock.gateway.store.records import Entry


class Spent(NamedTuple):
    """The tokens that a call has used."""

    tokens: Tokens
    guessed: bool


def spent(entry: Entry) -> Spent | None:
    """The tokens that a call has used; None if it has used nothing."""
    refused = entry.http_status is None or entry.http_status >= 400 or entry.error == "error_body"
    if entry.upstream is None or entry.first_byte_ns is None or refused:
        return None
    told, (asked, made) = Tokens.of(entry.usage), entry.estimate or (None, None)
    output, guessed = told.output, asked is not None or made is not None
    if entry.heard is not None and output is not None and entry.heard > output:
        # For an answer that was broken off, some providers have reported only the count at its beginning.
        output, guessed = entry.heard, True
    prompt = asked if told.input is None else told.input
    output = made if output is None else output
    return Spent(told._replace(input=prompt, output=output), guessed)


def used(claims: Sequence[Claim], found: Spent | None, cost: Callable[[Tokens], float | None]) -> list[Used]:
    """The use of each budget. `cost`: dollars of tokens; None without a price."""
    return [Used(0) if found is None else _used(claim, found, cost) for claim in claims]


def _used(claim: Claim, found: Spent, cost: Callable[[Tokens], float | None]) -> Used:
    unit, tokens = claim.limit.budget.unit, found.tokens
    if unit == "calls":
        return Used(1)
    if unit == "tokens":
        uncounted = tokens.input is None and tokens.output is None
        used = claim.amount if uncounted else (tokens.input or 0) + (tokens.output or 0)
        return Used(used, uncounted or found.guessed)
    dollars = cost(tokens)
    return Used(claim.amount, guessed=True) if dollars is None else Used(nanodollars(dollars), found.guessed)
