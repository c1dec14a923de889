"""Families of clients: variables by which they trust the sidecar's authority, and a command that proves it. Pure."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

from penstock.sidecar.intercept.policy import CHECK

URL: Final = f"https://{CHECK[0]}/"
_URLLIB: Final = f"import urllib.request; print(urllib.request.urlopen({URL!r}, timeout=10).read().decode())"
_HTTPX: Final = f"import httpx; print(httpx.get({URL!r}, timeout=10).text)"
_REQUESTS: Final = f"import requests; print(requests.get({URL!r}, timeout=10).text)"
_FETCH: Final = (
    f"fetch({URL!r}).then(it => it.text()).then(console.log, it => {{ console.error(`${{it.cause?.code ?? it}}, Node "
    "${process.version}; its fetch uses proxies from 22.21 and 24.0 on`); process.exit(1) })"
)


@dataclass(frozen=True, slots=True)
class Family:
    """Clients that read the same variables."""

    name: str
    certificates: str
    """The variable that names the certificates they trust."""
    probe: tuple[str, ...] = ()
    """A command that asks the sidecar; run if its program is on this machine."""
    also: str = ""
    """Another variable without which they use no proxy."""


FAMILIES: Final = (
    Family("curl", "CURL_CA_BUNDLE", ("curl", "-sS", "-m", "10", URL)),
    Family("Python, Go, Ruby (OpenSSL)", "SSL_CERT_FILE", (sys.executable, "-c", _URLLIB)),
    Family("Python httpx (openai, anthropic)", "SSL_CERT_FILE", (sys.executable, "-c", _HTTPX)),
    Family("Python requests", "REQUESTS_CA_BUNDLE", (sys.executable, "-c", _REQUESTS)),
    Family("Node.js (Gemini CLI)", "NODE_EXTRA_CA_CERTS", ("node", "-e", _FETCH), "NODE_USE_ENV_PROXY"),
    Family("Claude Code, opencode", "NODE_EXTRA_CA_CERTS"),
    Family("Codex", "CODEX_CA_CERTIFICATE"),
    Family("git", "GIT_SSL_CAINFO"),
    Family("cargo", "CARGO_HTTP_CAINFO"),
    Family("AWS CLI, boto", "AWS_CA_BUNDLE"),
    Family("pip", "PIP_CERT"),
    Family("Deno", "DENO_CERT"),
)
