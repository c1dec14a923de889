"""Finds the budgets that count a call, and the most that it may use of each. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from penstock.gateway.model.budget import BudgetScope
from penstock.gateway.model.prices import Price
from penstock.gateway.traffic.budgets.bounds import (
    PromptCounter,
    TokenBound,
    UnreadCall,
    bound,
    is_read,
    known_model,
    unread_call,
)
from penstock.gateway.traffic.budgets.limits import MOST, Limit, nanodollars
from penstock.gateway.traffic.budgets.operations import BudgetClaim
from penstock.gateway.traffic.budgets.refusal import uncountable, unpriced
from penstock.gateway.traffic.calls.call_record import CallRecord
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.wire.dialects.loose_json import peek


def budgets_of(limits: Iterable[Limit], call: CallRequest, record: CallRecord) -> list[tuple[Limit, str | None]]:
    """The budgets that count a call, each with its owner; None for the run of its rollout, which the tape knows."""
    model = known_model(call.model, call.dialect, call.path)
    return [
        (limit, of)
        for limit in limits
        for of in _WHOSE[limit.budget.per](call, record)
        if (of is None or limit.is_for(of)) and limit.is_about(model)
    ]


def claims_of(
    found: Sequence[tuple[Limit, str | None]],
    asked: TokenBound | UnreadCall,
    model: str | None,
    prices: Sequence[Price],
    body: bytes,
) -> Iterator[BudgetClaim]:
    """Yield the claims of a call on these budgets; raises `Refusal` if its use cannot be counted and a budget refuses
    that. `prices`: the prices that it may have; `body`: its request."""
    for limit, of in found:
        budget = limit.budget
        if isinstance(asked, UnreadCall):
            if budget.refuses_unknown:
                raise uncountable(budget, asked)
            yield BudgetClaim(limit, of, int(budget.unit == "calls"), unread=True)
        elif budget.unit == "calls":
            yield BudgetClaim(limit, of, 1)
        elif budget.unit == "tokens":
            yield BudgetClaim(limit, of, min(MOST, asked.prompt + asked.answer_tokens))
        elif prices:
            answer = min(MOST, asked.answer_tokens)
            yield BudgetClaim(
                limit, of, min(MOST, nanodollars(max(price.most(asked.prompt, answer, body) for price in prices)))
            )
        elif budget.refuses_unknown:
            raise unpriced(budget, model)


def bound_of(prompts: PromptCounter, call: CallRequest, record: CallRecord) -> TokenBound:
    """Most tokens that the call may use."""
    conversation = (call.address.rollout, call.address.attempt)
    prompt = prompts.tokens(conversation, call.body)
    if record.changed:
        prompt = max(prompt, prompts.tokens((*conversation, "sent"), record.plain))
    call.peeked = call.peeked or peek(call.body)
    return bound(call.dialect, call.peeked, prompt)


def unread_of(call: CallRequest, record: CallRecord) -> UnreadCall | None:
    """The part of the call that is not understood, if it may use something; None if its request tells what it may
    use."""
    names = [value for low, _, value in record.request.headers if low == b"content-encoding"]
    packed = call.encoded_body is None and any(value != b"identity" for value in names)
    if call.dialect.uses_tokens and not packed:
        call.peeked = call.peeked or peek(call.body)
    if is_read(call.dialect, call.peeked, call.body, packed):
        return None
    return unread_call(call.dialect, record.request.method, call.path)


def _some(name: str | None) -> tuple[str, ...]:
    return () if name is None else (name,)


_WHOSE: Final[Mapping[BudgetScope, Callable[[CallRequest, CallRecord], tuple[str | None, ...]]]] = {
    "all": lambda call, record: ("",),
    "key": lambda call, record: _some(call.key),
    "agent": lambda call, record: _some(call.address.agent),
    "rollout": lambda call, record: (call.address.rollout,),
    "run": lambda call, record: (None,),
    "arm": lambda call, record: tuple(record.arm.split(",")) if record.arm else (),
}
