"""The reflecting model: any model that the gateway reaches. Each question is an attempt of one rollout on the tape.

The attempt is named by the model and the question, so a run that is started again finds the answers of its earlier life
on the tape, and asks nothing twice.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import aclosing
from typing import Any, Final

import aiohttp

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.answers import SpanDetail
from penstock.gateway.model.span import Estimate, Usage
from penstock.trainer.apo.config import Reflection as Settings
from penstock.trainer.apo.protocol import Reflection
from penstock.trainer.runs.ending import RunError

TRIES: Final = 3
PATIENCE_S: Final = 900.0
NOT_FOUND: Final = 404
AGENT: Final = "reflection"
"""Name of the agent that these calls are of."""


class Reflecting:
    """Asks the reflecting model of one run."""

    def __init__(self, client: Client, http: aiohttp.ClientSession, url: str, rollout: str, settings: Settings) -> None:
        """`url`: of the gateway; `http`: carries the agent token of `rollout`, which all calls belong to."""
        self._client, self._http, self._url, self._settings = client, http, url.rstrip("/"), settings
        self._rollout = rollout

    def most(self, prompt: str) -> tuple[int, float]:
        """The most tokens and money that a question can use. Two bytes are a token at least: the usual is four."""
        read, written = len(prompt.encode()) // 2, self._settings.most_tokens
        return read + written, self._price(read, written)

    def _price(self, read: int, written: int) -> float:
        return (read * self._settings.price_in + written * self._settings.price_out) / 1e6

    async def ask(self, prompt: str, number: int) -> Reflection:
        """The answer, from the tape where it is there. Raises `RunError`."""
        question = f"{self._settings.model}\0{prompt}"
        attempt = f"{hashlib.sha256(question.encode()).hexdigest()[:16]}-{number}"
        told = ""
        for _ in range(TRIES):
            answered = await self._answered(attempt)
            if answered is not None:
                return self._read(answered)
            cursor = (await self._client.stats(spans=0)).cursor
            told = await self._post(prompt, attempt)
            if not told:
                await self._recorded(attempt, cursor)
        raise RunError(f"the reflecting model {self._settings.model!r} does not answer: {told}")

    async def _answered(self, attempt: str) -> SpanDetail | None:
        """The call of an attempt that was answered."""
        try:
            spans = [span async for span in self._client.spans(self._rollout, attempt)]
        except ClientError as error:
            if error.status != NOT_FOUND:
                raise
            return None
        found = next((span for span in spans if span.kind == "llm" and span.status == "ok"), None)
        if found is None:
            return None
        return await self._client.span(self._rollout, attempt, found.sequence, "none")

    async def _recorded(self, attempt: str, cursor: int) -> None:
        """Waits until the call of an attempt is on the tape: what is decided by an answer must find it there again."""
        async with asyncio.timeout(PATIENCE_S), aclosing(self._client.changes(cursor)) as changes:
            async for change in changes:
                span = change.span
                if (
                    span is not None
                    and (span.rollout, span.attempt) == (self._rollout, attempt)
                    and span.end_ns is not None
                ):
                    return

    async def _post(self, prompt: str, attempt: str) -> str:
        """Asks; what was wrong, for a person, or nothing."""
        asked: dict[str, Any] = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_completion_tokens": self._settings.most_tokens,
        }
        if self._settings.temperature is not None:
            asked["temperature"] = self._settings.temperature
        address = f"{self._url}/rollout/{self._rollout}/attempt/{attempt}/agent/{AGENT}/mode/train/v1/chat/completions"
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        try:
            async with self._http.post(address, json=asked, timeout=timeout) as answer:
                said = await answer.text()
                return "" if answer.ok else f"{answer.status}: {said[:500]}"
        except (aiohttp.ClientError, TimeoutError) as error:
            return str(error) or "no answer in time"

    def _read(self, detail: SpanDetail) -> Reflection:
        choices = [] if detail.turn is None else detail.turn.choices
        parts = choices[0].message.parts if choices else []
        text = "".join(part.text or "" for part in parts if part.type == "text")
        counted = detail.span.usage or Usage()
        guessed = detail.span.estimate or Estimate()
        read = counted.input_tokens or guessed.input_tokens or 0
        written = counted.output_tokens or guessed.output_tokens or 0
        return Reflection(text, read + written, self._price(read, written))
