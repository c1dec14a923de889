"""Exact sessions: a conversation goes on from the very tokens that the engine has seen and made.

It sees what `proxy` sees. Begin with `exact_call`, which decides how a call goes.
"""
