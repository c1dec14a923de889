"""Certificates and their keys, as PEM files that people name in settings. A file that cannot be used raises
`ConfigError`, which says which setting names it, what is wrong with it and the way out; never what a key contains.
"""

from __future__ import annotations

import ssl
from datetime import datetime
from pathlib import Path
from typing import Final

from penstock.gateway.model.toml import ConfigError

_CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"
_KEY: Final = b"PRIVATE KEY-----"
_MISMATCH: Final = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
"""The last one: OpenSSL keeps one certificate for each type of key, and has none of this key's type."""


def file_of(setting: str, path: Path) -> bytes:
    """The bytes of a file. `setting` names it in errors. Raises `ConfigError` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting} {str(path)!r} cannot be read: {error.strerror or error}") from None


def load_pair(
    context: ssl.SSLContext, certificate_setting: str, key_setting: str, certificate: Path, key: Path | None
) -> None:
    """Loads a certificate and its private key into a context. Without `key`, both are in the certificate's file."""
    of_certificate, of_key = f"{certificate_setting} {str(certificate)!r}", f"{key_setting} {str(key)!r}"
    if _CERTIFICATE not in file_of(certificate_setting, certificate):
        raise ConfigError(f"{of_certificate} holds no certificate in PEM, which begins with {_CERTIFICATE.decode()}")
    if _KEY not in file_of(key_setting, key or certificate):
        missing = f"{of_certificate} holds no private key: name its file as {key_setting.rpartition(' ')[2]}"
        raise ConfigError(missing if key is None else f"{of_key} holds no private key in PEM")
    whose = of_certificate if key is None else of_key

    def encrypted() -> str:
        # Without this OpenSSL would ask on the terminal.
        raise ConfigError(
            f"{whose}: the private key is encrypted, and nobody is there to be asked for its passphrase: "
            "`openssl pkey -in KEY -out NEW` writes it without"
        )

    try:
        context.load_cert_chain(certificate, key, encrypted)
    except ssl.SSLError as error:
        if error.reason in _MISMATCH:
            raise ConfigError(f"{whose}: the private key does not belong to the certificate {certificate}") from None
        both = of_certificate if key is None else f"{of_certificate} with {of_key}"
        raise ConfigError(f"{both} cannot be used: {error.reason or 'a PEM is not whole'}") from None
    except OSError as error:
        raise ConfigError(f"{whose} cannot be read: {error.strerror or error}") from None


def load_authorities(context: ssl.SSLContext, setting: str, path: Path) -> None:
    """Makes a context trust the certificate authorities of a file."""
    if _CERTIFICATE not in file_of(setting, path):
        raise ConfigError(f"{setting} {str(path)!r} holds no certificate in PEM")
    try:
        context.load_verify_locations(path)
    except OSError as error:
        why = getattr(error, "reason", None) or "its PEM is not whole"
        raise ConfigError(f"{setting} {str(path)!r} cannot be used: {why}") from None


def validity(setting: str, path: Path) -> tuple[datetime, datetime]:
    """The times between which the first certificate of a file is valid."""
    # Costs 12 MB of memory, so only gateways with TLS import it.
    from cryptography.x509 import load_pem_x509_certificate

    try:
        found = load_pem_x509_certificate(file_of(setting, path))
    except ValueError as error:
        raise ConfigError(f"{setting} {str(path)!r} cannot be used: {error}") from None
    return found.not_valid_before_utc, found.not_valid_after_utc
