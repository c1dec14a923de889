"""Functions of which several attempts share a process."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, OpenAI

import penstock

TOGETHER = 3
_threads, _tasks = threading.Barrier(TOGETHER), asyncio.Barrier(TOGETHER)
_client = OpenAI(base_url="http://127.0.0.1:9", api_key="none", max_retries=0)
"""Made once for all attempts: each takes a copy with its own address."""


def asks(task: Any, address: penstock.Address) -> dict[str, Any]:
    """A sync agent; comes to its end when three run at the same time."""
    _ = _threads.wait(60)
    client = _client.with_options(base_url=address.openai_url, api_key=address.token)
    answer = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": task}])
    print(f"asked {task}")
    penstock.event("asked", {"task": task})
    return {"pid": os.getpid(), "answer": answer.choices[0].message.content, "rollout": address.rollout, "reward": 1}


async def later(task: Any) -> dict[str, Any]:
    """An async agent that does the same."""
    async with asyncio.timeout(60):
        _ = await _tasks.wait()
    address = penstock.address()
    assert address is not None
    async with AsyncOpenAI(base_url=address.openai_url, api_key=address.token, max_retries=0) as client:
        answer = await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": task}])
    print(f"asked {task}")
    penstock.event("asked", {"task": task})
    return {"pid": os.getpid(), "answer": answer.choices[0].message.content, "rollout": address.rollout, "reward": 1}


def stuck(task: Any, address: penstock.Address) -> dict[str, Any]:
    """Says where it is, and stays there if it is told to."""
    if task is not None:
        Path(task).write_text(str(os.getpid()))
        time.sleep(600)
    return {"pid": os.getpid()}


async def waits(task: Any) -> None:
    """May be told to stop."""
    _ = await asyncio.to_thread(Path(task).write_text, str(os.getpid()))
    await asyncio.sleep(600)


def leaves(task: Any) -> None:
    """Ends the process under all others."""
    os._exit(3)


def by_variable(task: Any) -> None:
    """Looks for its model where there is none."""
    _ = OpenAI(max_retries=0).chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}])
