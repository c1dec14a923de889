"""An agent without an SDK: looks a flight up with its own tool, which leaves a line in the file TOOL_TRACE."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

SYSTEM = "You are a travel agent of Acme Air. Today is Tuesday. Never refund a basic fare."


def fare(flight: str) -> str:
    """The tool."""
    with Path(os.environ["TOOL_TRACE"]).open("a") as trace:
        trace.write(f"{flight}\n")
    return f"{sum(map(ord, flight))} EUR"


def ask(messages: list[Any]) -> Any:
    """The model's next message."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body = json.dumps({"model": "m", "messages": messages, "tools": []}).encode()
    with urlopen(Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]


def main() -> None:
    """One question about the task's flight."""
    question = f"What does {json.load(sys.stdin)['flight']} cost?"
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    while calls := (message := ask(messages)).get("tool_calls"):
        messages.append(message)
        for call in calls:
            told = fare(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": told})
    print(json.dumps({"said": message["content"]}))


main()
