"""One thread, so that sums are made in the same order in every process; and no GPU, where sums are others."""

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


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither here nor in processes that are started: what is compared with torch's plain loops is on a CPU, as these
    are. What a GPU computes has tests of its own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if torch is not None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
