"""The life of one call, from its address to its record.

Begin with `call`. `plan` puts together what is sent; `upstreams.routes` says to which upstreams, and
`upstreams.health` takes one of them.
"""
