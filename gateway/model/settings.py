"""Settings that commands need without the rest of a configuration: servers of tools (`[mcp]`), TLS, the log, webhooks,
and the names of this machine.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import Field, StringConstraints, field_validator, model_validator

from penstock.gateway.model.release import ReleaseEvent
from penstock.gateway.model.toml import ConfigError, Section
from penstock.gateway.model.tools import OnChange

ADMIN_KEY = "PENSTOCK_ADMIN_KEY"
"""Environment variable with the key that opens the control API; commands read it too."""
READ_KEY = "PENSTOCK_READ_KEY"
"""Environment variable with the key that opens only requests that change nothing."""
AUDIT_KEY = "PENSTOCK_AUDIT_KEY"
"""Environment variable with the key that signs the audit chains of releases; it is needed to verify them too."""
OWN_KEYS = (ADMIN_KEY, READ_KEY, AUDIT_KEY)
_HOSTED = ("env", "env_keys", "cwd", "processes")
"""Settings that only servers have that the gateway hosts."""


def http_url(value: str, keys: str) -> str:
    """A URL without its last slash; raises `ValueError`. `keys`: the setting that names a key."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it must be an http:// or https:// URL, with a host")
    if not value.isascii():
        raise ValueError("it must be in ASCII: a host's other letters are written as xn--..., those of a path as %XX")
    try:
        wrong = parts.port == 0
    except ValueError:
        wrong = True
    if wrong:
        raise ValueError("its port must be a number from 1 to 65535")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"it may hold no user info, query or fragment; keys belong into {keys}")
    return value.rstrip("/")


def environment_key(whose: str, variable: str | None, setting: str = "key_env") -> str | None:
    """A key from the environment; None if `variable` is None. Raises `ConfigError` when the named variable is not set.
    `whose` and `setting` name it in the error."""
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        missing = f"{setting} names {variable}, which is not set in the environment"
        raise ConfigError(f"{whose}: {missing}: export {variable}=...")
    return value


class McpServer(Section):
    """`[mcp.servers.NAME]`: a server of tools, which agents reach at `/mcp/NAME`."""

    url: str | None = None
    """Endpoint of streamable HTTP, or of the older HTTP with SSE."""
    command: list[str] | None = Field(default=None, min_length=1)
    """Command with arguments that starts a server on stdin and stdout, which the gateway hosts."""
    env: dict[str, str] = Field(default={})
    """Environment variables of its process."""
    env_keys: list[str] = Field(default=[])
    """Variables that it gets from the gateway's environment, such as keys; their values never reach the tape."""
    cwd: Path | None = Field(default=None, strict=False)
    """Working directory. Default: the gateway's own."""
    processes: int = Field(default=100, gt=0)
    """Processes at a time; each session has one."""
    key_env: str | None = None
    """Environment variable with its key, sent as a bearer token instead of the agent's. Without it the agent's own
    passes."""
    first_byte_timeout: float = Field(default=600.0, gt=0)
    """Seconds until an answer must begin."""
    on_change: OnChange = "warn"
    """If tools, prompts, resources or instructions are not as approved: `warn` serves them, `hold` serves the approved
    ones, `deny` refuses them."""
    max_concurrent: int | None = Field(default=None, gt=0)
    """Requests at a time; others wait in order for at most `first_byte_timeout` seconds."""
    breaker_failures: int | None = Field(default=None, gt=0)
    """After so many failed requests in a row, requests are refused for half a minute."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        # The path is kept as it is: `/mcp` and `/mcp/` may be two servers.
        _ = None if value is None else http_url(value, "key_env")
        return value

    @model_validator(mode="after")
    def _is_one_of_both(self) -> McpServer:
        if (self.url is None) == (self.command is None):
            raise ValueError("give it either url, where it listens, or command, which starts it")
        others = ("key_env",) if self.url is None else _HOSTED
        if found := [name for name in others if name in self.model_fields_set]:
            kind, way = ("command", "env_keys gives it keys") if self.url is None else ("url", "it is for command")
            raise ValueError(f"{found[0]} does nothing for a server with {kind}: {way}")
        for own in OWN_KEYS:
            if own in self.env_keys:
                raise ValueError(f"env_keys: {own} is the gateway's own and given to no server")
        return self

    def keys(self, name: str) -> dict[str, str]:
        """The variables that the server gets from the gateway's environment; raises `ConfigError` when one is
        missing."""
        missing = [key for key in self.env_keys if key not in os.environ]
        if missing:
            unset = f"env_keys names {missing[0]}, which is not set in the environment: export {missing[0]}=..."
            raise ConfigError(f"mcp.servers.{name}: {unset}")
        return {key: os.environ[key] for key in self.env_keys}

    def key(self, name: str) -> str | None:
        """The server's key from the environment; raises `ConfigError` when it is named and missing."""
        return environment_key(f"mcp.servers.{name}", self.key_env)


class McpSettings(Section):
    """`[mcp]`: the servers of tools that agents reach through the gateway."""

    servers: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")], McpServer] = Field(default={})
    """Tool servers, by the name in their addresses and spans."""
    write: bool = False
    """Whether Penstock's own server, `/mcp/penstock`, may post rewards and propose versions of prompts."""


# Settings of TLS on the agents' side: `[tls]` of penstock.toml. `gateway.process.listeners` reads the files.


