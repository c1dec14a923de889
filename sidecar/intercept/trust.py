"""The variables and files that make an agent's clients use the front and trust its authority.

Clients read different variables. Some replace the system's certificates, so they name a bundle of these and ours.
Node's own variable adds to them, so it names ours alone.
"""

from __future__ import annotations

import ctypes
import ssl
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Final

BUNDLES: Final = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "CODEX_CA_CERTIFICATE",
    "GIT_SSL_CAINFO",
    "CARGO_HTTP_CAINFO",
    "AWS_CA_BUNDLE",
    "PIP_CERT",
    "DENO_CERT",
)
"""Read, in this order, by OpenSSL (Python's httpx, Ruby, PHP) and Go; requests; curl; Codex; git; cargo; boto; pip;
Deno.
"""
ADDED: Final = ("NODE_EXTRA_CA_CERTS",)
"""Read by Node, in addition to its built-in certificates."""
PROXIES: Final = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_SYSTEM: Final = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")


_PR_SET_DUMPABLE: Final = 4
_HERE: Final = ("localhost", "127.0.0.1", "::1")


def variables(bundle: Path, own: Path, port: int, hosts: Collection[str]) -> dict[str, str]:
    """The variables of an agent with a proxy. Only this machine itself is exempt from the proxy, unless one of the
    intercepted hosts is on it.
    """
    excepted = "" if set(_HERE) & set(hosts) else ",".join(_HERE)
    proxy = f"http://127.0.0.1:{port}"
    return {
        **certificates(bundle, own),
        **dict.fromkeys(PROXIES, proxy),
        **dict.fromkeys(("NO_PROXY", "no_proxy"), excepted),
        "NODE_USE_ENV_PROXY": "1",
    }


def certificates(bundle: Path, own: Path) -> dict[str, str]:
    """The variables of an agent whose connections the kernel redirects: it has no proxy."""
    return {**dict.fromkeys(BUNDLES, str(bundle)), **dict.fromkeys(ADDED, str(own))}


def write(folder: Path, pem: str) -> tuple[Path, Path]:
    """Write (bundle, our certificate alone) into a folder; return their paths."""
    bundle, own = folder / "ca-bundle.pem", folder / "penstock-ca.pem"
    own.write_text(pem)
    bundle.write_bytes(_system() + pem.encode())
    return bundle, own


def _system() -> bytes:
    """The certificates that this machine trusts, as bytes: comments among them may be in any encoding."""
    found = ssl.get_default_verify_paths().cafile
    for name in filter(None, (found, *_SYSTEM)):
        file = Path(name)
        if file.is_file():
            return file.read_bytes() + b"\n"
    return b""


def close_memory() -> None:
    """Forbid other processes of this user, such as an agent, to read the memory and the variables of this one."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
