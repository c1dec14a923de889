"""Policies on tool calls: they let calls run, keep them waiting for a person, change or refuse them.

`rules` is the configuration that a person writes, with the conditions on arguments; `policy` reads messages strictly
and decides, `questions` holds the calls that wait for a person, and `report` tells what rules would have done to
recorded calls. Pure. It is used by `gateway.tools.policy_enforcement` for calls that pass, and by the control API for
those on the tape. Begin with `policy`.
"""
