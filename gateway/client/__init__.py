"""The typed client, and what the commands that use it share. Who stands outside of the gateway reaches it so. Begin
with `client`.
"""
