"""Agents are started on both event loops: `penstock run` has asyncio's own, Ray runs its actors on uvloop's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loops that a test runs in, one after the other."""
    both = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    # What an agent says of itself, it says in a process of its own.
    return {"asyncio": both["asyncio"]} if item.path.name == "test_helper.py" else both
