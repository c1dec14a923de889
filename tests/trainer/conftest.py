"""What tests with torch share: each is computed in one thread."""

from __future__ import annotations

import pytest
from fakes.threads import one_thread

__all__ = ["one_thread"]


def pytest_configure(config: pytest.Config) -> None:
    # peft 0.21 asks transformers 5.23 for an attribute by its former name.
    config.addinivalue_line("filterwarnings", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
