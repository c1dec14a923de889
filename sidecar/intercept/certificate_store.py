"""The certificates of one run (`certificates`), ready for servers of its hosts. The key of their authority is gone."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from collections.abc import Iterable, Mapping

from penstock.gateway.client.child_process import ChildProcess

_MODULE = "penstock.sidecar.intercept.certificate_authority"


class CertificateStore:
    """Certificates for a few hosts, and the authority that clients must trust for them."""

    def __init__(self, pem: str, chains: Mapping[str, str], private: str = "") -> None:
        """`pem`: the certificate that clients must trust. `chains`: for each host its key and certificates. `private`:
        the authority's key, if requested. All are PEM.
        """
        self.pem, self._chains, self.private = pem, chains, private
        self._contexts: dict[str, ssl.SSLContext] = {}

    @classmethod
    async def create(cls, hosts: Iterable[str], private: bool = False) -> CertificateStore:
        """An authority for these names or addresses (IPv4, IPv6), made by a process that ends then. `private`: keep its
        key.
        """
        words = [*(["--private"] if private else []), *sorted(set(hosts))]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", _MODULE), *words, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await ChildProcess(process).output()
        if process.returncode != 0:
            raise OSError(f"certificates could not be made: the process ended with {process.returncode}")
        return cls(**json.loads(out))

    @classmethod
    def create_in_process(cls, hosts: Iterable[str]) -> CertificateStore:
        """The same as `create`, but in this process."""
        from penstock.sidecar.intercept.certificate_authority import certificates_json

        return cls(**json.loads(certificates_json(sorted(set(hosts)))))

    @property
    def hosts(self) -> frozenset[str]:
        """The hosts that have certificates."""
        return frozenset(self._chains)

    def context(self, host: str) -> ssl.SSLContext:
        """The TLS context of a server for a host; raises `KeyError` for a host without a certificate. It offers only
        HTTP/1.1 (ALPN), which carries WebSockets too. It refuses a client that asks for another name (SNI) than the
        host that it connected to.
        """
        found = self._contexts.get(host)
        if found is None:
            found = self._contexts[host] = _context(host, self._chains[host])
        return found


def _context(host: str, chain: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.sni_callback = lambda _, named, __: (
        None if not named or named.lower() == host else ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
    )
    # The ssl module reads only files. This one has no name for other processes, and is gone when it is closed.
    file = os.memfd_create("penstock-certificate")
    try:
        os.write(file, chain.encode())
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context
