"""`penstock mcp wrap`: stands between an agent and its tool server on stdin and stdout, and records the traffic.

Bytes are copied as they come (`command`); after that they are cut into lines and written to disk (`spool`). A thread
sends them to the gateway (`delivery`), whenever that can be reached. So neither the gateway nor the disk ever delays a
tool. The server runs below a warden, and does not outlive the wrapper. The package needs only the standard library and
`model.stdio_frames`. Begin with `command`.
"""
