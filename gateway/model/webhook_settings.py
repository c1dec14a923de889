"""Settings of webhooks: `[[webhook]]` of penstock.toml. Secret parts of a URL never get into an error."""

from __future__ import annotations

import base64
import binascii
from ipaddress import ip_address
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import Field, model_validator

from penstock.gateway.model.server_settings import environment_key
from penstock.gateway.model.toml import ConfigError, Section
from penstock.gateway.model.webhook import ReleaseEvent

PREFIX: Final = "whsec_"
LEAST, MOST = 24, 64
"""Least and most bytes of a secret, as Standard Webhooks defines them."""
DEFAULT_EVENTS: Final[tuple[ReleaseEvent, ...]] = ("start", "wait", "promote", "roll_back", "hold", "abort")
"""The events sent by default: those that a person must know of."""


class Webhook(Section):
    """`[[webhook]]`: an address that is told what becomes of releases."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """What commands, metrics and the tape call it."""
    url: str
    """Where it listens: `https://`, or `http://` on this machine."""
    secret_env: str
    """Environment variable with the secret that signs what it is told: `whsec_` and 24 to 64 bytes in base64."""
    events: list[ReleaseEvent] = Field(default=list(DEFAULT_EVENTS), min_length=1)
    """Which changes of releases it is told of."""

    @model_validator(mode="after")
    def _is_safe(self) -> Webhook:
        # A validator of the field would show its value, and a URL may hold a key.
        try:
            parts = urlsplit(self.url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
                raise ValueError("it must be an https:// URL, with a host")
        except ValueError:
            raise ValueError("url: it must be an https:// URL, with a host and perhaps a port") from None
        if parts.scheme == "http" and not _is_here(parts.hostname):
            raise ValueError(
                f"url: {self.redacted_url!r} is not on this machine, and http:// would send what becomes of releases "
                "in the clear: write https://"
            )
        return self

    @property
    def redacted_url(self) -> str:
        """The URL as far as people may see it: receivers have keys in user info, path and query."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    def keys(self) -> list[bytes]:
        """The signing keys, from the environment; raises `ConfigError` when the variable is missing or holds no secret.
        While a secret is replaced there are two, separated by a space, and each signs."""
        value = environment_key(f"webhook {self.name!r}", self.secret_env, "secret_env")
        keys = [_key(word) for word in (value or "").split()]
        if not keys or None in keys:
            raise ConfigError(
                f"webhook {self.name!r}: secret_env names {self.secret_env}, whose value is no secret of Standard "
                f'Webhooks: {PREFIX} and {LEAST} to {MOST} bytes in base64; echo "{PREFIX}$(openssl rand -base64 32)" '
                "makes one"
            )
        return [key for key in keys if key is not None]

    def secrets(self) -> list[str | None]:
        """The values that must not be shown anywhere: the secrets, and those that a URL may hold."""
        _ = self.keys()
        parts = urlsplit(self.url)
        return [*self._words(), *_hidden(parts)]

    def _words(self) -> list[str]:
        value = environment_key(f"webhook {self.name!r}", self.secret_env, "secret_env")
        return [word.removeprefix(PREFIX) for word in (value or "").split()]


def _hidden(parts: SplitResult) -> list[str | None]:
    return [None if it is None else unquote(it) for it in (parts.password, parts.query or None)]


def _key(word: str) -> bytes | None:
    try:
        key = base64.b64decode(word.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        return None
    return key if word.startswith(PREFIX) and LEAST <= len(key) <= MOST else None


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
