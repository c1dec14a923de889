"""python -m bench.masking: what masking rules cost. The best of three, milliseconds of CPU of the recorder's thread.

A conversation in which no rule finds anything, one in which a rule does, and the stream of an answer.
"""

from __future__ import annotations

import json
import random

from bench.hiding import SIZES, body, microseconds
from penstock.gateway.masking.masker import Tally, masker
from penstock.gateway.masking.rules import MaskingRule
from penstock.gateway.model.known_secrets import NONE, About

RULES = [
    MaskingRule(name="cards", pattern=r"\b(?:\d[ -]?){13,16}\b"),
    MaskingRule(name="e-mail", pattern=r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}"),
    MaskingRule(name="iban", pattern=r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}\b"),
    MaskingRule(name="phones", pattern=r"\+\d{1,3}[ -]\d{2,4}[ -]\d{5,9}"),
    MaskingRule(name="customers", paths=["**.ssn", "messages[*].metadata.email"]),
]
CARD = " 4111 1111 1111 1111"


def stream(rng: random.Random, size: int) -> bytes:
    """A streamed chat answer of about this size, a word an event."""
    words = body(rng, size).decode("utf-8", "replace").split()[: size // 180 + 1]
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choices = [[{"index": 0, "delta": {"content": f"{word} "}, "finish_reason": None}] for word in words]
    return b"".join([b"data: %b\n\n" % json.dumps(head | {"choices": one}).encode() for one in choices])


def main() -> None:
    """A line for each size and kind of body."""
    rng = random.Random(7)
    print(f"{'body':>8}{'kind':>12}{'size':>12}{'1 rule':>12}{'5 rules':>12}")
    for name, size in SIZES.items():
        plain = body(rng, size).rpartition(b", {")[0] + b"]}"
        found = plain.replace(b'"content": "', b'"content": "' + CARD.encode(), 1)
        for kind, made in (("nothing", plain), ("found", found), ("stream", stream(rng, size))):
            about = About("text/event-stream" if kind == "stream" else "application/json", answer=kind == "stream")
            line = f"{name:>8}{kind:>12}{len(made):>12,}"
            for rules in (RULES[:1], RULES):
                one = masker(rules, NONE, Tally())
                taken = microseconds(
                    lambda one=one, made=made, about=about: one.body(made, about), max(1, 20_000 // size)
                )
                line += f"{taken / 1000:>12.3f}"
            print(line)


if __name__ == "__main__":
    main()
