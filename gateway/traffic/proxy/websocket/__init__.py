"""Calls on WebSockets: frames pass as they are, and each answer is a call. Begin with `connection`, which opens
them."""
