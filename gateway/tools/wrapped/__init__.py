"""MCP servers on stdin and stdout with a wrapper in front of them (`penstock mcp wrap`, `sidecar.stdio`).

The wrapper sends the lines that have passed, as frames (`model.stdio_frames`), below the address of its rollout, and
repeats those that it does not know to be on the tape. A `Pipe` joins frames to lines, reads their messages and matches
answers with requests, as for every other server (`tools.sessions`). Spans and the session's progress are written in one
transaction: so a frame that comes twice makes no second span, whichever process was killed meanwhile. Begin with
`ingest`, then `pipe`.
"""
