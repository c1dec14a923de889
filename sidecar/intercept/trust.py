"""What an agent is given so that its clients use the front and trust its authority: variables, and one file.

Clients read different variables, and some of them replace what the system trusts while others add to it. So each gets a
bundle, the system's certificates and ours, but Node's own variable, which adds, gets ours alone as well.
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
"""Read by OpenSSL (Python's httpx, Ruby, PHP) and Go; requests; curl; Codex; git; cargo; boto; pip; Deno."""
ADDED: Final = ("NODE_EXTRA_CA_CERTS",)
"""Read by Node, in addition to what it brings along."""
PROXIES: Final = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_SYSTEM: Final = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")


_PR_SET_DUMPABLE: Final = 4
_HERE: Final = ("localhost", "127.0.0.1", "::1")


def variables(bundle: Path, own: Path, port: int, hosts: Collection[str]) -> dict[str, str]:
    """The variables of an agent. Nothing is excepted from the proxy but this machine itself, and that only where none
    of the hosts whose TLS ends here is on it."""
    excepted = "" if set(_HERE) & set(hosts) else ",".join(_HERE)
    proxy = f"http://127.0.0.1:{port}"
    return {
        **certificates(bundle, own),
        **dict.fromkeys(PROXIES, proxy),
        **dict.fromkeys(("NO_PROXY", "no_proxy"), excepted),
        "NODE_USE_ENV_PROXY": "1",
    }


def certificates(bundle: Path, own: Path) -> dict[str, str]:
    """The variables of an agent whose connections the kernel redirects: it knows of no proxy."""
    return {**dict.fromkeys(BUNDLES, str(bundle)), **dict.fromkeys(ADDED, str(own))}


def write(folder: Path, pem: str) -> tuple[Path, Path]:
    """Writes (bundle, our certificate alone) below a folder."""
    bundle, own = folder / "ca-bundle.pem", folder / "penstock-ca.pem"
    own.write_text(pem)
    bundle.write_bytes(_system() + pem.encode())
    return bundle, own


def _system() -> bytes:
    """The certificates that this machine trusts. Comments among them may be of any bytes."""
    found = ssl.get_default_verify_paths().cafile
    for name in filter(None, (found, *_SYSTEM)):
        file = Path(name)
        if file.is_file():
            return file.read_bytes() + b"\n"
    return b""


def close_memory() -> None:
    """Other processes of this user, such as an agent, may no longer read the memory and the variables of this one."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
