"""`penstock mcp replay`: the recorded servers of a rollout as one MCP server, so that agents can be tried without them.

`load` asks the gateway, `recording` makes calls of spans, `matching` finds the one that a request asks for, `offer`
says what there is (the beginning of a session, and lists), `player` speaks. All but `load` and `player` are pure. Begin
with `player`.
"""
