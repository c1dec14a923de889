"""Prompts of unmodified agents: found in many calls, recognised in one, and rewritten. Pure.

Begin with `rewrite`; `induction` finds prompts.
"""
