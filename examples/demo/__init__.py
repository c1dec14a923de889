"""`make demo`: agents, a local model and a gateway, by `python -m examples.demo`.

It is outside the layers and nothing imports it. Begin with `demo`.
"""
