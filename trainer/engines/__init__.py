"""Engines that compute updates: one of a single process, and one on verl's workers on several machines.

They use no gateway and no network; only `verl_backend` imports verl and Ray. Begin with `local`.
"""
