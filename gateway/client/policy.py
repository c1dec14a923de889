"""The part of the typed client for policies on tool calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from penstock.gateway.client.connection import ApiConnection

if TYPE_CHECKING:
    from penstock.gateway.reading.policy.backtest import BacktestCall
    from penstock.gateway.reading.policy.questions import PolicyAnswer, Question
    from penstock.gateway.reading.policy.rules import PolicyRule


class PolicyClient(ApiConnection):
    """Tests policies, and reads and answers the tool calls that wait for a person. The modules that read rules are
    imported where they are used, because few clients need them."""

    async def waiting(self) -> list[Question]:
        """Tool calls that wait for a person, the longest wait first."""
        from penstock.gateway.reading.policy.questions import QuestionList

        return (await self.get("/api/policy/waiting", QuestionList)).waiting

    async def answer_waiting(self, question: str, said: PolicyAnswer) -> Question:
        """Lets a waiting tool call run, or refuses it; returns that call."""
        from penstock.gateway.reading.policy.questions import Question

        return await self.post(f"/api/policy/waiting/{quote(question, safe='')}", Question, said)

    async def try_policy(self, rules: Sequence[PolicyRule], filter: str = "") -> AsyncIterator[BacktestCall]:
        """The effect that rules would have had on recorded tool calls, newest first."""
        from penstock.gateway.reading.policy.backtest import BacktestPage, PolicyTest

        cursor: str | None = None
        while True:
            asked = PolicyTest(rules=list(rules), filter=filter, cursor=cursor)
            page = await self.post("/api/policy/test", BacktestPage, asked)
            for call in page.calls:
                yield call
            if (cursor := page.next) is None:
                return