class TlsSettings(Section):
    """`[tls]`: HTTPS on the port. The Unix socket stays without."""

    certificate: Path | None = Field(default=None, strict=False)
    """PEM file with the gateway's certificate, then those between it and its authority. The port then speaks HTTPS
    only."""
    key: Path | None = Field(default=None, strict=False)
    """PEM file with its unencrypted private key. Default: the key is in the certificate's file."""
    client_ca: Path | None = Field(default=None, strict=False)
    """PEM file of authorities: every client must show a certificate of one of them."""

    @model_validator(mode="after")
    def _has_certificate(self) -> TlsSettings:
        if self.certificate is None:
            raise ValueError("certificate is missing: name the PEM file with the gateway's certificate")
        return self


NO_TLS = TlsSettings.model_construct()
"""Plain HTTP, which is served without a `[tls]`. An empty `[tls]` is a mistake."""


EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""Addresses that stand for all of this machine, each with one that can be reached."""


class AddressSettings(Section):
    """The address of a gateway: it listens there, and commands find it by that."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    names: list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,253}$")]] = Field(default=[])
    """Names, besides `localhost`, by which clients and web pages may call this gateway while no key is needed."""
    port: int = Field(default=4747, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    socket: Path | None = Field(default=None, strict=False)
    """Unix socket to listen on as well, for this user only (mode 0600)."""
    tls: TlsSettings = NO_TLS

    @field_validator("data", "socket", "prices", mode="before", check_fields=False)
    @classmethod
    def _names_something(cls, value: Any) -> Any:
        # An empty path is the current directory.
        if value == "":
            raise ValueError("it names nothing: give a path, or leave it out")
        return value

    def url(self, by_socket: bool) -> str | None:
        """URL of the gateway for commands on its machine; None where the port is any free one. `by_socket`: whether it
        may be that of the socket, which needs no certificate."""
        https = self.tls.certificate is not None
        if by_socket and self.socket is not None and (https or not self.port):
            return f"unix:{self.socket.absolute()}"
        if not self.port:
            return None
        host = self.names[0] if https and self.names else EVERYWHERE.get(self.host, self.host)
        return f"http{'s' if https else ''}://{f'[{host}]' if ':' in host else host}:{self.port}"


# Settings of the log: `[log]` of penstock.toml. `gateway.wire.http.log` writes it.


class LogSettings(Section):
    """`[log]`: what the gateway writes to stderr."""

    format: Literal["text", "json"] = "text"
    """`json` is one object a line."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is written; lines of calls always are."""
    calls: bool = False
    """Write a line for each finished call, without its content."""


# Settings of webhooks: `[[webhook]]` of penstock.toml. Secret parts of a URL never get into an error.

PREFIX: Final = "whsec_"
LEAST, MOST = 24, 64
"""Least and most bytes of a secret, as Standard Webhooks defines them."""
DEFAULT_EVENTS: Final[tuple[ReleaseEvent, ...]] = ("start", "wait", "promote", "roll_back", "hold", "abort")
"""The events sent by default: those that a person must know of."""


class Webhook(Section):
    """`[[webhook]]`: an address that is told what becomes of releases."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name in commands, metrics and the tape."""
    url: str
    """Address of the receiver: `https://`, or `http://` on this machine."""
    secret_env: str
    """Environment variable with the secret that signs messages: `whsec_` and 24 to 64 bytes in base64."""
    events: list[ReleaseEvent] = Field(default=list(DEFAULT_EVENTS), min_length=1)
    """Changes of releases that are sent."""

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


# The names by which clients may call a gateway that requires no key, and the sites whose pages may call it.
#
# Any web page can send requests to this machine from a visitor's browser, and read the answers too, if its own name
# resolves to this machine (DNS rebinding). But it cannot hide its name: the called name is in `Host`, the page's site
# in `Origin`. So only names are accepted that nobody else can own: one of this machine, an address, a name without a
# dot or of a domain that is reserved for private use, and the names in the configuration.

LOOPBACK: Final = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)
"""Hosts by which a browser reaches this machine only. A page of any other name may be an attacker's (DNS rebinding)."""
_PRIVATE: Final = re.compile(
    r"([0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9a-f:.]+\]|[a-z0-9_-]+|[a-z0-9_.-]+\.(localhost|internal|test))", re.IGNORECASE
)
"""Hosts that nobody can have registered. Docker calls the machine around a container host.docker.internal."""
_PORT: Final = re.compile(r":\d{1,5}\Z")
_WEB: Final = re.compile(r"https?://", re.IGNORECASE)
_NOWHERE: Final = ("null", "file://")
"""Origins of pages that hide their site."""


class LocalNames:
    """The accepted names of one gateway."""

    def __init__(self, names: Iterable[str] = (), asked: Iterable[str] = ()) -> None:
        """`names`: the gateway's own, as configured. `asked`: hosts of other servers that calls may name, because their
        traffic is led through this gateway."""
        self._names = frozenset(name.lower() for name in names)
        self._asked = frozenset(name.lower() for name in asked)

    def is_own(self, host: str) -> bool:
        """True if a host, with or without a port, is this machine for certain."""
        return LOOPBACK.fullmatch(host) is not None or _PORT.sub("", host).lower() in self._names

    def accepts_host(self, host: str) -> bool:
        """True if a call may name this host."""
        name = _PORT.sub("", host).lower()
        return _PRIVATE.fullmatch(name) is not None or name in self._names or name in self._asked

    def accepts_origin(self, origin: str, host: str) -> bool:
        """True if a page of this origin may send calls: it is this machine's, it is of the same `host`, which was
        accepted, or it belongs to a local program, such as an editor."""
        web = _WEB.match(origin)
        if web is None:
            return origin.lower() not in _NOWHERE
        site = origin[web.end() :]
        return self.is_own(site) or (site.lower() == host.lower() and bool(host))
