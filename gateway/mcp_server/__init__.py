"""Penstock's own MCP server: tools with which a coding agent reads the tape and proposes what would be better.

It speaks to a running gateway through the typed client, as every command does, and to nothing else. It may import
`client`, `display`, `model` and what lies below them; `server` alone knows the SDK. Begin with `tool`, then `server`.
"""
