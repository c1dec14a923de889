"""Servers of tools (MCP): their addresses, their sessions, and what crosses their streams.

A call of a server is a call like any other (`proxy.call`): its bytes pass unchanged in both directions. What is added
here is who the server is (`servers`), how much of it may be used at a time (`limits`), what its messages mean while
they pass (`recorded`), and which answer belongs to which request where they come in two exchanges (`sessions`). It may
import `proxy` and what lies below. Begin with `call`.
"""
