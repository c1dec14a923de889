"""Decides what can be trained on, and why the rest cannot, and which answer asked for which tool run. Pure.

It does no I/O; adapters use the same rules. Begin with `findings`, which has one function for each rule, and with
`tool_join`.
"""
