"""python -m bench.masking: what masking rules cost. The best of five, milliseconds of CPU of the recorder's thread.

Conversations in which no rule finds anything, and one does, and the streams of such answers, a word an event.
"""

from __future__ import annotations

import json
import random
import re

from bench import corpus
from bench.hiding import SIZES, microseconds
from penstock.gateway.model.facts import MASKING_FAILED
from penstock.gateway.model.known_secrets import NO_SECRETS, BodyContext
from penstock.gateway.wire.masking.masker import MaskingCounts, MaskingRule, masker

RULES = [
    MaskingRule(name="cards", pattern=r"\b(?:\d[ -]?){13,16}\b"),
    MaskingRule(name="e-mail", pattern=r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}"),
    MaskingRule(name="iban", pattern=r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}\b"),
    MaskingRule(name="phones", pattern=r"\+\d{1,3}[ -]\d{2,4}[ -]\d{5,9}"),
    MaskingRule(name="customers", paths=["**.ssn", "messages[*].metadata.email"]),
]
CARD = " 4111 1111 1111 1111"


def prose(rng: random.Random, size: int) -> str:
    """Return text of about this size."""
    paragraphs, made = corpus.paragraphs(), list[str]()
    while size > 0:
        made.append(rng.choice(paragraphs))
        size -= len(made[-1])
    return "\n".join(made)


def stream(rng: random.Random, size: int, said: str) -> bytes:
    """Return a streamed chat answer of about this size, a word an event, with the words `said` in pieces."""
    words = re.findall("[a-z]+", prose(rng, size))[: size // 135]
    words = (words * (size // 135 // len(words) + 1))[: size // 135]
    words[len(words) // 2 :] = [*said.split(), *words[len(words) // 2 :]]
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choices = [[{"index": 0, "delta": {"content": f"{word} "}, "finish_reason": None}] for word in words]
    return b"".join([b"data: %b\n\n" % json.dumps(head | {"choices": one}).encode() for one in choices])


def request(rng: random.Random, size: int, said: str) -> bytes:
    """Return a conversation of about this size."""
    text = re.sub("[0-9@+]", "x", prose(rng, size))
    messages = [{"role": "user", "content": text[at : at + 2000]} for at in range(0, len(text), 2000)]
    return json.dumps({"messages": [*messages, {"role": "user", "content": said}]}).encode()


def main() -> None:
    """Print a line for each size and kind of body."""
    rng = random.Random(7)
    print(f"{'body':>8}{'kind':>16}{'size':>12}{'1 rule':>12}{'5 rules':>12}")
    for name, size in SIZES.items():
        for kind, make, said in (
            ("nothing", request, ""),
            ("found", request, CARD),
            ("stream", stream, ""),
            ("stream, found", stream, CARD),
        ):
            made, answer = make(rng, size, said), make is stream
            about, number = (
                BodyContext("text/event-stream" if answer else "application/json", answer),
                max(1, 20_000 // size),
            )
            line = f"{name:>8}{kind:>16}{len(made):>12,}"
            for rules in (RULES[:1], RULES):
                one = masker(rules, NO_SECRETS, MaskingCounts()).for_call()
                taken = microseconds(lambda one=one, made=made, about=about: one.body(made, about), number)
                assert (one.masked, MASKING_FAILED in one.span_attributes) == (bool(said), False), one.span_attributes
                line += f"{taken / 1000:>12.3f}"
            print(line)


if __name__ == "__main__":
    main()
