"""The gateway: calls of agents, the tape, and the control API.

Its packages are the layers of `ARCHITECTURE.md`; each may import those on lower lines: `app` wires, `process` has the
port, `traffic` the life of a call, `api` the control API, `tape` the tape, `model` the nouns. Runners, adapters and
trainers may import only `model`, `client`, `reading`, `wire.dialects`, and the pure `releases.canary`,
`releases.prompt_induction` and `releases.prompt_recogniser`. Begin with `traffic.proxy.call`.
"""
