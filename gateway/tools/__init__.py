"""MCP servers: their addresses, their sessions, and the messages in their streams.

A call of a server is a call like any other (`proxy.call`): its bytes pass unchanged in both directions. This package
adds the server's address (`servers`), its limits (`limits`), the reading of messages while they pass
(`response_rewriter`), the spans of single messages, and the matching of an answer with its request when they come in
two exchanges (`sessions`). Begin with `call`.
"""
