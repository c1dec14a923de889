"""The agent of the documentation, `my_agent.py`: two calls of a planner, over plain HTTP so that it starts at once.

The task is its first argument, or the field `question` of the JSON on stdin. Its last line is its output.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any

SYSTEM = "You are a travel agent of Acme Air.\n\nCustomer: {customer}\nDate: {date}\n\nNever refund a basic fare."


def ask(messages: list[dict[str, str]]) -> dict[str, str]:
    """The next message of the model."""
    body = json.dumps({"model": os.environ.get("MODEL", "policy"), "messages": messages}).encode()
    headers = {
        "Authorization": "Bearer " + os.environ.get("OPENAI_API_KEY", "none"),
        "Content-Type": "application/json",
    }
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        answer: Any = json.load(response)
    return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}


def question() -> str:
    """The task."""
    return sys.argv[1] if len(sys.argv) > 1 else json.loads(sys.stdin.read() or "{}").get("question", "Hello?")


if __name__ == "__main__":
    asked = question()
    talk = [{"role": "system", "content": SYSTEM.format(customer="Ann", date="Tuesday")}]
    for text in (asked, "Thank you."):
        talk.append({"role": "user", "content": text})
        talk.append(ask(talk))
    print(json.dumps({"answer": talk[2]["content"]}))
