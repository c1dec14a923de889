"""An agent for `penstock run --callable` that needs the standard library only, and its judge.

It asks once, with its rollout's name in the question, so that no two rollouts ask the same. Like an SDK it asks again
when nobody answers or the server is at fault; unlike one, until it is killed.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

PAUSE_S = 0.2


def agent(task: dict[str, Any]) -> dict[str, Any]:
    """Its question, and what the model said."""
    return asked([{"role": "user", "content": f"{task['question']} {os.environ['PENSTOCK_ROLLOUT_ID']}"}])


def asked(messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    """What the model said to these messages. `more`: fields of the request."""
    body = {"model": "policy", "messages": messages, "max_tokens": 16, "temperature": 1.0} | more
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    while True:
        try:
            with urllib.request.urlopen(request) as answer:
                return {"said": json.load(answer)["choices"][0]["message"]["content"] or ""}
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(PAUSE_S)


def reward(task: dict[str, Any], output: dict[str, Any], transcript: object) -> float:
    """Between 0 and 1, another one for every other text."""
    return int.from_bytes(hashlib.sha256(output["said"].encode()).digest()[:4]) / 2**32
