"""Asks this container's own port: `healthcheck.py PORT PATH`. Exit code 0 when the answer is 200, else 1 and why."""

import http.client
import sys

port, path = int(sys.argv[1]), sys.argv[2]
try:
    # Not by urllib, which would ask a proxy that the environment names.
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=8)
    connection.request("GET", path)
    answer = connection.getresponse()
    said = answer.read(1000).decode(errors="replace").strip()
except (OSError, http.client.HTTPException) as error:
    sys.exit(f"port {port}: {error or type(error).__name__}")
if answer.status != 200:
    sys.exit(f"{answer.status}: {said}")
