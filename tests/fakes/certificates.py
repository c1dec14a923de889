"""Certificates for tests, made here: an authority, and what it signs for servers and clients, good or out of time."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = timedelta(days=1)


class Authority:
    """Signs; `file` is what its clients must trust."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Test authority {name}")])
        made = (
            self._begun(self._name, self._key, -3 * DAY, 10 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.KeyUsage(False, False, False, False, False, True, True, False, False), critical=True)
        )
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

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
        key = rsa.generate_private_key(65537, 2048) if of_rsa else ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        kinds = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        made = (
            self._begun(subject, key, begins_in, ends_in)
            .add_extension(x509.ExtendedKeyUsage(kinds), critical=False)
            .add_extension(
                x509.SubjectAlternativeName([_host(host) for host in hosts or ("localhost", "127.0.0.1")]),
                critical=False,
            )
        )
        hidden: KeySerializationEncryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
        path = self._folder / f"{name}.pem"
        path.write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, hidden)
            + made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)
        )
        return path

    def client(self, shown: Path | None = None) -> ssl.SSLContext:
        """TLS of a client that trusts it alone, and shows this certificate."""
        made = ssl.create_default_context(cafile=self.file)
        if shown is not None:
            made.load_cert_chain(shown)
        return made

    def _begun(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey,
        begins_in: timedelta,
        ends_in: timedelta,
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder(issuer_name=self._name, subject_name=subject, public_key=key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins_in)
            .not_valid_after(now + ends_in)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )


def serial(pem: Path) -> str:
    """The serial number of a certificate, as the module ssl says it."""
    number = x509.load_pem_x509_certificate(pem.read_bytes()).serial_number
    return f"{number:X}".rjust((number.bit_length() + 7) // 8 * 2, "0")


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)
