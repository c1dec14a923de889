"""Asks this container's own port: `healthcheck.py PORT PATH`. Exit code 0 when the answer is 200, else 1 and why.

A port that speaks HTTPS answers plain HTTP with 400, and is asked again; whose its certificate is does not matter here.
"""

import http.client
import os
import ssl
import sys

port, path = int(sys.argv[1]), sys.argv[2]
tls = ssl.create_default_context()
tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
status, said = 0, ""
try:
    # Not by urllib, which would ask a proxy that the environment names.
    plain = http.client.HTTPConnection("127.0.0.1", port, timeout=8)
    for connection in (plain, http.client.HTTPSConnection("127.0.0.1", port, timeout=8, context=tls)):
        connection.request("GET", path)
        answer = connection.getresponse()
        status, said = answer.status, answer.read(1000).decode(errors="replace").strip()
        if status != 400:
            break
        if os.environ.get("PENSTOCK_CLIENT_CERT"):
            tls.load_cert_chain(os.environ["PENSTOCK_CLIENT_CERT"])
except (OSError, http.client.HTTPException) as error:
    sys.exit(f"port {port}: {error or type(error).__name__}")
if status != 200:
    sys.exit(f"{status}: {said}")
