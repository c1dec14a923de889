"""Exact sessions: a conversation goes on from the very tokens that the engine has seen and made."""
