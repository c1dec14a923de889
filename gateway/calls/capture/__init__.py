"""Asks the engine for token ids and log-probabilities, and takes them out again for a client that did not ask. No I/O.

`request` adds fields to a request, `answer` takes out of an answer what they brought, `framing` frames the rest for the
client, and `json_ranges` finds values in JSON bytes. `gateway.proxy.relay` drives it. It sees what `calls` sees. Begin
with `request`.
"""
