"""Between an agent and the model hosts that it calls: our own TLS front.

The agent has a proxy and a certificate authority in its environment, and nothing else of Penstock. The TLS of a
connection to a model host ends here; its bytes go to the gateway in the clear, through a tunnel whose headers name the
rollout (the gateway's `calls.address`). Nothing parses them on the way, so they are not changed. Every other connection
is passed on with its TLS as it is, or refused.

    certificate_store       certificates for one day and a few hosts, which `certificate_authority` has made
    policy                  what becomes of a connection
    agent_proxy             the proxy of one agent
    agent_connection        a connection of the agent
    transparent_connection  one that the kernel has brought here (`rules`, `firewall`), whose `client_hello` says where
                            it goes
    namespace               a network of its own for an agent, and `dns_addresses` in it
    egress                  to the gateway, or to the host of a connection, by `upstream_proxy` if this machine needs it
    splice                  two ends that get each other's bytes
    session                 an agent and its proxy, or `mitm` before it: the other engine, which loads `mitm_addon`
    service                 proxies that get their rollouts later, by `admin`; `sidecar_process` runs them
    environment_check       does a client get here? `reachability` asks the proxy itself

Begin with `agent_connection`.
"""
