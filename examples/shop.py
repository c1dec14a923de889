"""An agent on the official OpenAI SDK that answers customers of a shop; its prompt is in its code.

It knows nothing of any gateway: OPENAI_BASE_URL and OPENAI_API_KEY say where the model is. A task comes on stdin, the
answer goes to stdout. `reward` is the judge of `penstock run --reward examples.shop:reward`: the share of what the shop
wants in an answer, and what is missing.
"""

import json
import sys
from typing import Any

from openai import OpenAI

MODEL = "shop-7b"
PROMPT = """\
You answer customers of Acme, a furniture shop. Today is {date}.
Name the article that the customer asks about."""
ORDERS = {
    "1001": ("Ann", "lamp", 40, "Tuesday"), "1002": ("Bob", "chair", 60, "Friday"),
    "1003": ("Cem", "desk", 90, "Monday"), "1004": ("Dora", "rug", 35, "Sunday"),
    "1005": ("Emil", "shelf", 80, "Thursday"), "1006": ("Fay", "clock", 25, "Friday"),
    "1007": ("Gus", "sofa", 450, "Monday"), "1008": ("Hana", "stool", 30, "Tuesday"),
    "1009": ("Ivo", "bed", 380, "Sunday"), "1010": ("Jana", "mirror", 55, "Friday"),
    "1011": ("Kai", "bench", 70, "Monday"), "1012": ("Lea", "vase", 15, "Tuesday"),
}  # fmt: skip
"""Number: customer, article, price, day of arrival."""
QUESTIONS = (
    "Where is my order {order}?", "What did I pay for order {order}?", "I am waiting for order {order}.",
    "Can you check order {order}?", "Tell me about order {order}.", "Is order {order} on its way?",
)  # fmt: skip
WANTED = {
    "article": "the {article}", "greeting": "Dear {customer}", "number": "order {order}", "price": "{price} euros",
    "arrival": "arrives on {day}", "closing": "Kind regards",
}  # fmt: skip
"""What an answer should have in it."""


def tasks() -> list[dict[str, str]]:
    """Every question about every order."""
    return [
        {"customer": ORDERS[order][0], "order": order, "question": question.format(order=order)}
        for order in ORDERS
        for question in QUESTIONS
    ]


def facts(order: str) -> dict[str, str]:
    """What the shop knows of an order, said as answers should say it."""
    customer, article, price, day = ORDERS[order]
    known = {"customer": customer, "article": article, "price": price, "day": day, "order": order}
    return {name: text.format(**known) for name, text in WANTED.items()}


def agent(task: dict[str, Any]) -> dict[str, Any]:
    """One task: its question, asked and answered."""
    messages: list[Any] = [
        {"role": "system", "content": PROMPT.format(date="2026-11-24")},
        {"role": "user", "content": task["question"]},
    ]
    reply = OpenAI().chat.completions.create(model=MODEL, messages=messages)
    return {"answer": reply.choices[0].message.content or ""}


def reward(task: dict[str, Any], output: dict[str, Any], transcript: object) -> dict[str, Any]:
    """The share of what is wanted, and the reason."""
    missing = [name for name, text in facts(task["order"]).items() if text not in output["answer"]]
    value = 1 - len(missing) / len(WANTED)
    return {"reward": value, "reason": "; ".join(f"the answer has no {name}" for name in missing) or "all is there"}


if __name__ == "__main__":
    print(json.dumps(agent(json.loads(sys.stdin.read()))))
