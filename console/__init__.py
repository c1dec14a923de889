"""Speaks to people and to coding agents: commands, the views that they print, and an MCP server of our own.

`main` runs `penstock ...`; `commands.command_table` lists every command. `views` turns nouns into text, `mcp_server`
offers them as tools. All of them see the gateway through its client only, but for `commands.serve` and commands that
read a tape.
"""
