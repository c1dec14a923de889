"""The gateway and the key that a client takes when it is told none: as commands find them, from the environment.

    address    `PENSTOCK_GATEWAY`, else what ./penstock.toml sets up, else `LOCAL`
    key        `PENSTOCK_ADMIN_KEY`, else `PENSTOCK_READ_KEY`, else none

A reward function of `penstock run` finds the gateway of its runner instead. Importing this module loads no other.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from pathlib import Path
from typing import Final

LOCAL: Final = "http://127.0.0.1:4747"
"""Where `penstock serve` listens unless it is told otherwise."""
CONFIG_FILE: Final = Path("penstock.toml")
"""The configuration that `penstock serve` reads, and by which commands find its gateway, in the current directory."""
CURRENT_GATEWAY: Final[ContextVar[tuple[str, str | None] | None]] = ContextVar("CURRENT_GATEWAY", default=None)
"""(address, key) of the gateway for which a user's function is called, such as a reward function of `penstock run`.
None everywhere else."""


def control_key() -> str | None:
    """The key of the control API, from the gateway's own variables: the admin key, else the read key; None without
    either."""
    return os.environ.get("PENSTOCK_ADMIN_KEY") or os.environ.get("PENSTOCK_READ_KEY")


def configured_gateway(by_socket: bool = True) -> str:
    """The URL of the gateway that ./penstock.toml sets up. `by_socket`: whether it may be that of a socket. Raises
    `ConfigError` where the file does not say where it is."""
    from penstock.gateway.model.settings import AddressSettings
    from penstock.gateway.model.toml import ConfigError, read, validated

    try:
        tree = {key: value for key, value in read(CONFIG_FILE).items() if key in AddressSettings.model_fields}
        url = validated(AddressSettings, tree, str(CONFIG_FILE)).url(by_socket)
    except ConfigError as e:
        raise ConfigError(f"{e}; correct it, or name the gateway with --gateway or PENSTOCK_GATEWAY") from None
    if url is None:
        raise ConfigError(
            f"{CONFIG_FILE}: port = 0 is any free one: name the gateway, as --gateway http://HOST:PORT, or in "
            "PENSTOCK_GATEWAY"
        )
    return url


def gateway_and_key(url: str | None, key: str | None) -> tuple[str, str | None]:
    """(address, key) of the gateway to speak to: those that are given, and in place of None those of the environment.
    An empty key stands for none. Raises `ConfigError`."""
    current = CURRENT_GATEWAY.get()
    if url is None and current is not None:
        return current[0], current[1] if key is None else key
    if url is None:
        # Not Path.exists, which raises if this directory may not be read.
        configured = os.path.exists(CONFIG_FILE)
        url = os.environ.get("PENSTOCK_GATEWAY") or (configured_gateway() if configured else LOCAL)
    return url, control_key() if key is None else key
