"""Policies on tool calls: calls that wait for a person, and a test of rules on recorded calls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Final

from aiohttp import web

from penstock.gateway.api.context import CONTROL, Control
from penstock.gateway.api.guard import ApiError, answer
from penstock.gateway.api.openapi import Route
from penstock.gateway.api.operations import Ids
from penstock.gateway.api.pages import Mark, Tape, Walk, decode_cursor, encode_cursor, page, span_filter, summary_of
from penstock.gateway.calls.turns import plain_bodies
from penstock.gateway.dialects.mcp import MCP
from penstock.gateway.filters.query import parse
from penstock.gateway.model.release_calls import own
from penstock.gateway.model.rollout import RolloutSummary
from penstock.gateway.model.span import Span
from penstock.gateway.policy.backtest import PolicyTest, TestedCall, TestedPage, tried
from penstock.gateway.policy.policy import Policy
from penstock.gateway.policy.questions import PolicyAnswer, Question, QuestionList
from penstock.gateway.policy.rules import check_names
from penstock.gateway.store.damage import unless_damaged

PAGE: Final = 1000
"""Most calls in one answer."""


async def get_waiting(request: web.Request) -> web.Response:
    """Tool calls that wait for a person, the longest wait first."""
    return answer(QuestionList(waiting=request.app[CONTROL].questions.waiting))


async def say(control: Control, ids: Ids, asked: PolicyAnswer) -> Question:
    """Approve or refuse a tool call that waits. It is an event on its rollout who said what, and why."""
    found = control.questions.answer(ids["question"], asked)
    if found is None:
        known = [one.id for one in control.questions.waiting]
        message = "no call waits under this id, or not any more: `penstock policy waiting` lists those that do"
        raise ApiError(404, message, "question", ids["question"], known)
    target = f"{found.rollout}/{found.attempt} {found.server}.{found.tool}"
    await control.audit_log.keep(asked, f"{asked.verdict}_call", target)
    return found


async def try_policy(control: Control, ids: Ids, asked: PolicyTest) -> TestedPage:
    """What rules would have done to recorded tool calls, and the rewards of their rollouts. Nothing is changed. Newest
    first, and a page at a time."""
    try:
        check_names(asked.rules)
    except ValueError as error:
        raise ApiError(400, str(error), "rules") from None
    query, tape = parse(asked.filter, "spans", time.time_ns()), control.tape
    policy = Policy(asked.rules, control.definitions.annotations)
    rollout_of = lru_cache(maxsize=1024)(partial(summary_of, tape))

    def walk(mark: Mark | None) -> Iterator[tuple[Mark, TestedCall | None]]:
        wanted = span_filter(tape, query)
        for position, span in tape.recent(int(mark[0]) if mark else None):
            is_call = span.kind == "tool" and span.dialect == MCP.name and not own(span)
            found = rollout_of(span.rollout) if is_call and wanted(span) else None
            yield (position,), None if found is None else _tried(tape, policy, span, found)

    walked: Walk[TestedCall] = walk
    found = await page(walked, decode_cursor("recent", asked.cursor), PAGE, run=control.heavy.run)
    return TestedPage(calls=found.rows, next=encode_cursor("recent", found.mark), scanned=found.scanned)


def _tried(tape: Tape, policy: Policy, span: Span, rollout: RolloutSummary) -> TestedCall | None:
    """The test of rules on a recorded call; None if its bytes are not stored, or damaged."""
    exchange, server = unless_damaged(partial(tape.exchange, span)), span.upstream or ""
    if exchange is None:
        return None
    tool, said = tried(policy, server, rollout.mode, plain_bodies(exchange)[0])
    place = {"rollout": span.rollout, "attempt": span.attempt, "span": span.sequence}
    return TestedCall.model_validate({**place, **said, "server": server, "tool": tool, "reward": rollout.reward})


ROUTES: tuple[Route, ...] = (
    Route("GET", "/api/policy/waiting", "waiting", "Tool calls that wait for a person", QuestionList, get_waiting),
    Route(
        "POST", "/api/policy/waiting/{question}", "answer_waiting", "Let a tool call run, or not",
        Question, say, body=PolicyAnswer, errors=(404,),
    ),
    Route(
        "POST", "/api/policy/test", "test_policy", "Try rules on recorded calls",
        TestedPage, try_policy, body=PolicyTest, reads=True,
    ),
)  # fmt: skip
"""This part of the API."""
