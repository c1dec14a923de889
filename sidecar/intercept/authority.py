"""The certificate authority of one run: for a few hosts, for a day at most, its key only in memory.

Whoever trusts it trusts it for these hosts and no others (name constraints, RFC 5280 section 4.2.1.10), so a stolen
certificate says little. Clients that read the whole chain (OpenSSL, Go, BoringSSL, webpki) hold it to that.
"""

from __future__ import annotations

import os
import ssl
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
"""How far clocks of containers may be apart."""


class Authority:
    """Makes a certificate for each host that is asked for."""

    def __init__(self, hosts: Iterable[str], now: datetime | None = None) -> None:
        """`hosts`: names, or addresses of IPv4 and IPv6, that it may vouch for."""
        self.hosts = frozenset(hosts)
        self._from = (now or datetime.now(UTC)) - _CLOCKS
        self.until = self._from + DAY
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Penstock sidecar, this run only")])
        self._certificate = self._signed(self._own())
        self.pem = self._certificate.public_bytes(Encoding.PEM).decode("ascii")
        """What its clients must trust."""
        self._contexts: dict[str, ssl.SSLContext] = {}

    @property
    def private(self) -> str:
        """Its key, for an engine that makes certificates itself."""
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode("ascii")

    def context(self, host: str) -> ssl.SSLContext:
        """TLS for a server of this name, made at the first call; raises `KeyError` for a host that it may not vouch
        for. Only HTTP/1.1 is offered (ALPN), which carries WebSockets too. A client that asks for another name (SNI)
        than it has connected to is refused."""
        if host not in self.hosts:
            raise KeyError(host)
        found = self._contexts.get(host)
        if found is None:
            found = self._contexts[host] = self._made(host)
        return found

    def _made(self, host: str) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        chain = self._signed(self._leaf(host, key)).public_bytes(Encoding.PEM)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.sni_callback = lambda _, named, __: (
            None if named in (None, host) else ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        )
        # The ssl module reads files only. This one has no name for other processes, and is gone when it is closed.
        file = os.memfd_create("penstock-certificate")
        try:
            secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            os.write(file, secret + chain + self.pem.encode())
            context.load_cert_chain(f"/proc/self/fd/{file}")
        finally:
            os.close(file)
        return context

    def _own(self) -> x509.CertificateBuilder:
        permitted = [_permitted(host) for host in sorted(self.hosts)]
        return (
            self._begun(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.NameConstraints(permitted, None), critical=True)
        )

    def _leaf(self, host: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        # OpenSSL takes a common name without spaces for a host's, which the constraints forbid where it is an address.
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
