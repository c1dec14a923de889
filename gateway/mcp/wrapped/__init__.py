"""Servers of tools on stdin and stdout that a wrapper stands before (`penstock mcp wrap`, `sidecar.wrapping`).

The wrapper sends what has passed, as frames (`model.passed`), below the address of its rollout, and sends again what it
does not know to be on the tape. A `Pipe` puts lines together, reads their messages and tells which answer belongs to
which request, as for every other server (`mcp.sessions`). Spans, and how far the session has come, are one transaction:
so a frame that comes twice makes no second span, whoever was killed meanwhile. Begin with `ingest`, then `pipe`.
"""
