"""Opens the tape and the access control of a gateway before it serves."""

from __future__ import annotations

from pathlib import Path

from penstock.gateway.config import ConfigError, GatewayConfig, admin_key, audit_key, read_key
from penstock.gateway.model.known_secrets import NO_SECRETS, Secrets
from penstock.gateway.process.other_writers import ReleaseChangeFollower
from penstock.gateway.releases.operations import LiveReleases
from penstock.gateway.tape.store import MAP_BYTES, MEMORY_BYTES, Store
from penstock.gateway.traffic.calls.auth import Auth, Holder
from penstock.gateway.work.queue.attempts import record_sign_of_life
from penstock.gateway.work.queue.memory_queue import MemoryQueue


def open_store(
    path: Path,
    map_bytes: int = MAP_BYTES,
    memory_bytes: int = MEMORY_BYTES,
    secrets: Secrets = NO_SECRETS,
    lock: int | None = None,
) -> Store:
    """Return a tape for writing, with the followers of the queue and of releases. `lock`: the writer's lock, if another
    process hands it over."""
    return Store(
        path,
        followers=(MemoryQueue(), LiveReleases(audit_key()), ReleaseChangeFollower()),
        woken=record_sign_of_life,
        map_bytes=map_bytes,
        memory_bytes=memory_bytes,
        secrets=secrets,
        lock=lock,
    )


def make_auth(store: Store, config: GatewayConfig) -> Auth:
    """Return the access control; raises `ConfigError`, and closes the tape then."""
    named = [(one.sha256, Holder(one.name, one.role)) for one in config.key if one.role != "call"]
    callers = [(one.sha256, one.name) for one in config.key if one.role == "call"]
    try:
        return Auth(admin_key(), store.secret(), read_key(), named, callers, config.local_names())
    except ValueError as error:
        store.close()
        raise ConfigError(str(error)) from None
