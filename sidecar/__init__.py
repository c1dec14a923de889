"""The runner: `penstock run` takes rollouts from the queue and runs a command for each, beside an unmodified agent.

Of the gateway it may import `model`, `client`, `dialects`, `display` and `diagnosis`; it does not import the trainer.
Begin with `runner`, then `attempt`.
"""
