"""MCP servers: their addresses, their sessions, and the messages in their streams.

A call of a server is a call like any other (`proxy.call`): its bytes pass unchanged in both directions. This package
adds the server's address (`servers`), its limits (`limits`), the reading of messages while they pass
(`message_records`), and the matching of an answer with its request when they come in two exchanges (`sessions`). It
may import `proxy` and what lies below. Begin with `call`.
"""
