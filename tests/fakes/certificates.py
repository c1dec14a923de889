"""Certificates for tests, made by trustme: an authority, and what it signs for servers and clients, good or out of
time.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from trustme import CA, KeyType

DAY = timedelta(days=1)


class Authority:
    """Signs; `file` is what its clients must trust."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._ca = folder, CA(path_length=0, organization_unit_name=f"Test authority {name}")
        self.file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def issue(
        self,
        name: str,
        *hosts: str,
        begins_in: timedelta = -3 * DAY,
        ends_in: timedelta = 5 * DAY,
        passphrase: bytes | None = None,
        of_rsa: bool = False,
    ) -> Path:
        """A PEM file with a key, then a certificate for these hosts (default: localhost), for a server and a client."""
        now = datetime.now(UTC)
        made = self._ca.issue_cert(
            *(hosts or ("localhost", "127.0.0.1")),
            common_name=name,
            not_before=now + begins_in,
            not_after=now + ends_in,
            key_type=KeyType.RSA if of_rsa else KeyType.ECDSA,
        )
        key, path = made.private_key_pem.bytes(), self._folder / f"{name}.pem"
        if passphrase:
            plain = load_pem_private_key(key, None)
            key = plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(passphrase))
        path.write_bytes(key + made.cert_chain_pems[0].bytes())
        return path

    def client(self, shown: Path | None = None) -> ssl.SSLContext:
        """TLS of a client that trusts it alone, and shows this certificate."""
        made = ssl.create_default_context(cafile=self.file)
        if shown is not None:
            made.load_cert_chain(shown)
        return made


def serial(pem: Path) -> str:
    """The serial number of a certificate, as the module ssl says it."""
    number = x509.load_pem_x509_certificate(pem.read_bytes()).serial_number
    return f"{number:X}".rjust((number.bit_length() + 7) // 8 * 2, "0")
