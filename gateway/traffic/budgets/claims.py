"""Finds the budgets that count a call, and the most that it may use of each. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.gateway.model.prices import Price
from penstock.gateway.model.state import BudgetScope
from penstock.gateway.traffic.budgets.bounds import (
    PromptCounter,
    TokenBound,
    UnreadCall,
    bound,
    is_read,
    unread_call,
)
from penstock.gateway.traffic.budgets.limits import MOST, Limit, nanodollars
from penstock.gateway.traffic.budgets.operations import BudgetClaim
from penstock.gateway.traffic.budgets.refusal import uncountable, unpriced
from penstock.gateway.traffic.calls.call_record import CallRecord
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.wire.dialects.loose_json import peek


class CallBudgets(NamedTuple):
    """The budgets that count a call."""

    claims: Sequence[BudgetClaim]
    """A claim of 1 on each."""
    bounded: bool
    """True if one counts tokens, or what they cost."""
    priced: bool
    """True if one counts money."""


def budgets_of(
    limits: Iterable[Limit], model: str | None, key: str | None, agent: str | None, rollout: str, arm: str | None
) -> CallBudgets:
    """The budgets that count the calls for a model with this key, agent, rollout, and arms of releases."""
    owners: Mapping[BudgetScope, Sequence[str | None]] = {
        "all": ("",),
        "key": () if key is None else (key,),
        "agent": () if agent is None else (agent,),
        "rollout": (rollout,),
        "run": (None,),
        "arm": arm.split(",") if arm else (),
    }
    claims = [
        BudgetClaim(limit, of, 1)
        for limit in limits
        for of in owners[limit.budget.per]
        if (of is None or limit.is_for(of)) and limit.is_about(model)
    ]
    units = {claim.limit.budget.unit for claim in claims}
    return CallBudgets(claims, units != {"calls"}, "usd" in units)


def claims_of(
    ones: Iterable[BudgetClaim], asked: TokenBound, model: str | None, prices: Sequence[Price], body: bytes
) -> list[BudgetClaim]:
    """The claims of a call, made of claims of 1; raises `Refusal` if it has no price and a budget refuses that.
    `prices`: the prices that it may have; `body`: its request."""
    claims: list[BudgetClaim] = []
    for one in ones:
        budget = one.limit.budget
        if budget.unit == "calls":
            claims.append(one)
            continue
        if budget.unit == "tokens":
            amount = min(MOST, asked.prompt + asked.answer_tokens)
        elif prices:
            answer = min(MOST, asked.answer_tokens)
            amount = min(MOST, nanodollars(max(price.most(asked.prompt, answer, body) for price in prices)))
        elif budget.refuses_unknown:
            raise unpriced(budget, model)
        else:
            continue
        claims.append(BudgetClaim(one.limit, one.of, amount))
    return claims


def unread_claims(ones: Iterable[BudgetClaim], unread: UnreadCall) -> list[BudgetClaim]:
    """The claims of a call whose use cannot be counted, made of claims of 1; raises `Refusal` if a budget refuses
    that."""
    claims: list[BudgetClaim] = []
    for one in ones:
        budget = one.limit.budget
        if budget.refuses_unknown:
            raise uncountable(budget, unread)
        claims.append(one._replace(amount=int(budget.unit == "calls"), unread=True))
    return claims


def bound_of(prompts: PromptCounter, call: CallRequest, record: CallRecord) -> TokenBound:
    """Most tokens that the call may use."""
    conversation = (call.address.rollout, call.address.attempt)
    prompt = prompts.tokens(conversation, call.body)
    if record.body is not call.body and record.changed:
        prompt = max(prompt, prompts.tokens((*conversation, "sent"), record.plain))
    if call.peeked is None:
        call.peeked = peek(call.body)
    return bound(call.dialect, call.peeked, prompt)


def unread_of(call: CallRequest, record: CallRecord) -> UnreadCall | None:
    """The part of the call that is not understood, if it may use something; None if its request tells what it may
    use."""
    packed = False
    if call.encoded_body is None and (call.decision is None or call.decision.packed):
        for low, _, value in record.request.headers:
            packed |= low == b"content-encoding" and value != b"identity"
    if call.peeked is None and call.dialect.uses_tokens and not packed:
        call.peeked = peek(call.body)
    if is_read(call.dialect, call.peeked, call.body, packed):
        return None
    return unread_call(call.dialect, record.request.method, call.path)
