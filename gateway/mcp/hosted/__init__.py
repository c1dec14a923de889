"""Servers of tools that speak on stdin and stdout, `[mcp.servers.NAME] command`: the gateway starts them.

To an agent such a server is like any other: it is reached at `/mcp/NAME`, by streamable HTTP. And to `mcp.call`, too:
there is one way to record and to join, so that call goes by HTTP to a small server inside of the gateway (`bridge`),
which nobody else can reach, because its connections are socket pairs. The bridge speaks lines with the process.

    agent --HTTP--> McpCall --HTTP on a socket pair--> bridge --lines--> process

    process   one process below a warden, which kills all that it has started: its lines, its stderr, its end
    streams   what waits for a client to read it
    session   one process and who waits for what of it: which line belongs to which exchange
    host      the processes of one server: how many, how long, when again
    ends      the end of a process, on the tape
    bridge    streamable HTTP in front of them

**Lines pass as they are.** A message goes to the process in the bytes of the client (line breaks between tokens become
spaces), and back in the bytes of the process. No id is rewritten. That is possible because a process serves one client:

* Up to revision 2025-11-25 a process is a session, from `initialize` to DELETE. The bridge gives the id of the session.
* Revision 2026-07-28 has no sessions. There a process serves one address: the attempt of a rollout; those who name no
  rollout share one. Clients at one address may use the same id at the same time. The later request waits then, until
  the earlier one is answered. A `subscriptions/listen` is never answered, so who would wait for one gets a further
  process.

**What belongs to a request.** Lines do not say for which request they are. An answer names its request, progress its
token, a notification of a subscription the request that listens. What else the server asks or logs belongs to the only
request that is under way; if there are several, it goes to the stream that listens, and without one to the request that
came last. Everything else (`list_changed`, resources that were updated) goes to the stream that listens, or waits for
one: 1,000 messages at most, of which the oldest are dropped first. A client that reads slowly slows its process down.

**How it ends.** With DELETE, after `idle_timeout`, and with the gateway: stdin is closed, then comes TERM, then KILL.
If the gateway is killed, wardens notice and do the same. The open requests of a process that ends by itself are
answered with an error, in which is how it ended and what it said last on stderr; its session is unknown from then on
(404), so that clients begin a new one. Nothing is started by itself. If processes of a server end before they have
answered anything, the next may start after 1 s, then 2 s, up to 60 s; one that fails later concerns nobody else.
"""
