"""The answer to `GET /` and `HEAD /`: a page that explains the gateway.

A person opens the gateway's address, or an agent's base URL, in a browser, which also asks for an icon. Claude Code
sends `HEAD /` before its first call. None of these requests goes to a provider, and none makes a rollout. The page
shows nothing that needs a key.
"""

from __future__ import annotations

from html import escape
from typing import Final

from penstock.gateway.api.guard import HEADERS
from penstock.gateway.api.openapi import STYLE
from penstock.gateway.traffic.calls.call_request import AddressError, from_path
from penstock.gateway.wire.http.request import HttpRequest


def front_page(request: HttpRequest) -> bytes | None:
    """The whole answer, head and body, also below an agent's address; None for any other request."""
    if request.method not in ("GET", "HEAD"):
        return None
    try:
        path = from_path(request.target.partition(b"?")[0].decode("latin-1"))[1]
    except AddressError:
        return None
    if path == "/favicon.ico":
        return _answer(b"204 No Content", {}, b"", request)
    if path.strip("/"):
        return None
    headers = {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(_PAGE))}
    return _answer(b"200 OK", headers, _PAGE, request)


def _answer(status: bytes, headers: dict[str, str], body: bytes, request: HttpRequest) -> bytes:
    close = {} if request.keep_alive else {"Connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers | HEADERS | close).items())
    return b"HTTP/1.1 %b\r\n%b\r\n%b" % (status, lines.encode("ascii"), b"" if request.method == "HEAD" else body)


_LINKS: Final = (
    ("/api/docs", "the control API: what was recorded, the queue, releases and training runs"),
    ("/healthz", "does the gateway live?"),
    ("/readyz", "does it take calls, and can it record them?"),
    ("/metrics", "figures for Prometheus"),
)
_PAGE: Final = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Penstock</title>
<link rel="icon" href="data:,"><style>{STYLE}</style></head><body>
<h1>Penstock</h1>
<p>This is a Penstock gateway. It stands between agents and their model endpoint, passes every call on as it is, and
records it.</p>
<p>To record an agent, give it this address, http:// or https:// included, as its base URL, with a name of your choice
for the rollout:</p>
<pre>OPENAI_BASE_URL=THIS-ADDRESS/rollout/r1/v1 python my_agent.py
ANTHROPIC_BASE_URL=THIS-ADDRESS/rollout/r1 python my_agent.py</pre>
<p>To see what was recorded:</p>
<pre>penstock rollouts
penstock show r1</pre>
<ul>
{"".join(f'<li><a href="{path}"><code>{path}</code></a> {escape(text)}</li>' for path, text in _LINKS)}
</ul></body></html>
""".encode()
