"""One thread, so that sums are made in the same order in every process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

try:
    import torch
except ImportError:
    torch = None


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
