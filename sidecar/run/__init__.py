"""The runner: `penstock run` takes rollouts from the queue and runs an agent for each.

One loop claims attempts (`runner`); `attempt` has the life of one. Engines run the agent (`engines`): on this machine,
in containers, on Ray, on Kubernetes; `in_process` lets the caller be the agent, for a debugger. `agent` has the agent's
own process, `hooks` the user's code around attempts. Begin with `runner`, then `attempt`.
"""
