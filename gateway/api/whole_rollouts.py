"""Many rollouts in one answer, with their spans and the bytes of their calls: the data of a training step.

The answer is a stream of parts (`client.exchanges`), read from the tape a megabyte at a time, as fast as the client
takes it. So neither side holds more than a block of it, however much is requested.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from typing import Final, get_args

from aiohttp import web
from pydantic import Field

from penstock.gateway.api.context import CONTROL
from penstock.gateway.api.guard import ApiError, query_of
from penstock.gateway.api.openapi import OCTETS
from penstock.gateway.api.pagination import TapeSource, summary
from penstock.gateway.api.rollouts import MOST_IDS, ids_of
from penstock.gateway.client.exchanges import CallBytes, CallPart, Part, RolloutPart, SpanPart, pack
from penstock.gateway.model.base import Noun, SpanKind
from penstock.gateway.model.rollout import Rollout
from penstock.gateway.reading.turns import plain_bodies

KIND: Final = f"({'|'.join(get_args(SpanKind))})"


class WholeRolloutsQuery(Noun):
    """Parameters of whole rollouts."""

    ids: str = Field(max_length=MOST_IDS * 129)
    """These rollouts, at most 200, with commas between their ids; they come in this order."""
    kind: str | None = Field(default=None, pattern=f"^{KIND}(,{KIND})*$")
    """Only spans of these kinds, with commas between them."""


async def get_whole(request: web.Request) -> web.StreamResponse:
    """Rollouts with their spans and the bytes of their model calls, content encodings removed. Each part is a length (4
    bytes, big endian) and a MessagePack array: `rollout` and the rollout as JSON; then for each of its spans `span` and
    its head as JSON; then for each call whose bytes are kept `call` and an array of attempt, sequence, request body and
    response body. Fields that have their usual value are left out of the JSON."""
    asked, control = query_of(request, WholeRolloutsQuery), request.app[CONTROL]
    tape = control.tape
    ids = ids_of(asked.ids)
    known = {rollout.id: rollout for _, rollout in await asyncio.to_thread(tape.named, ids)}
    missing = next((rid for rid in ids if rid not in known), None)
    if missing is not None:
        raise ApiError(404, f"there is no rollout {missing!r}; `penstock rollouts` lists them", "ids", missing)
    kinds = frozenset(get_args(SpanKind)) if asked.kind is None else frozenset(asked.kind.split(","))
    parts = map(pack, _parts(tape, [known[rid] for rid in ids], kinds))
    response = web.StreamResponse(headers={"Content-Type": OCTETS})
    await response.prepare(request)
    await control.heavy.stream(response, parts)
    return response


def _parts(tape: TapeSource, rollouts: Sequence[Rollout], kinds: Collection[str]) -> Iterator[Part]:
    for rollout in rollouts:
        whole = summary(tape, rollout)
        yield RolloutPart(whole.model_dump_json(exclude_defaults=True).encode())
        of_all = (tape.spans(rollout.id, attempt.id) for attempt in whole.attempts)
        spans = [span for of_one in of_all for span in of_one if span.kind in kinds]
        for span in spans:
            yield SpanPart(span.model_dump_json(exclude_defaults=True).encode())
        for span, exchange in tape.exchanges(span for span in spans if span.kind == "llm"):
            if exchange is not None:
                yield CallPart(CallBytes(span.attempt, span.sequence, *plain_bodies(exchange)))
