"""Regular expressions of users, with limited time. The engine is RE2: its time grows linearly with the text.

Finding every match in a text can still take quadratic time, so it stops at a deadline, in seconds of CPU. RE2 has
neither look-around nor back-references; its classes `\\d`, `\\w` and `\\b` are those of ASCII. It comes with the extra
`masking`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, Final

from penstock.gateway.model.toml import ConfigError

_BASE_S: Final = 0.25
_PER_BYTE_S: Final = 0.25e-6
"""Seconds of CPU that all rules together may take for a body: a hundred times what usual ones take."""
_SHORT: Final = 256
"""Bytes of a text up to which the clock is not read, which would take longer than the search."""
_SAMPLES: Final = (b"", b"a", b"1", b" ", b"a b", b"-1 a.", b"\n")
_EDGES: Final = re.compile(r"\^|\$|\\[AzZ]")
EXTRA: Final = "masking rules with a pattern need google-re2: pip install 'penstock-gateway[masking]'"


class PatternTimeout(Exception):
    """The pattern takes too long for this body."""


class CpuBudget:
    """The CPU time that patterns may take for one body."""

    def __init__(self, size: int) -> None:
        self.seconds = _BASE_S + size * _PER_BYTE_S
        self._spent = 0.0

    def spend(self, seconds: float) -> None:
        """Raises `PatternTimeout` if the time is over."""
        self._spent += seconds
        if self._spent > self.seconds:
            raise PatternTimeout(f"took longer than {self.seconds * 1000:.0f} ms")


class MaskingPattern:
    """A regular expression, ready for use."""

    def __init__(self, written: str) -> None:
        """Raises `ValueError` if it cannot be used, and `ConfigError` if the engine is not installed."""
        self._compiled = _compiled(written)
        self.at_edges = _EDGES.search(written.replace("[^", "[")) is not None
        """True if it may match by the beginning or end of its text."""
        for sample in _SAMPLES:
            found = self._compiled.search(sample)
            if found is not None and found.start() == found.end():
                raise ValueError(f"{written!r} matches the empty string: say what must be there, as with + for *")

    def occurs_in(self, text: bytes, clock: CpuBudget) -> bool:
        """True if it matches anywhere; raises `PatternTimeout`."""
        return next(self.find(text, clock), None) is not None

    def find(self, text: bytes, clock: CpuBudget) -> Iterator[tuple[int, int]]:
        """The places of its matches; raises `PatternTimeout`."""
        at, size, search, now = 0, len(text), self._compiled.search, time.thread_time
        while at <= size:
            if size > _SHORT:
                began = now()
                found = search(text, at)
                clock.spend(now() - began)
            else:
                found = search(text, at)
            if found is None:
                return
            start, end = found.span()
            if end > start:
                yield start, end
            at = max(end, at + 1)


def join_patterns(written: Iterable[str]) -> MaskingPattern | None:
    """A pattern that matches if one of several does; None if they are too many for one."""
    try:
        return MaskingPattern("|".join(f"(?:{one})" for one in written))
    except ValueError:
        return None


def _compiled(written: str) -> Any:
    try:
        re2: Any = import_module("re2")
    except ImportError:
        raise ConfigError(EXTRA) from None
    options = re2.Options()
    options.never_capture, options.log_errors = True, False
    try:
        return re2.compile(written.encode(), options)
    except re2.error as error:
        said: Any = error.args[0]
        why = said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
        syntax = "see github.com/google/re2/wiki/Syntax"
        raise ValueError(f"{written!r} is no regular expression of RE2 ({why}): {syntax}") from None
