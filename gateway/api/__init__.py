"""The control API: a module for each resource, and what they share.

It may import every layer from `releases`, `otlp` and `diagnosis` down, but not `proxy`. Begin with `routes`, the table.
"""
