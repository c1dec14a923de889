"""Engines, which run agents: on this machine, in containers, on Ray, on Kubernetes. They may import what `sidecar` may.
Begin with `local`.
"""
