"""The trainer: makes new weights from samples.

It may import `adapters`, of the gateway `model`, `client`, `reading`, `wire.dialects` and `releases.canary`, and of the
console `views`. `config` and the modules for credit and batches import no torch. Begin with `runs.grpo`.
"""
