"""Processes that start in milliseconds: forked from one that has imported everything once."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from unittest import mock

from fakes.process import PATHS


def forking(*modules: str) -> ForkServerContext:
    """What forks them. A process of tests has one such server, with the modules of who asks first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*modules])
    # It passes over what it does not find, and Python 3.11 does not tell it our path.
    with mock.patch.dict(os.environ, PYTHONPATH=PATHS):
        forkserver.ensure_running()
    return context


@contextmanager
def reporting(
    context: ForkServerContext, target: Callable[..., None], *arguments: object
) -> Generator[tuple[ForkServerProcess, Connection]]:
    """A process that runs a function, which reports by the connection that is its first argument; killed at the end."""
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(there, *arguments))
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        process.kill()
        process.join()
        here.close()
