"""What tests of the tape have in common."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

import pytest


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Starts processes in milliseconds: what they import is imported once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fakes.crashing"])
    return context
