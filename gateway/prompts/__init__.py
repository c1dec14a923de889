"""Prompts of unmodified agents: found in a request, induced from many, recognised, written anew. Pure."""
