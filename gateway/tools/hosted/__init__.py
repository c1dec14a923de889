"""MCP servers that speak on stdin and stdout (`[mcp.servers.NAME] command`): the gateway starts their processes.

An agent reaches such a server like any other, at `/mcp/NAME` by streamable HTTP. So does `tools.call`: its calls go by
HTTP to a small server inside the gateway (`bridge`), so that there is one way to record and join them. Nothing else can
reach the bridge, because its connections are socket pairs. The bridge exchanges lines with the process.

    agent --HTTP--> McpCall --HTTP on a socket pair--> bridge --lines--> process

    process   one process below a warden that kills its whole process tree: its lines, its stderr, its end
    streams   lines that a client has not read yet
    session   one process and its open exchanges: assigns each line to an exchange
    host      the processes of one server: their number, lifetime and restarts
    ends      the end of a process, on the tape
    bridge    streamable HTTP in front of them

**Lines pass as they are.** A message goes to the process in the bytes of the client (line breaks between tokens become
spaces), and back in the bytes of the process. No id is rewritten, because a process serves one client:

* Up to revision 2025-11-25 a process is a session, from `initialize` to DELETE. The bridge gives the id of the session.
* Revision 2026-07-28 has no sessions. There a process serves one address: the attempt of a rollout; those who name no
  rollout share one. Clients at one address may use the same id at the same time. The later request waits then, until
  the earlier one is answered. A `subscriptions/listen` is never answered, so who would wait for one gets a further
  process.

**The request of a line.** Only some lines name their request: an answer by its id, progress by its token, a
notification of a subscription by the request that listens. Other requests and log messages of the server belong to the
only open request; if several are open, to the stream that listens, and without one to the newest request. Everything
else (`list_changed`, resources that were updated) goes to the stream that listens, or waits for one: 1,000 messages at
most, of which the oldest are dropped first. A client that reads slowly slows its process down.

**How it ends.** With DELETE, after half an hour without a request or a stream, and with the gateway: stdin is closed,
then comes TERM, then KILL. If the gateway is killed, wardens notice and do the same. The open requests of a process
that ends by itself are answered with an error that holds the way it ended and its last lines on stderr; its session is
unknown from then on (404), so that clients begin a new one. A process is started only for a client's request. If
processes of a server end before they have answered anything, the next may start after 1 s, then 2 s, up to 60 s; a
process that fails later delays no other."""
