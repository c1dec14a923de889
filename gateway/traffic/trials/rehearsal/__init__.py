"""The stage *rehearsed*: the agent does recorded rollouts again, and the gateway plays its tools from the tape.

Begin with `stage`.
"""
