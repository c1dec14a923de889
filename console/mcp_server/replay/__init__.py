"""`penstock mcp replay`: the recorded servers of a rollout as one MCP server, so that agents can be tried without them.

`loader` reads the spans from the gateway, `replay_calls` makes calls of them, `matcher` finds the recorded call of a
request, `catalog` answers the beginning of a session and lists, `player` is the server. All but `loader` and `player`
are pure. Begin with `player`.
"""
