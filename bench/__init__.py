"""Penstock measured beside other gateways: `python -m bench`; docs/benchmarks.md says how and how to read it."""
