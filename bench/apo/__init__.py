"""Offline tests of prompt optimisation: families of scripted worlds, engines beside each other (`python -m
bench.apo`)."""
