"""Penstock's own MCP server: tools with which a coding agent reads the tape and proposes improvements.

It calls a running gateway through the typed client, as every command does, and nothing else. It may import
`gateway.client`, `console.views` and what lies below them; only `server` imports the SDK. Begin with `tool`, then
`server`.
"""
