"""MCP servers: their addresses, their sessions, and the messages in their streams.

A call of a server is a call like any other (`proxy.call`): its bytes pass unchanged in both directions. This package
adds the server's address and limits (`servers`), the reading of messages while they pass (`response_rewriter`), the
spans of single messages, and the matching of an answer with its request when they come in two exchanges (`sessions`).
Servers on stdin and stdout are run by `bridge` or recorded by `pipe`. Begin with `call`.
"""
