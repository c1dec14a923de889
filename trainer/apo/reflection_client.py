"""The reflecting model: any model that the gateway reaches. Each question is an attempt of one rollout on the tape.

The attempt's id follows from the model and the question, so a restarted run finds its earlier answers on the tape, and
asks nothing twice.

If the gateway is away, the question waits. If the model is busy or fails, it is asked again, a little later each time.
A question that it refuses is not asked again. An empty answer is an answer: it was paid for, and engines leave it out.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any, Final, NamedTuple

import aiohttp

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.connection import base_of
from penstock.gateway.model.answers import SpanDetail
from penstock.gateway.model.change import Change
from penstock.gateway.model.span import Estimate, Span, Usage
from penstock.trainer.apo.config import ReflectionSettings as Settings
from penstock.trainer.apo.protocol import Reflection
from penstock.trainer.runs.run_end import RunError

PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0)
"""Pauses before a busy or failed model is asked again; after the last one the run stops."""
AWAY_S: Final = 1.0
"""Pause before a gateway that is away is tried again."""
PATIENCE_S: Final = 900.0
"""Time limit of an answer, and of waiting for a gateway that is away."""
RECORDED_S: Final = 10.0
"""Time limit for an answer to be on the tape: it takes milliseconds unless the gateway was killed."""
BUSY: Final = frozenset({408, 409, 425, 429})
"""Statuses below 500 after which the same question may be answered."""
TEMPLATE_TOKENS: Final = 64
"""Most tokens that a model's template adds to a question."""
NOT_FOUND: Final = 404
AGENT: Final = "reflection"
"""Name of the agent in these calls."""


class QuestionFailure(NamedTuple):
    """A question without an answer, and the error."""

    status: int | None
    """The gateway's status; None if it is away."""
    text: str
    """The error for a person."""

    @property
    def final(self) -> bool:
        """True if asking again would be of no use."""
        return self.status is not None and self.status < 500 and self.status not in BUSY


class ReflectionClient:
    """Asks the reflecting model of one run."""

    def __init__(self, client: Client, http: aiohttp.ClientSession, url: str, rollout: str, settings: Settings) -> None:
        """`url`: the gateway's; `http`: carries the agent token of `rollout`, to which all calls belong."""
        self._client, self._http, self._url, self._settings = client, http, base_of(url), settings
        self._rollout = rollout

    def most(self, prompt: str) -> tuple[int, float]:
        """Return the most tokens and money that a question can use. Each byte counts as a token; four bytes a token are
        usual."""
        read, written = len(prompt.encode()) + TEMPLATE_TOKENS, self._settings.most_tokens
        return read + written, self._price(read, written)

    def _price(self, read: int, written: int) -> float:
        price_in, price_out = self._settings.price
        return (read * price_in + written * price_out) / 1e6

    async def ask(self, prompt: str, number: int) -> Reflection:
        """Return the answer, from the tape if it is there. Raises `RunError`."""
        question = f"{self._settings.model}\0{prompt}"
        attempt = f"{hashlib.sha256(question.encode()).hexdigest()[:16]}-{number}"
        clock = asyncio.get_running_loop().time
        pauses, end = iter(PAUSES_S), clock() + PATIENCE_S
        while True:
            answered = await self._answered(attempt)
            if answered is not None:
                return self._read(answered)
            cursor = (await self._client.stats(spans=0)).cursor
            failed = await self._post(prompt, attempt)
            if failed is None:
                await self._recorded(attempt, cursor)
                if (answered := await self._answered(attempt)) is not None:
                    return self._read(answered)
                # Each attempt may be paid for, so their number is limited.
                failed = QuestionFailure(
                    502, f"no good answer is on the tape; penstock show {self._rollout} has what it said"
                )
            pause = AWAY_S if failed.status is None else next(pauses, None)
            if failed.final or pause is None or clock() > end:
                raise RunError(f"the reflecting model {self._settings.model!r} does not answer: {failed.text}")
            await asyncio.sleep(pause)

    async def _answered(self, attempt: str) -> SpanDetail | None:
        """Return the successful call of an attempt; None without one."""
        try:
            spans = [span async for span in self._client.spans(self._rollout, attempt)]
        except ClientError as error:
            if error.status != NOT_FOUND:
                raise
            return None
        found = next(filter(_good, spans), None)
        if found is None:
            return None
        return await self._client.span(self._rollout, attempt, found.sequence, "none")

    async def _recorded(self, attempt: str, cursor: int) -> None:
        """Wait until the call of an attempt is on the tape: a decision that depends on an answer must find it there
        again. If the gateway was killed it may have lost it; then the wait times out, and the question is asked again.
        """
        with suppress(TimeoutError):
            async with (
                asyncio.timeout(RECORDED_S),
                aclosing(self._client.changes(cursor, ["span"], [self._rollout])) as changes,
            ):
                await self._ended(attempt, changes)

    async def _ended(self, attempt: str, changes: AsyncIterator[Change]) -> None:
        async for change in changes:
            span = change.span
            if span is not None and (span.rollout, span.attempt) == (self._rollout, attempt) and _good(span):
                return

    async def _post(self, prompt: str, attempt: str) -> QuestionFailure | None:
        """Send a question; return the error, or None if it was answered."""
        asked: dict[str, Any] = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_completion_tokens": self._settings.most_tokens,
        }
        address = f"{self._url}/rollout/{self._rollout}/attempt/{attempt}/agent/{AGENT}/mode/train/v1/chat/completions"
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        try:
            async with self._http.post(address, json=asked, timeout=timeout) as answer:
                said = await answer.text(errors="replace")
                return None if answer.ok else QuestionFailure(answer.status, f"{answer.status}: {_message(said)}")
        except TimeoutError:
            return QuestionFailure(504, f"no answer in {PATIENCE_S:g} s")
        except aiohttp.ClientError as error:
            return QuestionFailure(None, str(error) or type(error).__name__)

    def _read(self, detail: SpanDetail) -> Reflection:
        choices = [] if detail.turn is None else detail.turn.choices
        parts = choices[0].message.parts if choices else []
        text = "".join(part.text or "" for part in parts if part.type == "text")
        counted = detail.span.usage or Usage()
        guessed = detail.span.estimate or Estimate()
        read = counted.input_tokens or guessed.input_tokens or 0
        written = counted.output_tokens or guessed.output_tokens or 0
        return Reflection(text, read + written, self._price(read, written))


def _good(span: Span) -> bool:
    return span.kind == "llm" and span.status == "ok"


def _message(body: str) -> str:
    """Return the message of an error, in whatever shape its API gives it."""
    try:
        found = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        found = body
    return str(found)[:500]
