"""Training runs: what a trainer reports, kept on the tape, and how it is read."""
