"""Between an agent and the model hosts that it calls: our own TLS front.

The agent has a proxy and a certificate authority in its environment, and nothing else of Penstock. The TLS of a
connection to a model host ends here; its bytes go to the gateway in the clear, through a tunnel whose headers name the
rollout (the gateway's `calls.tunnel`). Nothing parses them on the way, so they are not changed. Every other connection
is passed on with its TLS as it is, or refused.

    authority   certificates for one day and a few hosts, which `certificates` has made
    policy      what becomes of a connection
    front       the proxy of one agent
    visit       a connection of the agent
    redirected  one that the kernel has brought here (`rules`, `redirecting`), whose `hello` says where it goes
    namespace   a network of its own for an agent, and `names` in it
    ways        where it goes: to the gateway, or to its host, `beyond` the proxy that this machine needs
    splice      two ends that get each other's bytes
    session     an agent and its front, or `mitm` before it: the other engine, which loads `mitm_addon`
    service     fronts that get their rollouts later; `admin` is how, `serving` the process
    checking    does a client get here? `families` of clients, `asking` the front itself

Begin with `visit`.
"""
