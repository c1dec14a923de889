"""Bounds shared by the configuration and the commands. No imports, so that commands begin at once."""

from __future__ import annotations

from typing import Final

MOST_SEEDS: Final = 100
"""Most runs of one configuration."""
