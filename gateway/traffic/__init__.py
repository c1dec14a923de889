"""The life of a call: begin with `proxy.call`.

`calls` says whose a call is and what is recorded of it, `upstreams` where it goes, `budgets` what it may use up, and
`proxy` moves its bytes. `trials` are calls that the gateway makes itself to try a release.
"""
