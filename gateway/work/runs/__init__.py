"""Training runs: the reports of trainers, their storage on the tape, and reading them.

It may import every layer from `queue`, `upstreams` and `display` down. Begin with `operations`.
"""
