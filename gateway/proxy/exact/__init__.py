"""Exact sessions: a conversation goes on from the very tokens that the engine has seen and made.

It sees what `proxy` sees. Begin with `course`, which decides how a call goes.
"""
