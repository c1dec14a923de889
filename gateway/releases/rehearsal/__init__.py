"""The stage *rehearsed*: the agent does recorded rollouts again, and the gateway plays its tools from the tape.

It sees what `releases` sees. Begin with `stage`.
"""
