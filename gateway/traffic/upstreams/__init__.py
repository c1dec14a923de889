"""Upstreams: routes, pools of connections, and the gate at which calls wait while weights change.

Begin with `pool`.
"""
