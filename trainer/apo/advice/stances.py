"""The prompts of a probe: what the reflecting model is asked, and what is made of its answers. Pure.

Two say what the seed says, in other words (`REWORDED`). One is the seed with a checklist of what the graders' reasons
ask for. It is made of edits that several reflections name, each of them after other failed rollouts: of the edits for
one failure the one that is named most often is made. One is written from scratch, by somebody who has not seen the
seed (`trainer.apo.reflection`), because what is wrong with a text may be what nobody thinks of changing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from typing import Final

from penstock.trainer.apo.advice.observation import Stance
from penstock.trainer.apo.edits import Edit, applied, exclude, words
from penstock.trainer.apo.reflection import Hypothesis

SAME: Final = 0.6
"""Share of weighted words from which on two sentences mean the same."""
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
    """The question for the same texts in other words."""
    shown = "\n".join(f"## Text {name}\n{text}\n" for name, text in sorted(texts.items()))
    return ASK % (REWORDED[stance], shown, ", ".join(sorted(texts)))


def checklist(texts: Mapping[str, str], hypotheses: Sequence[Hypothesis]) -> dict[str, str]:
    """The texts with one edit for each failure: the one that is named most often. Failures that are named most often
    come first; of edits that exclude each other the first is made."""
    failures = _alike([one.failure for one in hypotheses])
    chosen: list[Edit] = []
    for places in sorted(failures, key=len, reverse=True):
        edit = _most_named([hypotheses[at].edit for at in places], [one.edit.text for one in hypotheses])
        if not any(exclude(edit, one) for one in chosen):
            chosen.append(edit)
    return applied(texts, chosen)


def _most_named(edits: Sequence[Edit], background: Sequence[str]) -> Edit:
    """One of those that most of the edits want; rather one that also takes a line away."""
    groups = _alike([edit.text for edit in edits], background)
    return max((edits[at] for at in max(groups, key=len)), key=lambda edit: edit.kind != "add")


def _alike(texts: Sequence[str], background: Sequence[str] | None = None) -> list[list[int]]:
    """Places of texts that say the same, by their words; a word that is in many texts of the background says little."""
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
    """Share of what two texts say that both say (Jaccard, words weighted by how rare they are)."""
    weights = {
        word: log((len(background) + 1) / (1 + sum(word in text for text in background))) for word in one | other
    }
    whole = sum(weights.values())
    return sum(weights[word] for word in one & other) / whole if whole else float(one == other)
