"""Training runs: what a trainer reports, how it is kept on the tape, and how it is read.

It may import every layer from `queue`, `upstreams` and `display` down. Begin with `operations`.
"""
