"""python -m bench.policy: what a decision about a tool call costs. One core, the best of five, microseconds.

A message is parsed strictly and 20 rules are evaluated, none of which matches before the last: the cost that a policy
adds to a call through the gateway. The target is 20 us for a call of ordinary size.
"""

from __future__ import annotations

import json
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any

from penstock.gateway.reading.policy.policy import ToolPolicy, redacted, tool_calls
from penstock.gateway.reading.policy.rules import PolicyRule, Redaction

REPEATS = 5
HINTS = {"readOnlyHint": False, "destructiveHint": False}


def rules() -> list[PolicyRule]:
    """Return rules of every kind: six about other tools, the others about the arguments of this one."""
    texts: list[dict[str, Any]] = [{"tool": f"other_{number}*", "verdict": "deny"} for number in range(6)]
    texts += [{"argument": [{"at": "path", "glob": f"/etc/{number}/*"}], "verdict": "deny"} for number in range(5)]
    texts += [{"argument": [{"at": "path", "regex": rf"\.secret{number}$"}], "verdict": "deny"} for number in range(4)]
    texts += [{"argument": [{"at": "edits[*].line", "above": 1e9}], "verdict": "ask"}]
    texts += [{"annotations": {"destructiveHint": True}, "verdict": "deny"}, {"mode": "train", "verdict": "deny"}]
    texts += [{"argument": [{"at": "force", "equals": True}], "verdict": "deny"}, {"tool": "write", "verdict": "dry"}]
    return [PolicyRule.model_validate({"name": f"rule-{place}"} | text) for place, text in enumerate(texts)]


def message(size: int) -> bytes:
    """Return a call whose text has so many bytes."""
    arguments = {"path": "/srv/a/b.txt", "text": "x" * size, "edits": [{"line": 1, "to": "y"}, {"line": 9, "to": "z"}]}
    params = {"name": "write", "arguments": arguments, "_meta": {"progressToken": 7}}
    return json.dumps({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}).encode()


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield (name, a function that does it once)."""
    policy = ToolPolicy(rules(), lambda server, tool: HINTS)
    for size in (100, 1_000, 10_000, 100_000):
        body = message(size)
        (call,) = tool_calls(body)
        assert call is not None

        def whole(body: bytes = body) -> object:
            (call,) = tool_calls(body)
            assert call is not None
            return policy.decide("files", "online", call)

        yield f"read and decide, {len(body):,} bytes", whole
        if size == 1_000:
            yield "of that, to decide", lambda call=call: policy.decide("files", "online", call)
    rule = Redaction(results=["**"], pattern=r"[\w.+-]+@[\w.-]+")
    result = {"content": [{"type": "text", "text": "a line of text without any\n" * 40}]}
    yield "redact a result of 1 KB by a pattern", lambda: redacted(result, rule.results, rule)


def main() -> None:
    """Print a line for each case."""
    for name, once in cases():
        # Processor time: others on the machine do not count.
        timer = timeit.Timer(once, timer=time.process_time)
        number, seconds = timer.autorange()
        best = min([seconds, *timer.repeat(REPEATS, number)]) / number * 1e6
        print(f"{best:8.1f} us  {name}")


if __name__ == "__main__":
    main()
