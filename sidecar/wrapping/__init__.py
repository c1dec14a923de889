"""`penstock mcp wrap`: stands between an agent and its server of tools on stdin and stdout, and records what passes.

Bytes are copied as they come (`copying`); behind that they are cut into lines (`lines`) and put on disk (`spool`). A
thread sends them to the gateway (`sending`), whenever that is there. So nothing that the gateway or the disk does ever
holds a tool up. The server runs below a warden (`server`), and does not outlive the wrapper. It needs the standard
library alone, and `model.passed`. Begin with `command`.
"""
