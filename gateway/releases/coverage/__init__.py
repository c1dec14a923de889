"""Whom a prompt reaches: what calls matched and missed is counted per resource, and a fall is told and holds canaries.

Calls note what they had (`noting`), which costs them one entry in a list. Once a second `watch` finds out in a thread
which prompt a text that was not recognised is nearly (`gateway.prompts.nearest`), and an operation adds it up on the
tape (`operations`), where `gateway.canary.coverage` decides whether the coverage has fallen.
"""
