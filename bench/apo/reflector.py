"""The scripted reflecting model: right, wrong or vague, and forgetful when it rewrites a prompt.

It reads its question as text, as a model would: the grader's sentences in it, and the prompt. It names the rules that
are broken most often, and gives for each the right instruction, a wrong one, or vague words. The same reflector answers
the questions of all engines.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from typing import Final

from bench.apo.worlds import POISON, VAGUE, Rule, World, broken, right, special, wrong

WRONG: Final = 0.4
"""Share of wrong answers among those that are not right; the others are vague."""
FORGETS: Final = 0.03
"""Probability that a line is lost when a prompt is rewritten."""
SEES_POISON: Final = 0.25
NAMES_A_CUSTOMER: Final = 0.35
NAMED: Final = 2
"""Rules that one reflection names."""


class Reflector:
    """The reflecting model of one world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def answer(self, question: str, draw: random.Random) -> str:
        """Return the answer to a question; the same for the same draw."""
        if '"hypotheses"' in question:
            return json.dumps({"hypotheses": self._hypotheses(question, draw)})
        if "from scratch" in question:
            name = re.search(r"with these names: (\S+)", question)
            lines = [
                "You answer customers of a shop.",
                *(text for _, text, _ in self._instructions(question, "", draw, 4)),
            ]
            return json.dumps({"texts": {name[1] if name else "": "\n".join(lines)}})
        if "Describe what is wrong" in question:
            return "; ".join(broken(rule.theme) for rule in self._failures(question, draw, NAMED)) or "nothing"
        return f"```\n{self._rewritten(question, draw)}\n```"

    def _failures(self, question: str, draw: random.Random, most: int) -> list[Rule]:
        """Return broken rules, drawn in proportion to their frequency."""
        counts = Counter({rule.theme: question.count(broken(rule.theme)) for rule in self._world.rules})
        found: list[Rule] = []
        while len(found) < most and sum(counts.values()):
            themes, weights = zip(*counts.items(), strict=True)
            theme = draw.choices(themes, weights)[0]
            found.append(next(rule for rule in self._world.rules if rule.theme == theme))
            del counts[theme]
        return found

    def _instructions(self, question: str, prompt: str, draw: random.Random, most: int) -> list[tuple[str, str, str]]:
        """Return (failure, instruction, line that it replaces)."""
        found: list[tuple[str, str, str]] = []
        for rule in self._failures(question, draw, most):
            if self._world.family == "leaking" and draw.random() < NAMES_A_CUSTOMER:
                customers = [task.key for task in self._world.tasks if f"customer {task.key}" in question]
                if customers:
                    found.append((broken(rule.theme), special(draw.choice(customers)), ""))
                    continue
            sure = draw.random()
            if sure < rule.understood:
                text = right(rule.theme, draw.randrange(3))
            elif sure < rule.understood + (1 - rule.understood) * WRONG:
                text = wrong(rule.theme)
            else:
                text = draw.choice(VAGUE)
            there = wrong(rule.theme) if wrong(rule.theme) in prompt and draw.random() < 0.5 else ""
            found.append((broken(rule.theme), text, there))
        return found

    def _hypotheses(self, question: str, draw: random.Random) -> list[dict[str, str | int]]:
        rest = question.partition("## Text ")[2]
        name = rest.split("\n", 1)[0].strip()
        lines = re.findall(r"^\d+\| (.*)$", rest, re.MULTILINE)
        found: list[dict[str, str | int]] = []
        if POISON in lines and draw.random() < SEES_POISON:
            found.append(
                {
                    "failure": "answers are cut short",
                    "resource": name,
                    "kind": "delete",
                    "line": lines.index(POISON) + 1,
                    "text": "",
                }
            )
        for failure, text, there in self._instructions(rest, "\n".join(lines), draw, NAMED):
            kind, at = ("replace", lines.index(there) + 1) if there else ("add", 0)
            found.append({"failure": failure, "resource": name, "kind": kind, "line": at, "text": text})
        return found

    def _rewritten(self, question: str, draw: random.Random) -> str:
        """Return the whole prompt rewritten: with instructions for broken rules, and without forgotten lines."""
        start = question.find("```") + 3
        prompt = question[start : question.find("```", start)].strip("\n")
        added = self._instructions(question[start + len(prompt) :], prompt, draw, NAMED)
        gone = {there for _, _, there in added if there}
        gone |= {POISON} if draw.random() < SEES_POISON else set()
        lines = [line for line in prompt.split("\n") if line not in gone and draw.random() >= FORGETS]
        return "\n".join([*lines, *(text for _, text, _ in added if text not in lines)])
