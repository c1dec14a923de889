"""Prompts of unmodified agents: found in many calls, recognised in one, and rewritten. Pure.

It may import `dialects`, `canary`, `client` and the layers below, but does no I/O. Begin with `rewrite`; `induction`
finds prompts.
"""
