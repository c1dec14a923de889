"""Programs that stand beside an unmodified agent, in three rooms.

    run        `penstock run` takes rollouts from the queue and runs a command or a function for each
    intercept  `penstock sidecar` stands between an agent and the model hosts that it calls
    stdio      `penstock mcp wrap` stands between an agent and its tool server

Of the gateway they may import `model`, `client`, `reading` and `wire.dialects`, of the console `views`; they do not
import the trainer.
"""
