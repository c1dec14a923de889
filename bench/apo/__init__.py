"""Prompt optimisation, offline: families of scripted worlds, engines beside each other (`python -m bench.apo`)."""
