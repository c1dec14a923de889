"""Exact sessions: a conversation continues from the very tokens that the engine has read and generated.

Begin with `exact_filter`, which decides how a call goes.
"""
