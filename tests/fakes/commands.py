"""The real command line as a judge of commands that are written somewhere."""

from __future__ import annotations

from itertools import takewhile

from cyclopts import CycloptsError

from penstock.console.commands.command_table import all_commands
from penstock.console.main import app, in_order
from penstock.gateway.client.console import CommandError

EVERY = [words.split() for words in all_commands()]


def unparsed(words: list[str]) -> str:
    """What the command line does not understand of the words behind `penstock`, up to where the shell takes over;
    nothing of the name of a command, or of a group, alone."""
    if any(words == command[: len(words)] for command in EVERY):
        return ""
    own = list(takewhile(lambda word: word not in (">", "|", "&&", ";"), words))
    agents = own[own.index("--") + 1 :] if "--" in own else []
    try:
        _, bound, _ = app.parse_args(in_order(own), exit_on_error=False, print_error=False)
    except (CycloptsError, CommandError) as problem:
        return f"it is not understood: {problem}"
    strange = [str(word) for word in bound.args if str(word).startswith("--") and word not in agents]
    return f"it has no option {strange[0]}" if strange else ""
