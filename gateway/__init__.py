"""The gateway: the data plane, the tape, the control API, and the commands that use them.

Its packages are the layers of `ARCHITECTURE.md`, each of which sees those below it: `app` wires, `server` has the port,
`proxy` the life of a call, `api` the control API, `store` the tape, `model` the nouns. Runners, adapters and trainers
see `model`, `client`, `dialects`, `display` and `diagnosis` alone. Begin with `gateway.proxy.call`.
"""
