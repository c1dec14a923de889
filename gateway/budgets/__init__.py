"""What calls may use up, as configured: reserved before a call goes out, settled with its span. Begin with
`operations`, which does both in a transaction; `service` is what calls see of it, and `bounds` says how much a request
may use at most.
"""
