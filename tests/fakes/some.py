"""What must be there."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def some(found: T | None) -> T:
    """It, or the test fails."""
    assert found is not None
    return found
