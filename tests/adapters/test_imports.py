"""What is loaded: samples are made without sockets, and the command's help without numpy."""

from __future__ import annotations

import os
import subprocess
import sys

from fakes.process import ROOT

HEAVY = (
    "aiohttp",
    "lmdb",
    "torch",
    "transformers",
    "verl",
    "pyarrow",
    "penstock.gateway.client.client",
    "penstock.gateway.store",
)


def loaded(program: str, names: tuple[str, ...]) -> list[str]:
    """Which of these modules a program loads."""
    found = f"(name for name in {names!r} if name in sys.modules)"
    told = f"{program}\nimport sys\nprint(*{found}, file=sys.stderr)"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", told], env=env, capture_output=True, text=True, check=True)
    return done.stderr.split()


def test_the_pure_modules_load_no_client_and_no_framework() -> None:
    modules = "samples, chat, preferences, triplets, verl, export, making"
    assert loaded(f"from penstock.adapters import {modules}", HEAVY) == []
    # The test would see it.
    assert "aiohttp" in loaded("import penstock.adapters.source", HEAVY)


def test_conversations_and_preferences_are_made_without_numpy() -> None:
    assert loaded("from penstock.adapters import chat, preferences, export, making, source", ("numpy", "pyarrow")) == []
    assert loaded("from penstock.adapters import samples", ("numpy",)) == ["numpy"]


def test_help_needs_no_numpy() -> None:
    program = "from penstock.gateway.__main__ import main\n"
    program += "try:\n    main(['samples', '--help'])\nexcept SystemExit:\n    pass"
    assert loaded(program, ("numpy", "aiohttp", "pydantic", "pyarrow")) == []
