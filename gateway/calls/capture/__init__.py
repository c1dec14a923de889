"""Token ids and log-probabilities, asked for and taken out again: what a client that did not ask must not notice.

`ranges` finds values in JSON bytes, `asking` adds fields to a request, `cleaning` takes out of an answer what they
brought, and `passing` frames what is left for the client. Nothing here does any I/O; `gateway.proxy.relay` drives it.
"""
