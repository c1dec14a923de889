"""The control API: a module for each resource, and the parts that they share.

It may import every layer from `releases` and `otlp` down, but not `proxy`. Begin with `routes`, the table.
"""
