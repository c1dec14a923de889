"""What is loaded: samples are made without sockets, and the command's help without numpy."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from fakes.process import ROOT

pytestmark = pytest.mark.slow

CLIENTS = (
    "aiohttp",
    "lmdb",
    "torch",
    "transformers",
    "verl",
    "penstock.gateway.client.client",
    "penstock.gateway.tape.store",
)
ARRAYS = ("numpy", "pyarrow")
WITHOUT = "from penstock.adapters import chat, preferences, export"
"""What needs no numpy."""


def loaded(*programs: str, names: tuple[str, ...] = (*CLIENTS, *ARRAYS)) -> list[list[str]]:
    """Which of these modules are loaded after each of these programs, in one process."""
    found = f"(name for name in {names!r} if name in sys.modules)"
    told = "\n".join(f"{one}\nimport sys\nprint(*{found}, file=sys.stderr)" for one in programs)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", told], env=env, capture_output=True, text=True, check=True)
    return [line.split() for line in done.stderr.splitlines()]


def test_the_pure_modules_load_no_client_and_no_framework_and_only_samples_numpy() -> None:
    assert loaded(WITHOUT, "from penstock.adapters import samples, verl") == [[], ["numpy"]]


def test_conversations_and_preferences_are_loaded_from_a_gateway_without_numpy() -> None:
    (found,) = loaded(f"{WITHOUT}, source")
    # The test above would see it.
    assert "aiohttp" in found
    assert not {*ARRAYS} & {*found}


def test_help_needs_no_numpy() -> None:
    program = "from penstock.console.main import main\n"
    program += "try:\n    main(['samples', '--help'])\nexcept SystemExit:\n    pass"
    assert loaded(program, names=("aiohttp", "pydantic", *ARRAYS)) == [[]]
