"""Token ids and log-probabilities, asked for and taken out again: what a client that did not ask must not notice.

`json_ranges` finds values in JSON bytes, `request` adds fields to a request, `answer` takes out of an answer what they
brought, and `framing` frames what is left for the client. Nothing here does any I/O; `gateway.proxy.relay` drives it.
"""
