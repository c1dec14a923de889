"""`penstock key`: makes keys for people and programs that use the control API, or make calls."""

from __future__ import annotations

from typing import Literal


def make(name: str, /, *, role: Literal["call", "read", "operate", "release"] = "read") -> None:
    """Make a named key for the control API or for calls: the key, and what penstock.toml keeps of it.

    It is printed this once and stored nowhere. Commands take it from PENSTOCK_ADMIN_KEY, agents as their API key.

    Parameters
    ----------
    name
        Whose it is: what the audit log and budgets call it.
    role
        What it opens: call (model calls, and nothing else); or of the control API read; operate (the queue, upstreams,
        tools, tokens) as well; or release (versions, releases) too.
    """
    from penstock.gateway.client.console import validated_model
    from penstock.gateway.config import KeySettings
    from penstock.gateway.traffic.calls.admission import key_hash, make_key

    key = make_key()
    kept = validated_model(KeySettings, "name", name=name, role=role, sha256=key_hash(key))
    print(key)
    print(f'\n[[key]]\nname = "{kept.name}"\nrole = "{kept.role}"\nsha256 = "{kept.sha256}"')
