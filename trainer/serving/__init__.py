"""The vLLM servers of a run, and the way of weights to them and into production.

It may import what `trainer` may. Begin with `publisher`.
"""
