"""An unmodified agent: asks the model as often as its task says, with the official SDK, and prints what it was told."""

from __future__ import annotations

import json
import os
import sys

from openai import OpenAI


def main() -> None:
    """Ask."""
    task = json.loads(os.environ["PENSTOCK_INPUT"])
    client, answers = OpenAI(max_retries=0), list[str | None]()
    for number in range(task["calls"]):
        messages = [{"role": "user", "content": f"{task['question']} {number}"}]
        answer = client.chat.completions.create(model="fake", messages=messages)  # pyright: ignore # its messages are plain dicts, as agents write them
        answers.append(answer.choices[0].message.content)
    print(json.dumps({"answers": answers}))
    sys.exit(task.get("exit", 0))


if __name__ == "__main__":
    main()
