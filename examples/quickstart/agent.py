"""An agent: one question to a model, one answer. It knows nothing of Penstock."""

import json
import sys

from openai import OpenAI

PROMPT = "You are a helpful assistant who is good with numbers."


def solve(task: dict[str, str]) -> dict[str, str | None]:
    reply = OpenAI().chat.completions.create(
        model="gpt-5-mini",
        messages=[
            {"role": "system", "content": PROMPT},
            {"role": "user", "content": task["question"]},
        ],
    )
    return {"answer": reply.choices[0].message.content}


if __name__ == "__main__":
    print(json.dumps(solve({"question": sys.argv[1]})))
