"""The runner: `penstock run` takes rollouts from the queue and runs a command for each, beside an unmodified agent.

Of the gateway it may import `model`, `client`, `reading` and `wire.dialects`, of the console `views`; it does not
import the trainer. Begin with `runner`, then `attempt`.
"""
