"""What computes an update: the engine of one process, and verl's on several machines.

It speaks to no gateway and no network; only `verl_backend` imports verl and Ray. Begin with `local`.
"""
