"""An agent that can be touched: it says what it does, in every way there is. Its types are checked strictly."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Mapping
from urllib.request import Request, urlopen

import penstock


def ask(question: str, headers: Mapping[str, str] | None = None) -> str:
    """A model call."""
    body = {"model": "fake", "messages": [{"role": "user", "content": question}]}
    told = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url, told = os.environ["OPENAI_BASE_URL"] + "/chat/completions", told | dict(headers or {})
    with urlopen(Request(url, json.dumps(body).encode(), told)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


@penstock.span("look up", {"kind": "tool"})
def look_up(word: str) -> int:
    """A function that is a span."""
    return len(word)


@penstock.span("look up later")
async def look_up_later(word: str) -> int:
    """The same, async."""
    await asyncio.sleep(0)
    return len(word)


def nested() -> None:
    """Spans in each other, a call and an event in them, one that fails."""
    with penstock.span("plan", {"goal": "Rome", "steps": [1, 2]}, tries=2) as plan:
        _ = ask("where to?")
        with penstock.span("search") as search:
            penstock.event("cart", {"items": 3}, full=False)
            search.set_attributes({"hits": 12}, best=0.5)
        try:
            with penstock.span("book"):
                raise ValueError("no seat")
        except ValueError:
            plan.set_attributes(booked=False)
        assert look_up("train") == 5
    penstock.reward(0.7, style=1, reason="felt good")


async def beside_each_other() -> None:
    """Async spans that are open at the same time; the headers say which one a call belongs to."""

    async def branch(name: str) -> None:
        async with penstock.span(name) as span:
            async with both:
                both.notify_all()
                opened.append(name)
                _ = await both.wait_for(lambda: len(opened) == 2)
            _ = await asyncio.to_thread(ask, f"from {name}", span.headers)
            assert await look_up_later(name) == len(name)

    both, opened = asyncio.Condition(), list[str]()
    async with penstock.span("together"):
        _ = await asyncio.gather(branch("left"), branch("right"))


def in_threads() -> None:
    """A thread begins outside of every span, unless it is given the context."""

    def work(name: str) -> None:
        with penstock.span(name):
            penstock.event("worked", {"in": name})

    with penstock.span("outer"):
        alone = threading.Thread(target=work, args=("alone",))
        inside = threading.Thread(target=contextvars.copy_context().run, args=(work, "inside"))
        for thread in (alone, inside):
            thread.start()
        for thread in (alone, inside):
            thread.join()


def in_a_child() -> None:
    """A child process speaks for the same attempt, and loses nothing at its end."""
    with penstock.span("parent"):
        child = multiprocessing.get_context("fork").Process(target=_child)
        child.start()
        child.join()


def _child() -> None:
    with penstock.span("child"):
        penstock.event("born")


def odd() -> None:
    """Values of all kinds, and an end by exception."""

    class Silent:
        def __str__(self) -> str:
            raise RuntimeError("no")

    circle: list[object] = []
    circle.append(circle)
    values = {"big": 2**70, "nan": float("nan"), "circle": circle, "silent": Silent(), "surrogate": "\ud800", "": None}
    penstock.event("", values)
    penstock.reward(float("nan"))
    penstock.reward(dimension=float("inf"))
    with penstock.span("", values):
        sys.exit("lost the way")


def at_the_end() -> None:
    """Whoever speaks when the main thread has ended is heard: another thread, and what runs at exit."""

    def late() -> None:
        threading.main_thread().join()
        penstock.event("from a thread")

    def at_exit() -> None:
        with penstock.span("at exit"):
            penstock.reward(0.5)

    _ = atexit.register(at_exit)
    threading.Thread(target=late).start()


def abrupt() -> None:
    """An end that waits for nothing."""
    penstock.event("last words")
    assert penstock.flush(60)
    os._exit(0)


def work(task: str) -> None:
    """The agent, for `--callable`."""
    done = {"nested": nested, "threads": in_threads, "child": in_a_child, "odd": odd}
    done |= {"end": at_the_end, "abrupt": abrupt}
    if task == "async":
        asyncio.run(beside_each_other())
    else:
        done[task]()


if __name__ == "__main__":
    work(json.loads(os.environ["PENSTOCK_INPUT"]))
