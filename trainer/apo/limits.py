"""Bounds that the configuration and the commands have in common. Nothing is imported: commands begin at once."""

from __future__ import annotations

from typing import Final

MOST_SEEDS: Final = 100
"""Runs of one configuration."""
