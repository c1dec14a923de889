"""HTTP/1.1 as bytes, on both sides of the gateway, and the masking of secrets in it.

Begin with `client_connection`.
"""
