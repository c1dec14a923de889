"""Makes training data from the tape: turns, samples, conversations, preferences. Pure, except `source` and `commands`.

Of the gateway the pure modules may import `model`, `dialects`, `display` and `diagnosis`, the other two `client` too;
none imports the trainer or a framework. Begin with `samples`.
"""
