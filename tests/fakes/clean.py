"""Environments as users make them: one wheel of this checkout, one extra, nothing else. Only a package index is needed.

    wheel = build(home)
    base = Clean.made(home / "base", wheel)
    clean = base.with_extra(home / "ray", "ray")
    async with clean.gateway(home, config) as gateway:
        await clean.shell(gateway.url, home).run("rollouts")

What runs in one sees neither the checkout nor the environment of the tests.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fakes.process import ROOT, Gateway, running
from fakes.shell import Shell

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
ALONE = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": ""}
"""Python finds what is installed and nothing that lies in the working directory. It keeps what it has compiled: pip
compiles nothing that an extra brings, of which most is never imported."""
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
    wheel: Path
    """Of Penstock."""
    seconds: float
    """What making it took, by the clock."""
    cpu_seconds: float
    """The same on the processor, which is the same on a busy machine."""

    @classmethod
    def made(cls, home: Path, wheel: Path) -> Clean:
        """A new one of the base install."""
        started, spent = time.monotonic(), cpu_seconds()
        _new(home)
        _pip(home, wheel)
        return cls(home, wheel, time.monotonic() - started, cpu_seconds() - spent)

    def with_extra(self, home: Path, extra: str, *before: str) -> Clean:
        """A new one with an extra beside what this one has, as hard links; `before`: what pip is told to install first.

        Penstock's own distribution is left out, so that pip installs it anew, its command too, with all that it and its
        extra ask for: what is linked is what every install of it has.
        """
        started, spent = time.monotonic(), cpu_seconds()
        _new(home)
        limits = home / "constraints.txt"
        limits.write_text(TORCH)
        own = shutil.ignore_patterns("penstock_gateway-*.dist-info")
        shutil.copytree(_packages(self.home), _packages(home), copy_function=os.link, ignore=own, dirs_exist_ok=True)
        if before:
            _pip(home, *before)
        _pip(home, "--no-compile", "--constraint", limits, f"{self.wheel}[{extra}]")
        return Clean(home, self.wheel, time.monotonic() - started, cpu_seconds() - spent)

    @contextmanager
    def beside(self, wheel: Path) -> Generator[None]:
        """With a distribution of somebody else beside it, which needs nothing."""
        pip = (PIP[0], "-m", "pip", "--python", self.python, *PIP[3:])
        subprocess.run([*pip, "install", "--no-deps", "--no-index", wheel], check=True)
        try:
            yield
        finally:
            subprocess.run([*pip, "uninstall", "--yes", wheel.name.partition("-")[0]], check=True)

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


def _new(home: Path) -> None:
    """An environment without anything, not even pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)


def _packages(home: Path) -> Path:
    (found,) = home.glob("lib/python*/site-packages")
    return found


def _pip(home: Path, *wanted: str | Path) -> None:
    """What is wanted, with all that it needs."""
    pip = (PIP[0], "-m", "pip", "--python", home / "bin" / "python", *PIP[3:], "install")
    subprocess.run([*pip, *wanted], check=True)


def cpu_seconds() -> float:
    """What all processes that have ended have spent."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


Install = Callable[..., Clean]
"""Of an extra's name, and what pip is told to install before."""
