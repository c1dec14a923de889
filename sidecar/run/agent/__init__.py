"""The agent's own process: its environment, its output, its end. It may import what `sidecar` may. Begin with
`process`.
"""
