"""What is said of what is wrong, and of settings above all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from penstock.gateway.model.toml import ConfigError


def tells(text: str | None, *words: str) -> bool:
    """Whether a line has them in this order: what is named, its figures, the way out. The wording between is free."""
    return re.search(".*".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in words), text or "") is not None


def refusal(read: Callable[[str], object], text: str) -> str:
    """Of a file; nothing where it is taken."""
    try:
        _ = read(text)
    except ConfigError as problem:
        return str(problem)
    return ""


def unhelpful(read: Callable[[str], object], misspelt: Iterable[tuple[str, str, str]]) -> list[str]:
    """Files, each with the table and the key that has a `q` too many in it, that are refused without its path and the
    key that was meant."""
    faults: list[str] = []
    for text, table, key in misspelt:
        wanted = f"{table}{key}q: unknown key; did you mean {key!r}?"
        if wanted not in (said := refusal(read, text)):
            faults.append(f"{table}{key}: it is answered {said!r}: say {wanted!r}")
    return faults
