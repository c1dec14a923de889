"""Asks the engine for token ids and log-probabilities, and takes them out again for a client that did not ask. No I/O.

`request` adds fields to a request, `answer` removes their results from an answer. `gateway.traffic.proxy.plan` drives
them. Begin with `request`.
"""
