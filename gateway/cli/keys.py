"""`penstock key`: makes keys for people and programs that use the control API."""

from __future__ import annotations

from typing import Literal


def make(name: str, /, *, role: Literal["read", "operate", "release"] = "read") -> None:
    """Make a named key for the control API: the key, and what penstock.toml keeps of it.

    It is printed this once and stored nowhere. Commands take it from PENSTOCK_ADMIN_KEY.

    Parameters
    ----------
    name
        Whose it is: what the audit log calls it.
    role
        What it opens: read; operate (the queue, upstreams, tools, tokens) as well; or release (versions, releases) too.
    """
    from penstock.gateway.calls.auth import key_hash, make_key
    from penstock.gateway.client.console import made
    from penstock.gateway.config import Key

    key = make_key()
    kept = made(Key, name=name, role=role, sha256=key_hash(key))
    print(key)
    print(f'\n[[key]]\nname = "{kept.name}"\nrole = "{kept.role}"\nsha256 = "{kept.sha256}"')
