"""Environments as users make them: one wheel of this checkout, one extra, nothing else. Only a package index is needed.

    wheel = build(home)
    clean = Clean.made(home / "ray", wheel, "ray")
    async with clean.gateway(home, config) as gateway:
        await clean.shell(gateway.url, home).run("rollouts")

What runs in one sees neither the checkout nor the environment of the tests.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from fakes.process import ROOT, Gateway, running
from fakes.shell import Shell

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
ALONE = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
"""Python finds what is installed and nothing that lies in the working directory."""
TORCH = os.environ.get("TORCH", "torch==2.13.0")
"""Which torch may be installed, as in the Makefile: any other brings gigabytes for GPUs along."""


def build(home: Path) -> Path:
    """The wheel of this checkout."""
    subprocess.run([*PIP, "wheel", "--no-deps", "--wheel-dir", home, ROOT], check=True)
    (made,) = home.glob("*.whl")
    return made


@dataclass(frozen=True, slots=True)
class Clean:
    """An environment with one extra."""

    home: Path
    seconds: float
    """What making it took, by the clock."""
    cpu_seconds: float
    """The same on the processor, which is the same on a busy machine."""

    @classmethod
    def made(cls, home: Path, wheel: Path, extra: str | None = None, *before: str) -> Clean:
        """A new one; `before`: what pip is told to install first."""
        started, spent = time.monotonic(), cpu_seconds()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
        limits = home / "constraints.txt"
        limits.write_text(TORCH)
        pip = (PIP[0], "-m", "pip", "--python", str(home / "bin" / "python"), *PIP[3:], "install")
        for wanted in (before, ("--constraint", str(limits), f"{wheel}[{extra}]" if extra else str(wheel))):
            if wanted:
                subprocess.run([*pip, *wanted], check=True)
        return cls(home, time.monotonic() - started, cpu_seconds() - spent)

    @property
    def python(self) -> Path:
        return self.home / "bin" / "python"

    @property
    def megabytes(self) -> int:
        """On disk, with links counted once."""
        return sum(it.lstat().st_size for it in self.home.rglob("*")) >> 20

    def gateway(self, home: Path, config: str) -> AbstractAsyncContextManager[Gateway]:
        """A gateway of it."""
        return running(home, config, env=ALONE, python=self.python)

    def shell(self, url: str, folder: Path) -> Shell:
        """Its `penstock`."""
        made = Shell(url, folder, (self.home / "bin" / "penstock",))
        made.env |= ALONE
        made.patience = 300.0
        return made

    def run(self, *words: str | Path, env: Mapping[str, str] | None = None) -> str:
        """What its Python prints; AssertionError with what it complains of where it fails."""
        given = os.environ | ALONE | dict(env or {})
        done = subprocess.run([self.python, *words], cwd=ROOT, env=given, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def cpu_seconds() -> float:
    """What all processes that have ended have spent."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


Install = Callable[..., Clean]
"""Of an extra's name, or of none, and what pip is told to install before."""
