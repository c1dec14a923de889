"""Settings of servers of tools: `[mcp]` and `[mcp.servers.NAME]` of penstock.toml."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, field_validator, model_validator

from penstock.gateway.model.definitions import OnChange
from penstock.gateway.model.toml import ConfigError, Section

ADMIN_KEY = "PENSTOCK_ADMIN_KEY"
"""Environment variable with the key that opens the control API; commands read it too."""
READ_KEY = "PENSTOCK_READ_KEY"
"""Environment variable with the key that opens only requests that change nothing."""
AUDIT_KEY = "PENSTOCK_AUDIT_KEY"
"""Environment variable with the key that signs the audit chains of releases; it is needed to verify them too."""
OWN_KEYS = (ADMIN_KEY, READ_KEY, AUDIT_KEY)
_HOSTED = (
    "env", "env_keys", "cwd", "processes", "idle_timeout", "memory_bytes",
)  # fmt: skip
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
        raise ConfigError(f"{whose}: {setting} names {variable}, which is not set in the environment")
    return value


class McpServer(Section):
    """`[mcp.servers.NAME]`: a server of tools, which agents reach at `/mcp/NAME`."""

    url: str | None = None
    """Its endpoint: that of streamable HTTP, or the one that opens the stream of the older HTTP with SSE."""
    command: list[str] | None = Field(default=None, min_length=1)
    """What starts it, with its arguments, if it speaks on stdin and stdout: the gateway hosts it."""
    env: dict[str, str] = Field(default={})
    """Variables of its environment."""
    env_keys: list[str] = Field(default=[])
    """Names of variables that it gets from the gateway's environment, such as keys; the tape never has their values."""
    cwd: Path | None = Field(default=None, strict=False)
    """Directory that it starts in. Default: the gateway's own."""
    processes: int = Field(default=100, gt=0)
    """How many of its processes may run at a time: each session has one."""
    idle_timeout: float = Field(default=1800.0, gt=0)
    """Seconds without a request or a stream after which a session ends, and its process."""
    memory_bytes: int | None = Field(default=None, gt=0)
    """Largest address space of each of its processes. Node.js reserves far more than it uses."""
    key_env: str | None = None
    """Environment variable with its key, sent as a bearer token in place of the agent's. Without it the agent's own
    passes through."""
    first_byte_timeout: float = Field(default=600.0, gt=0)
    """Seconds until an answer must begin."""
    on_change: OnChange = "warn"
    """What happens when its tools, prompts, resources or instructions are not as approved: `warn` serves them, `hold`
    serves what was approved, `deny` refuses them."""
    max_concurrent: int | None = Field(default=None, gt=0)
    """Requests that the server is given at a time; others wait in their order, at most `first_byte_timeout` seconds."""
    breaker_failures: int | None = Field(default=None, gt=0)
    """Requests in a row that must fail on their way, so that the server is left alone for half a minute."""

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
            raise ConfigError(f"mcp.servers.{name}: env_keys names {missing[0]}, which is not set in the environment")
        return {key: os.environ[key] for key in self.env_keys}

    def key(self, name: str) -> str | None:
        """The server's key from the environment; raises `ConfigError` when it is named and missing."""
        return environment_key(f"mcp.servers.{name}", self.key_env)


class McpSettings(Section):
    """`[mcp]`: servers of tools."""

    servers: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")], McpServer] = Field(default={})
    """By the name that their addresses and spans have."""
    write: bool = False
    """Whether Penstock's own server, at `/mcp/penstock`, may post rewards and propose versions of prompts."""
