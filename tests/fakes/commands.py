"""The real command line as a judge of commands that are written somewhere."""

from __future__ import annotations

from itertools import takewhile

from cyclopts import CycloptsError

from penstock.gateway.__main__ import app, with_usual
from penstock.gateway.cli.tables import every
from penstock.gateway.client.console import Failure

EVERY = [words.split() for words in every()]


def unparsed(words: list[str]) -> str:
    """What the command line does not understand of the words behind `penstock`, up to where the shell takes over;
    nothing of the name of a command, or of a group, alone."""
    if any(words == command[: len(words)] for command in EVERY):
        return ""
    own = list(takewhile(lambda word: word not in (">", "|", "&&", ";"), words))
    agents = own[own.index("--") + 1 :] if "--" in own else []
    try:
        _, bound, _ = app.parse_args(with_usual(own), exit_on_error=False, print_error=False)
    except (CycloptsError, Failure) as problem:
        return f"it is not understood: {problem}"
    strange = [str(word) for word in bound.args if str(word).startswith("--") and word not in agents]
    return f"it has no option {strange[0]}" if strange else ""
