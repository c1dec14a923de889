"""What is said of settings that are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.gateway.model.toml import ConfigError


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
