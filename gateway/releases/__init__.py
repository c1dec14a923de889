"""Releases: experiments that move traffic from one version to another, and can be taken back.

It owns the stages before a canary, the canary itself, and the adapters on servers. Begin with `driver`; calls ask
`catalog` for versions.
"""
