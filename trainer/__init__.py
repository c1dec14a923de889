"""The trainer: makes new weights from samples.

It may import `adapters`, and of the gateway `model`, `client`, `dialects`, `display` and `diagnosis`. `config` and the
modules for credit and batches import no torch. Begin with `runs.grpo`.
"""
