"""Between an agent and the model hosts that it calls: our own TLS front.

The agent has a proxy, a certificate authority and the address of its rollout in its environment, and nothing else of
Penstock. The TLS of a connection to a model host ends here; its bytes go to the gateway in the clear, through a tunnel
whose headers name the rollout (the gateway's `calls.call_request`). Nothing parses them on the way, so they are not
changed. Every other connection is passed on with its TLS as it is, or refused.

    certificate_store  certificates for one day and a few hosts, which `certificate_authority` has made
    rules              the fate of each connection, and the kernel's rules that redirect it
    agent_connection   a connection of the agent
    agent_proxy        the proxy of one agent, and connections that the kernel has redirected to it
    namespace          a network of its own for an agent
    egress             to the gateway, or to the host of a connection, by a proxy if this machine needs one
    session            an agent and its proxy, or `mitm` before it: the other engine, which loads `mitm_addon`
    service            proxies that get their rollouts later, by an API for runners, and the process of them
    environment_check  tells which clients of an agent reach a sidecar

Begin with `agent_connection`.
"""
