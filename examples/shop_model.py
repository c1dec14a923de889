"""The models of `examples.apo_demo`: one that follows the instructions in its prompt, noisily, and one that reflects.

Both are scripts behind one server of chat completions. The first writes into its answer what its system text asks for,
most of the time, and what nobody asked for some of the time. The second reads the graders' reasons in what it is asked
and names an instruction that would mend what fails most; sometimes the wrong one, or one that says nothing.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from aiohttp import web

from examples.demo.model import DemoAnswer, Json, chat, last_text
from examples.shop import ORDERS, facts

THINKER = "thinker"
"""Name of the model that reflects."""
ASKED = {
    "article": ("name the article", "Name the article that the customer asks about."),
    "greeting": ("greet the customer", "Greet the customer by name."),
    "number": ("order number", "Repeat the order number."),
    "price": ("price in euros", "Give the price in euros."),
    "arrival": ("day of arrival", "Tell the day of arrival."),
    "closing": ("kind regards", "Close with kind regards."),
}  # fmt: skip
"""What a system text must say, in any case, and how the second model puts it."""
FOLLOWED, UNASKED = 0.95, 0.25
"""Probability of each part of an answer, where it is asked for and where it is not."""
VAGUE = ("Be helpful and precise.", "Think about what the customer needs.", "Write good answers.")
UNDERSTOOD = 0.7
"""Share of its hypotheses that are right."""


class Models:
    """Both. The same question asked again gets another answer; a new server gives the same ones again."""

    def __init__(self) -> None:
        self._times: Counter[str] = Counter()

    def answer(self, asked: Json) -> DemoAnswer:
        """What is said to a request."""
        key = json.dumps(asked["messages"])
        self._times[key] += 1
        draw = random.Random(f"{key}-{self._times[key]}")
        question = last_text(asked["messages"], "user")
        if asked["model"] == THINKER:
            return DemoAnswer(json.dumps({"hypotheses": reflect(question, draw)}))
        return DemoAnswer(serve(last_text(asked["messages"], "system"), question, draw))


def serve(prompt: str, question: str, draw: random.Random) -> str:
    """An answer to a customer."""
    order = next(word for word in re.findall(r"\d+", question) if word in ORDERS)
    told = [
        text
        for name, text in facts(order).items()
        if draw.random() < (FOLLOWED if ASKED[name][0] in prompt.lower() else UNASKED)
    ]
    return ", ".join(told) or "I do not know."


def reflect(question: str, draw: random.Random) -> list[Json]:
    """Hypotheses: two of what fails, drawn by how often it does."""
    name = question.partition("## Text ")[2].split("\n", 1)[0].strip()
    counts = Counter({one: question.count(f"the answer has no {one}") for one in ASKED})
    found: list[Json] = []
    while len(found) < 2 and sum(counts.values()):
        failing = draw.choices(list(counts), list(counts.values()))[0]
        del counts[failing]
        text = ASKED[failing][1] if draw.random() < UNDERSTOOD else draw.choice(VAGUE)
        found.append(
            {"failure": f"the answer has no {failing}", "resource": name, "kind": "add", "line": 0, "text": text}
        )
    return found


@asynccontextmanager
async def serving() -> AsyncGenerator[str]:
    """The server; its URL."""
    models = Models()

    async def complete(request: web.Request) -> web.Response:
        asked = await request.json()
        return web.json_response(chat(asked, models.answer(asked)))

    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/v1/chat/completions", complete)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
