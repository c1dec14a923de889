"""An agent that says what it does. Without Penstock around it, it does the same and says nothing."""

import json
import sys

from openai import OpenAI

import penstock


@penstock.span("check")
def is_right(answer: str) -> bool:
    """A function that is a span: each call of it is one."""
    return "4" in answer


def main(question: str) -> None:
    """Answer the question, and say how it went."""
    with penstock.span("think", {"question": question}) as think:
        answer = OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
        text = answer.choices[0].message.content or ""
        penstock.event("draft", {"characters": len(text)})
        think.set_attributes(answered=bool(text))
    right = is_right(text)
    penstock.reward(1.0 if right else 0.2, reason="it looked at itself", brevity=1 / (1 + len(text)))


if __name__ == "__main__":
    main(json.load(sys.stdin)["question"])
