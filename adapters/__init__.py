"""From the tape to training data: turns, samples, conversations, preferences. Pure but for `source` and `commands`."""
