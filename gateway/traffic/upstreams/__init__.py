"""Upstreams: routes, pools of connections, and the gate at which calls wait while weights change.

It may import every layer from `store`, `http` and `prompts` down. Begin with `pool`.
"""
