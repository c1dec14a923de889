"""The prompts of a probe: the questions to the reflecting model, and the prompts made of its answers. Pure.

Two say the same as the seed in other words (`REWORDED`). One is the seed with a checklist of what the graders' reasons
ask for. It is made of edits that several reflections name, each of them after other failed rollouts: of the edits for
one failure the one that is named most often is made. One is written from scratch, without seeing the seed
(`trainer.apo.reflection`), because a text's error may be one that nobody thinks of changing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from typing import Final

from penstock.trainer.apo.advice.observation import Stance
from penstock.trainer.apo.edits import Edit, applied, exclude, words
from penstock.trainer.apo.reflection import Hypothesis

SAME: Final = 0.6
"""Share of weighted words above which two sentences mean the same."""
REWORDED: Final[dict[Stance, str]] = {
    "terse": "as few words as you can, without leaving out anything that the agent must do",
    "steps": "steps that the agent takes one after the other, with a last step that checks the answer",
}
ASK: Final = """\
Write these texts of an AI agent anew, in %s. They must ask for the same. Keep every {slot} as it is.

%s
Answer with JSON alone: {"texts": {"NAME": "..."}} with these names: %s
"""


def ask_reworded(texts: Mapping[str, str], stance: Stance) -> str:
    """Return the question for the same texts in other words."""
    shown = "\n".join(f"## Text {name}\n{text}\n" for name, text in sorted(texts.items()))
    return ASK % (REWORDED[stance], shown, ", ".join(sorted(texts)))


def checklist(texts: Mapping[str, str], hypotheses: Sequence[Hypothesis]) -> dict[str, str]:
    """Return the texts with one edit for each failure: the one that is named most often. The most frequent failures
    come first; of edits that exclude each other the first is made."""
    failures = _alike([one.failure for one in hypotheses])
    chosen: list[Edit] = []
    for places in sorted(failures, key=len, reverse=True):
        edit = _most_named([hypotheses[at].edit for at in places], [one.edit.text for one in hypotheses])
        if not any(exclude(edit, one) for one in chosen):
            chosen.append(edit)
    return applied(texts, chosen)


def _most_named(edits: Sequence[Edit], background: Sequence[str]) -> Edit:
    """Return one of the edits that most agree on, preferably one that also removes a line."""
    groups = _alike([edit.text for edit in edits], background)
    return max((edits[at] for at in max(groups, key=len)), key=lambda edit: edit.kind != "add")


def _alike(texts: Sequence[str], background: Sequence[str] | None = None) -> list[list[int]]:
    """Return groups of places of texts with the same meaning, by their words; a word in many texts of the background
    weighs little."""
    seen = [words(text) for text in (texts if background is None else background)]
    groups: list[list[int]] = []
    for at, text in enumerate(texts):
        mine = words(text)
        group = next((one for one in groups if _common(mine, words(texts[one[0]]), seen) >= SAME), None)
        if group is None:
            groups.append([at])
        else:
            group.append(at)
    return groups


def _common(one: frozenset[str], other: frozenset[str], background: Sequence[frozenset[str]]) -> float:
    """Return the share of two texts' words that both have (Jaccard, words weighted by how rare they are)."""
    weights = {
        word: log((len(background) + 1) / (1 + sum(word in text for text in background))) for word in one | other
    }
    whole = sum(weights.values())
    return sum(weights[word] for word in one & other) / whole if whole else float(one == other)
