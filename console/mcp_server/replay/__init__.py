"""`penstock mcp replay`: the recorded servers of a rollout as one MCP server, so that agents can be tried without them.

`load` reads the spans from the gateway, `recording` makes calls of them, `matching` finds the recorded call of a
request, `offer` answers the beginning of a session and lists, `player` is the server. All but `load` and `player` are
pure. Begin with `player`.
"""
