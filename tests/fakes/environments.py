"""Environments beside the one that runs the tests: `make install-NAME` makes each."""

from __future__ import annotations

from pathlib import Path

from fakes.process import ROOT


def installed(*names: str) -> bool:
    """Whether these are there, whole: what an installation is still writing is not there yet."""
    return all((folder(name) / ".installed").exists() for name in names)


def folder(name: str) -> Path:
    return ROOT / f".venv-{name}"


def python(name: str) -> Path:
    return folder(name) / "bin" / "python"
