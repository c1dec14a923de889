"""Renders nouns for people: text, tables for terminals, pages, charts. Pure.

It may import every layer from `store`, `http` and `prompts` down, but does no I/O. Begin with `table`.
"""
