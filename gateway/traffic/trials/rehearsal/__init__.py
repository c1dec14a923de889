"""The stage *rehearsed*: the agent does recorded rollouts again, and the gateway plays its tools from the tape.

It may import what `releases` may. Begin with `stage`.
"""
