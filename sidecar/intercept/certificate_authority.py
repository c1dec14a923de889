"""A certificate authority for a few hosts and a day at most, and certificates of these hosts.

A client that trusts the authority trusts it for these hosts and no others (name constraints, RFC 5280 section
4.2.1.10), so a stolen key does little harm. Clients that check the whole chain (OpenSSL, Go, BoringSSL, webpki) enforce
that. trustme, which makes certificates for tests, knows no name constraints, and its authorities last a thousand years.

    python -m penstock.sidecar.intercept.certificate_authority [--private] HOST...

prints them as JSON. A sidecar runs this process to make them: the key is gone when the process ends, and so are the 12
MB of memory that it takes to make certificates.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address, ip_network
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY: Final = timedelta(hours=24)
_CLOCKS: Final = timedelta(minutes=5)
"""The most by which the clocks of containers may differ."""


class CertificateAuthority:
    """A certificate authority that signs certificates of its hosts."""

    def __init__(self, hosts: Iterable[str], now: datetime | None = None) -> None:
        """`hosts`: the names or addresses (IPv4, IPv6) that it may sign for."""
        self.hosts = frozenset(hosts)
        self._from = (now or datetime.now(UTC)) - _CLOCKS
        self.until = self._from + DAY
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Penstock sidecar, this run only")])
        self._certificate = self._signed(self._own())
        self.pem = self._certificate.public_bytes(Encoding.PEM).decode("ascii")
        """The certificate that clients must trust."""

    @property
    def private(self) -> str:
        """The authority's key, for an engine that makes certificates itself."""
        return _private(self._key)

    def chain(self, host: str) -> str:
        """A new key for a server of this host, its certificate and the authority's, as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._signed(self._leaf(host, key)).public_bytes(Encoding.PEM).decode("ascii")
        return _private(key) + certificate + self.pem

    def _own(self) -> x509.CertificateBuilder:
        permitted = [_permitted(host) for host in sorted(self.hosts)]
        return (
            self._begun(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.NameConstraints(permitted, None), critical=True)
        )

    def _leaf(self, host: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        # OpenSSL treats a common name without spaces as a host name, and the constraints forbid an address there.
        common = host if isinstance(_general(host), x509.DNSName) else f"address {host}"
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])
        return (
            self._begun(name, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_general(host)]), critical=False)
        )

    def _begun(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        public = key.public_key()
        return (
            x509.CertificateBuilder(subject_name=subject, issuer_name=self._name, public_key=public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._from)
            .not_valid_after(self.until)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )

    def _signed(self, builder: x509.CertificateBuilder) -> x509.Certificate:
        return builder.sign(self._key, hashes.SHA256())


def _private(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode("ascii")


def _general(host: str) -> x509.DNSName | x509.IPAddress:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _permitted(host: str) -> x509.DNSName | x509.IPAddress:
    try:
        return x509.IPAddress(ip_network(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def certificates_json(words: list[str]) -> str:
    """The command's output, as JSON: `pem`, the certificate that clients must trust; `chains`, keys and certificates
    for servers of the hosts; with `--private`, the authority's key.
    """
    hosts = [word for word in words if word != "--private"]
    maker = CertificateAuthority(hosts)
    made: dict[str, object] = {"pem": maker.pem, "chains": {host: maker.chain(host) for host in hosts}}
    return json.dumps(made | ({"private": maker.private} if "--private" in words else {}))


if __name__ == "__main__":
    print(certificates_json(sys.argv[1:]))
