"""`penstock mcp replay`: the recorded servers of a rollout as one MCP server, so that agents can be tried without them.

`loader` reads the spans from the gateway, `replay_calls` makes calls of them and finds the recorded call of a request,
`player` is the server, and answers the beginning of a session and lists. All but `loader` and `player` are pure. Begin
with `player`.
"""
