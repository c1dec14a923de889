"""Prompt optimisation: better texts for agents that nobody rewrites, and when not to look for them.

A run reads from top to bottom in `search`: an *engine* (`protocol`, `engines/`) proposes candidates; the runner runs
them, keeps the budgets, and lets the finalists race against the seed on tasks that no engine has seen (`gate`). Engines
and runner know a `Laboratory`: agents behind a gateway (`gateway_laboratory`), or the scripted ones of `bench.apo`.

Everything that is decided follows from the seed and from the results, and rollouts and reflections are named by what
they are. So a run that was killed is started again from its first decision, finds its results on the tape, and comes to
the same place without running anything twice.
"""
