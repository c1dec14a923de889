"""Messages of made-up prompts: several families of one agent, and templates that are nearly the same."""

from __future__ import annotations

import random
from collections.abc import Sequence

from penstock.gateway.model.resource import Template

FIRST = ("Ann", "Bob", "Chloé", "Dmitri", "美咲", "Li", "Omar", "Zoë", "Priya", "Sam", "Ingrid", "Tomás")
LAST = ("Smith", "Müller", "Ng", "O'Brien", "Иванов", "Garcia", "佐藤", "Rossi", "Khan", "Lee")
_VOCABULARY = """
order refund ticket seat baggage delay hotel voucher card upgrade window meal pet crew gate late early
policy customer flight always never please booking agent confirm before after bag fare
"""
WORDS = _VOCABULARY.split()

FAMILIES = {
    "support": """You are a support agent of Acme Air.

Customer: {name}
Date: {date}

## Notes
{notes}

## Rules
1. Never promise a refund.
2. Be kind and brief. Answer in {language}, please.
""",
    "planner": """You are the planner. Make a plan for the task below, one step a line, and nothing else.
<task>
{notes}
</task>
The budget is {number} EUR. The current user is {name}.""",
    "sql": """Write SQL {{"dialect": "sqlite"}} for this schema.

Schema:
{notes}

It is {date}; at most {number} rows.
Return only SQL.""",
    "japanese": "あなたは親切なアシスタントです。お客様のお名前は：{name}。"
    "必ず敬語で簡潔に答えてください。今日の日付は{date}です。",
    "constant": "You are a router. Say which of the experts should answer: sales, support or nobody.",
}
TEMPLATES = {name: Template.parse(source) for name, source in FAMILIES.items()}


class Maker:
    """Makes messages of the families, from one seed: values of several lines, none, any script."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def message(self, family: str) -> str:
        """Return a message of a family."""
        rng, template = self._rng, TEMPLATES[family]
        values = {
            "name": f"{rng.choice(FIRST)} {rng.choice(LAST)}",
            "date": f"2026-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}",
            "notes": self.notes(),
            "language": rng.choice(["English", "French", "German", "日本語", ""]),
            "number": str(rng.randrange(5000)),
        }
        return template.render({slot: values[slot] for slot in template.slots})

    def notes(self) -> str:
        """Return several lines, one, or none."""
        rng = self._rng
        return "\n".join("- " + " ".join(rng.choices(WORDS, k=rng.randrange(3, 9))) for _ in range(rng.randrange(5)))


def similar(count: int, seed: int, words: int = 150) -> list[Template]:
    """Return templates of so many words with three slots, each with two words of its own."""
    rng = random.Random(seed)
    common = rng.choices(WORDS, k=words)
    return [Template.parse(" ".join(_varied(common, number, rng))) for number in range(count)]


def _varied(common: Sequence[str], number: int, rng: random.Random) -> list[str]:
    words = [*common]
    for at in rng.sample(range(10, len(words)), 2):
        words[at] = f"{words[at]}{number}"
    for at, slot in zip((len(words) // 5, len(words) // 2, -1), ("name", "date", "notes"), strict=True):
        words[at] = f"<{{{slot}}}>"
    return words


def filled(template: Template, rng: random.Random) -> str:
    """Return a message of a similar template, with words of the templates in its slots."""
    return template.render({slot: " ".join(rng.choices(WORDS, k=rng.randrange(6))) for slot in template.slots})
