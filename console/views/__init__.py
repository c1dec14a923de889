"""Renders nouns for people: text, tables for terminals, pages, charts. Pure.

It does no I/O. Begin with `table`.
"""
