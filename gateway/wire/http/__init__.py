"""HTTP/1.1 as bytes, on both sides of the gateway, and the masking of secrets in it.

It may import `dialects`, `canary`, `client` and the layers below. Begin with `client_connection`.
"""
