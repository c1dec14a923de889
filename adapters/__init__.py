"""Makes training data from the tape: turns, samples, conversations, preferences. Pure, except `source` and `commands`.

Of the gateway the pure modules may import `model`, `reading` and `wire.dialects`, the other two `client` too; none
imports the trainer or a framework. Begin with `samples`.
"""
