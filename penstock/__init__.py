"""Penstock: a transparent gateway for unmodified agents, and what learns from its tape."""
