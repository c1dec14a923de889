"""What tests with torch share: one thread, so that sums are made in the same order in every process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

try:
    import torch
except ImportError:
    torch = None


def pytest_configure(config: pytest.Config) -> None:
    # peft 0.21 asks transformers 5.23 for an attribute by its former name.
    config.addinivalue_line("filterwarnings", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
