"""Two texts with the words that differ marked: `[-only left-]` and `{+only right+}`. Colours only repeat it. Pure."""

from __future__ import annotations

import difflib
import re
from itertools import islice
from typing import Final

from rich.text import Text

from penstock.console.views.text import clean

MOST: Final = 4_000
"""The most words that are compared; the rest of longer texts is left out."""
_WORD = re.compile(r"\s+|\w+|[^\w\s]")


def mark_differences(left: str, right: str) -> tuple[Text, Text]:
    """Both texts; the words that the other lacks are marked."""
    a, b = ([found[0] for found in islice(_WORD.finditer(text), MOST)] for text in (left, right))
    made = Text(), Text()
    for does, a0, a1, b0, b1 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        only_left, only_right = "".join(a[a0:a1]), "".join(b[b0:b1])
        if does == "equal":
            made[0].append(clean(only_left))
            made[1].append(clean(only_right))
            continue
        if only_left:
            made[0].append(f"[-{clean(only_left)}-]", "red")
        if only_right:
            made[1].append(f"{{+{clean(only_right)}+}}", "green")
    return made
