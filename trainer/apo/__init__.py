"""Prompt optimisation: searches better texts for unchanged agents, and advises when a search is not worth it.

A run reads from top to bottom in `search`: an *engine* (`protocol`, `engines/`) proposes candidates; the runner runs
them, keeps the budgets, and lets the finalists race against the seed on tasks that no engine has seen. Engines and
runner use a `Laboratory`: agents behind a gateway (`gateway_laboratory`), or the scripted ones of `bench.apo`.

Every decision follows from the seed and from the results, and the names of rollouts and reflections follow from their
contents. So a killed run starts again from its first decision, finds its results on the tape, and comes to the same
place without running anything twice.
"""

from __future__ import annotations

from typing import Final

MOST_SEEDS: Final = 100
"""Most runs of one configuration: here, so that commands begin at once."""
