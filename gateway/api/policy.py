"""Policies on tool calls: calls that wait for a person, and a test of rules on recorded calls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Final

from aiohttp import web

from penstock.gateway.api.context import CONTROL, Control
from penstock.gateway.api.guard import ApiError, answer
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.operations import Ids
from penstock.gateway.api.pagination import (
    Mark,
    TapeSource,
    Walk,
    decode_cursor,
    encode_cursor,
    page,
    span_filter,
    summary_of,
)
from penstock.gateway.model.release_calls import is_release_call
from penstock.gateway.model.rollout import RolloutSummary
from penstock.gateway.model.span import Span
from penstock.gateway.reading.filters.query import parse
from penstock.gateway.reading.policy.backtest import BacktestCall, BacktestPage, PolicyTest, backtest_call
from penstock.gateway.reading.policy.policy import ToolPolicy
from penstock.gateway.reading.policy.questions import PolicyAnswer, Question, QuestionList
from penstock.gateway.reading.policy.rules import check_names
from penstock.gateway.reading.turns import plain_bodies
from penstock.gateway.tape.store.damage import unless_damaged
from penstock.gateway.wire.dialects.mcp import MCP

PAGE: Final = 1000
"""Most calls in one answer."""


async def get_waiting(request: web.Request) -> web.Response:
    """Tool calls that wait for a person, the longest wait first."""
    return answer(QuestionList(waiting=request.app[CONTROL].questions.waiting))


async def answer_question(control: Control, ids: Ids, asked: PolicyAnswer) -> Question:
    """Approve or refuse a tool call that waits. It is an event on its rollout who said what, and why."""
    found = control.questions.answer(ids["question"], asked)
    if found is None:
        known = [one.id for one in control.questions.waiting]
        message = "no call waits under this id, or not any more: `penstock policy waiting` lists those that do"
        raise ApiError(404, message, "question", ids["question"], known)
    target = f"{found.rollout}/{found.attempt} {found.server}.{found.tool}"
    await control.audit_log.record(asked, f"{asked.verdict}_call", target)
    return found


async def try_policy(control: Control, ids: Ids, asked: PolicyTest) -> BacktestPage:
    """What rules would have done to recorded tool calls, and the rewards of their rollouts. Nothing is changed. Newest
    first, and a page at a time."""
    try:
        check_names(asked.rules)
    except ValueError as error:
        raise ApiError(400, str(error), "rules") from None
    query, tape = parse(asked.filter, "spans", time.time_ns()), control.tape
    policy = ToolPolicy(asked.rules, control.definitions.annotations)
    rollout_of = lru_cache(maxsize=1024)(partial(summary_of, tape))

    def walk(mark: Mark | None) -> Iterator[tuple[Mark, BacktestCall | None]]:
        wanted = span_filter(tape, query)
        for position, span in tape.recent(int(mark[0]) if mark else None):
            is_call = span.kind == "tool" and span.dialect == MCP.name and not is_release_call(span)
            found = rollout_of(span.rollout) if is_call and wanted(span) else None
            yield (position,), None if found is None else _tried(tape, policy, span, found)

    walked: Walk[BacktestCall] = walk
    found = await page(walked, decode_cursor("recent", asked.cursor), PAGE, run=control.heavy.run)
    return BacktestPage(calls=found.rows, next=encode_cursor("recent", found.mark), scanned=found.scanned)


def _tried(tape: TapeSource, policy: ToolPolicy, span: Span, rollout: RolloutSummary) -> BacktestCall | None:
    """The test of rules on a recorded call; None if its bytes are not stored, or damaged."""
    exchange, server = unless_damaged(partial(tape.exchange, span)), span.upstream or ""
    if exchange is None:
        return None
    tool, said = backtest_call(policy, server, rollout.mode, plain_bodies(exchange)[0])
    place = {"rollout": span.rollout, "attempt": span.attempt, "span": span.sequence}
    return BacktestCall.model_validate({**place, **said, "server": server, "tool": tool, "reward": rollout.reward})


ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/api/policy/waiting", "waiting", "Tool calls that wait for a person", QuestionList, get_waiting),
    ApiRoute(
        "POST", "/api/policy/waiting/{question}", "answer_waiting", "Let a tool call run, or not",
        Question, answer_question, body=PolicyAnswer, errors=(404,),
    ),
    ApiRoute(
        "POST", "/api/policy/test", "test_policy", "Try rules on recorded calls",
        BacktestPage, try_policy, body=PolicyTest, reads=True,
    ),
)  # fmt: skip
"""This part of the API."""
