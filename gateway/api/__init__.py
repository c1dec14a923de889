"""The control API: a module for each resource, and the parts that they share.

Begin with `routes`, the table.
"""
