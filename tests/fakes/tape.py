"""What is on a gateway's tape, read as anybody would: through its control API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
from fakes.waiting import until, when

from penstock.gateway.model.answers import SpanDetail, SpanPage
from penstock.gateway.model.span import Span, SpanStatus


@dataclass(frozen=True, slots=True)
class Tape:
    """The tape of the gateway at this URL."""

    url: str
    http: aiohttp.ClientSession

    async def get(self, path: str) -> Any:
        """A JSON document; anything but 200 fails the test with what was said."""
        async with self.http.get(self.url + path) as response:
            assert response.status == 200, f"GET {path}: {response.status} {await response.text()}"
            return await response.json()

    async def written(self) -> None:
        """Comes back as soon as all calls that were answered are on it."""

        async def idle() -> bool:
            async with self.http.get(f"{self.url}/metrics") as response:
                figures = (await response.text()).splitlines()
            return {"penstock_inflight_calls 0.0", "penstock_recorder_queue_calls 0.0"} <= set(figures)

        await until(idle)

    async def spans(self, rollout: str, count: int, attempt: str = "a1") -> list[Span]:
        """The finished spans of an attempt, as soon as there are `count` of them; more or fewer fail the test."""
        heads = finished(await self.when(rollout, attempt, lambda heads: len(finished(heads)) >= count))
        assert len(heads) == count, heads
        return heads

    async def open_span(self, rollout: str, attempt: str = "a1", name: str | None = None) -> Span:
        """A span that is still running, as soon as there is one. `name`: its own; one of an earlier call, which took a
        while and whose end is not on the tape yet, is another."""

        def running(heads: list[Span]) -> list[Span]:
            return [span for span in heads if span.status == SpanStatus.OPEN and name in (None, span.name)]

        return running(await self.when(rollout, attempt, lambda heads: bool(running(heads))))[0]

    async def when(self, rollout: str, attempt: str, condition: Callable[[list[Span]], bool]) -> list[Span]:
        """The spans of an attempt, as soon as the condition holds for them."""
        return await when(lambda: self._heads(rollout, attempt), condition, "the tape")

    async def _heads(self, rollout: str, attempt: str) -> list[Span]:
        """Heads by sequence; none while the rollout is not known yet."""
        path = f"/api/rollouts/{rollout}/attempts/{attempt}/spans"
        async with self.http.get(self.url + path) as response:
            if response.status == 404:
                return []
            page = SpanPage.model_validate_json(await response.read())
        return sorted(page.spans, key=lambda span: span.sequence)

    async def detail(self, span: Span) -> SpanDetail:
        """The whole span."""
        return SpanDetail.model_validate(await self.get(self._path(span)))

    async def raw(self, span: Span, side: Literal["request", "response"], who: str | None = None) -> bytes:
        """The recorded bytes of a body. `who`: the party whose side it is, where that is not the exchange's own."""
        asked = {} if who is None else {"side": who}
        async with self.http.get(f"{self.url}{self._path(span)}/{side}", params=asked) as response:
            assert response.status == 200, await response.text()
            return await response.read()

    def _path(self, span: Span) -> str:
        return f"/api/rollouts/{span.rollout}/attempts/{span.attempt}/spans/{span.sequence}"


def finished(heads: list[Span]) -> list[Span]:
    """Those that will not change any more."""
    return [span for span in heads if span.status != SpanStatus.OPEN]
