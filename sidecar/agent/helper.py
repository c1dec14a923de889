"""For agents: say how well it went, or what happened. Needs the standard library alone.

    import penstock
    penstock.reward(0.7)

What an agent says of itself is kept with the source `agent` and is not trained on unless the gateway is configured to
trust it. Outside a rollout nothing is sent, so the same script runs anywhere. The file may be copied.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

TRIES, TIMEOUT_S = 3, 30.0


def reward(
    value: float | None = None,
    *,
    reason: str | None = None,
    key: str | None = None,
    **dimensions: float,
) -> bool:
    """Reward this attempt with a number, named scores, or both; False outside a rollout. Raises OSError when the
    gateway refuses it or cannot be reached. It is kept once, however often the request is sent."""
    said = {"value": value, "dimensions": dimensions, "reason": reason, "key": key or f"helper-{time.time_ns()}"}
    return _post("/rewards", {name: part for name, part in said.items() if part is not None})


def event(name: str, **attributes: str | float | bool | None) -> bool:
    """Note something that happened in this attempt; False outside a rollout. Raises OSError like `reward`."""
    return _post("/events", {"events": [{"name": name, "attributes": attributes, "time_ns": time.time_ns()}]})


def _post(path: str, body: Any) -> bool:
    url, token = os.environ.get("PENSTOCK_URL"), os.environ.get("PENSTOCK_TOKEN")
    if not url or not token:
        return False
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    for left in reversed(range(TRIES)):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                response.read()
            return True
        except urllib.error.HTTPError as e:
            if e.code < 500 or not left:
                raise OSError(f"the gateway refused it ({e.code}): {e.read().decode(errors='replace')[:500]}") from None
        except OSError:
            if not left:
                raise
        time.sleep(1.0)
    return False
