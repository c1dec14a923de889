"""Policies on tool calls: which may run, which wait for a person, which are changed, and which are refused.

`rules` is what a person writes, `reading` reads a message so that no server can read another one out of it, `pointer`
finds values in it, `policy` decides, `redaction` takes out what a rule names, `questions` are the calls that wait for a
person, and `backtest` says what rules would have done to recorded calls. Pure. It may import `model`; who asks it is
`gateway.mcp.policing` for calls that pass, and the control API for those on the tape. Begin with `policy`.
"""
