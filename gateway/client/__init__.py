"""The typed client, and what the commands that use it share. Code outside of the gateway reaches it through these.
Begin with `client`."""
