"""The gateway: calls of agents, the tape, the control API, and the commands that use them.

Its packages are the layers of `ARCHITECTURE.md`; each may import those on lower lines: `app` wires, `server` has the
port, `proxy` the life of a call, `api` the control API, `store` the tape, `model` the nouns. Runners, adapters and
trainers may import only `model`, `client`, `dialects`, `display` and `diagnosis`. Begin with `proxy.call`.
"""
