"""Settings of TLS on the agents' side: `[tls]` of penstock.toml. `gateway.process.tls` reads the files."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from penstock.gateway.model.toml import Section


class TlsSettings(Section):
    """`[tls]`: HTTPS on the port. The Unix socket stays without."""

    certificate: Path | None = Field(default=None, strict=False)
    """PEM file with the gateway's certificate, then those between it and its authority. With it the port speaks HTTPS
    only."""
    key: Path | None = Field(default=None, strict=False)
    """PEM file with its private key, not encrypted. Default: the key is in the file of the certificate."""
    client_ca: Path | None = Field(default=None, strict=False)
    """PEM file of certificate authorities: every client must show a certificate of one of them."""

    @model_validator(mode="after")
    def _has_certificate(self) -> TlsSettings:
        if self.certificate is None:
            raise ValueError("certificate is missing: name the PEM file with the gateway's certificate")
        return self


NO_TLS = TlsSettings.model_construct()
"""Plain HTTP, which is served without a `[tls]`. An empty `[tls]` is a mistake."""
