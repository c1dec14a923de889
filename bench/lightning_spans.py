"""Spans a second through Agent Lightning's own client: this gateway beside its in-memory server, in one run.

`PYTHON -m bench.lightning_spans GATEWAY_URL [SPANS]`, where PYTHON has `agentlightning==0.3.0`; it starts their server
itself. `client` sends spans by `add_many_spans`, which posts them one after the other; `raw` posts the same bodies by
aiohttp. The gateway answers a span when it is on the disk, their server when it is in its memory.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from typing import Any

import aiohttp

theirs: Any = import_module("agentlightning.store.client_server")
memory: Any = import_module("agentlightning.store.memory")
types: Any = import_module("agentlightning.types")

CONCURRENT = (1, 16)
PORT = 14790


def spans_of(rollout: str, attempt: str, count: int, first: int) -> list[Any]:
    """Spans as an instrumented call has them: 30 attributes, a message of 1 KB."""
    attributes: dict[str, Any] = {f"gen_ai.attribute.{at}": at for at in range(28)}
    attributes |= {"gen_ai.prompt.0.content": "word " * 200, "response_token_ids": list(range(64))}
    return [
        types.Span(
            rollout_id=rollout, attempt_id=attempt, sequence_id=first + at, trace_id=f"{first + at:032x}",
            span_id=f"{first + at:016x}", parent_id=None, name="openai.chat.completion",
            status=types.TraceStatus(status_code="OK"), attributes=attributes, events=[], links=[],
            start_time=time.time(), end_time=time.time(), context=None, parent=None,
            resource=types.OtelResource(attributes={"service.name": "bench"}, schema_url=""),
        )
        for at in range(count)
    ]  # fmt: skip


async def measured(url: str, concurrent: int, count: int, by: str) -> float:
    """Send spans; return how many a second were answered."""
    clients = [theirs.LightningStoreClient(url) for _ in range(concurrent)]
    session = aiohttp.ClientSession()
    sending: list[Callable[[], Awaitable[Any]]] = []
    for client in clients:
        had = await client.start_rollout(input={})
        made = spans_of(had.rollout_id, had.attempt.attempt_id, count // concurrent, 1)
        if by == "client":
            sending.append(lambda client=client, made=made: client.add_many_spans(made))
        else:
            bodies = [json.dumps(one.model_dump(mode="json")).encode() for one in made]
            sending.append(lambda bodies=bodies: posted(session, url, bodies))
    began = time.perf_counter()
    await asyncio.gather(*(send() for send in sending))
    took = time.perf_counter() - began
    for closing in (session, *clients):
        await closing.close()
    return count // concurrent * concurrent / took


async def posted(session: aiohttp.ClientSession, url: str, bodies: Sequence[bytes]) -> None:
    """Post bodies one after the other."""
    for body in bodies:
        async with session.post(f"{url}/v1/agl/spans", data=body, headers={"Content-Type": "application/json"}) as made:
            _ = await made.read()
            assert made.status == 201, made.status


async def main(ours: str, count: int) -> None:
    """Print a line for each way and number of senders."""
    server = theirs.LightningStoreServer(memory.InMemoryLightningStore(), "127.0.0.1", PORT, launch_mode="thread")
    await server.start()
    print(f"{'':8}{'senders':>8}{'gateway':>10}{'theirs':>10}{'ratio':>8}")
    for by in ("client", "raw"):
        for concurrent in CONCURRENT:
            own = max([await measured(ours, concurrent, count, by) for _ in range(2)])
            other = max([await measured(f"http://127.0.0.1:{PORT}", concurrent, count, by) for _ in range(2)])
            print(f"{by:8}{concurrent:>8}{own:>10.0f}{other:>10.0f}{own / other:>8.1f}", flush=True)
    await server.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 400))
