"""An agent on the official OpenAI SDK that tells customers about their orders; its prompt is in its code.

It knows nothing of any gateway or trainer: OPENAI_BASE_URL and OPENAI_API_KEY say where the model is. `reward` is the
judge of `penstock run --reward examples.fast_slow_agent:reward`: the share of what the shop wants in an answer.
"""

from __future__ import annotations

from typing import Any

from openai import OpenAI

MODEL = "policy"
PROMPT = """\
You answer customers of a shop.
Confirm the order."""
NAMES = ("Ann", "Bob", "Cem", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "Jana", "Kai", "Lea")
ARTICLES = ("lamp", "chair", "desk", "rug", "shelf", "clock", "sofa", "stool", "bed", "mirror")
DAYS = ("Monday", "Tuesday", "Friday", "Sunday")
PARTS = {
    "greeting": "dear customer", "order": "we have your order", "arrival": "it arrives this week",
    "thanks": "thank you", "terms": "our terms apply", "closing": "kind regards",
}  # fmt: skip
"""What the shop wants in an answer, in this order."""


def question(task: dict[str, Any]) -> str:
    """What a customer asks."""
    return f"{task['name']} asks: {task['article']}, {task['day']}?"


def agent(task: dict[str, Any]) -> dict[str, Any]:
    """One task: its question, asked and answered."""
    messages: list[Any] = [{"role": "system", "content": PROMPT}, {"role": "user", "content": question(task)}]
    reply = OpenAI().chat.completions.create(model=MODEL, messages=messages, max_tokens=64, temperature=1.0)
    return {"answer": reply.choices[0].message.content or ""}


def reward(task: dict[str, Any], output: dict[str, Any], transcript: object) -> dict[str, Any]:
    """The share of the wanted parts that are said, and what is missing."""
    said = output["answer"].split(", ")
    missing = [name for name, text in PARTS.items() if text not in said]
    reason = "; ".join(f"the answer has no {name}" for name in missing)
    return {"reward": 1 - len(missing) / len(PARTS), "reason": reason or "all is there"}
