"""Functions of which several attempts share a process."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import penstock

TOGETHER = 3
_threads, _tasks = threading.Barrier(TOGETHER), asyncio.Barrier(TOGETHER)


def ask(url: str, key: str, question: str) -> str:
    """A model call. The official SDK would take longer to be imported than all else."""
    body = {"model": "fake", "messages": [{"role": "user", "content": question}]}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        with urlopen(Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
    except HTTPError as error:
        raise RuntimeError(error.read().decode()) from None


def asked(task: Any, address: penstock.Address) -> dict[str, Any]:
    """What an agent returns that has asked its model."""
    answer = ask(address.openai_url, address.token, task)
    print(f"asked {task}")
    penstock.event("asked", {"task": task})
    return {"pid": os.getpid(), "answer": answer, "rollout": address.rollout, "reward": 1}


def asks(task: Any, address: penstock.Address) -> dict[str, Any]:
    """A sync agent; comes to its end when three run at the same time."""
    _ = _threads.wait(60)
    return asked(task, address)


async def later(task: Any) -> dict[str, Any]:
    """An async agent that does the same."""
    async with asyncio.timeout(60):
        _ = await _tasks.wait()
    address = penstock.address()
    assert address is not None
    return await asyncio.to_thread(asked, task, address)


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
    _ = ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], "hi")
