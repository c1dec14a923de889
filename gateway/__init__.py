"""The gateway: owns the nouns, the data plane and the tape. See ARCHITECTURE.md for the life of a call.

Only `gateway.model.span` and `gateway.client.client` are for other packages; everything else is private to the gateway.
"""
