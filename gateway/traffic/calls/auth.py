"""Credentials and roles: keys for the control API, each with a name and a role, and agent tokens that open the data
plane for one rollout.

A token is stateless: `pst_` and the base64 of expiry, rollout and their HMAC-SHA256 under the gateway's secret. It
needs no storage and cannot be revoked alone; a new secret ends them all. Without an admin key everybody who reaches the
port is admin (the gateway then listens on loopback only), except a request with an agent token: that opens only its
rollout, whatever else the gateway allows. Of named keys the gateway knows only the SHA-256, which is enough because
they are random (`make_key`). Keys with the role `call` open calls of any rollout and nothing else; of the other keys
only the admin key opens calls. Pure: the caller brings headers and the clock.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.gateway.model.base import CALL, ID_PATTERN, Role
from penstock.gateway.model.settings import ADMIN_KEY, READ_KEY, LocalNames

PREFIX = "pst_"
KEY_PREFIX = "pst_key_"
"""Prefix of named keys, which are masked like agent tokens. No token begins so, because each begins with the highest
bytes of its expiry, which are zero."""
PURPOSE = b"penstock agent token 1\0"
_KEY_HEADERS = ("authorization", "x-api-key")
_KEY_LENGTHS = frozenset(map(len, _KEY_HEADERS))
EXPIRY = struct.Struct(">Q")
"""Seconds since the epoch; 0 is never."""


class AuthError(Exception):
    """A credential that opens nothing; the text says why."""


class Holder(NamedTuple):
    """The holder of a key."""

    name: str
    """Name of the key; empty for everybody if the gateway has no admin key."""
    role: Role
    """Role of the key."""


def make_key() -> str:
    """Return a new random key, to be given a name."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def key_hash(key: str) -> str:
    """SHA-256 of a named key, in hex: all that is kept of it."""
    return hashlib.sha256(key.encode()).hexdigest()


class Auth:
    """Checks the gateway's keys and tokens."""

    def __init__(
        self,
        admin_key: str | None,
        secret: bytes,
        read_key: str | None = None,
        named: Iterable[tuple[str, Holder]] = (),
        callers: Iterable[tuple[str, str]] = (),
        names: LocalNames | None = None,
    ) -> None:
        """`named`: hash and holder of each named key; `callers`: hash and name of each key that opens calls; `names`:
        the gateway's host names for requests while no key is required."""
        for name, key in ((f"admin key ({ADMIN_KEY})", admin_key), (f"read key ({READ_KEY})", read_key)):
            if key is not None and (not key or key.startswith(PREFIX)):
                raise ValueError(f"the {name} must not be empty nor start with {PREFIX!r}, which marks agent tokens")
        if read_key is not None and admin_key is None:
            raise ValueError(
                f"{READ_KEY} is set and {ADMIN_KEY} is not: without an admin key everybody may change everything, so a "
                f"read key protects nothing; set {ADMIN_KEY} too, or unset {READ_KEY}"
            )
        self._named, self._callers = dict(named), dict(callers)
        if self._named and admin_key is None:
            raise ValueError(
                f"there are named keys and {ADMIN_KEY} is not set: without an admin key everybody may change "
                f"everything, so they protect nothing; set {ADMIN_KEY} too"
            )
        if read_key is not None and read_key == admin_key:
            raise ValueError(f"{READ_KEY} is the same as {ADMIN_KEY}, which changes things: choose another read key")
        if len(secret) < 16:
            raise ValueError("the token secret must have at least 16 bytes")
        self.names = names or LocalNames()
        self.admin_key = admin_key
        self.read_key = read_key
        # Made once: setting up the HMAC costs more than signing a name.
        self._mac = hmac.new(secret, PURPOSE, hashlib.sha256)

    @property
    def own_keys(self) -> tuple[str, ...]:
        """The keys of the control API."""
        return tuple(key for key in (self.admin_key, self.read_key) if key is not None)

    def mint(self, rollout: str, expires_s: int | None = None, now: float | None = None) -> str:
        """Return a token for one rollout, valid for `expires_s` seconds, or for ever if None."""
        if not re.fullmatch(ID_PATTERN, rollout):
            raise ValueError(f"not a rollout id: {rollout!r}")
        if expires_s is not None and expires_s <= 0:
            raise ValueError("expires_s must be positive")
        expiry = 0 if expires_s is None else int(time.time() if now is None else now) + expires_s
        payload = EXPIRY.pack(expiry) + rollout.encode()
        return PREFIX + base64.urlsafe_b64encode(payload + self._sign(payload)).decode().rstrip("=")

    def rollout_of(self, token: str, now: float) -> str:
        """The rollout that a token opens; raises `AuthError`. `now`: seconds since the epoch."""
        blob = _decode(token)
        payload, signature = blob[:-32], blob[-32:]
        if len(payload) <= EXPIRY.size or not hmac.compare_digest(signature, self._sign(payload)):
            raise AuthError("the agent token is not one of this gateway's")
        (expiry,) = EXPIRY.unpack(payload[: EXPIRY.size])
        if expiry and now >= expiry:
            raise AuthError(f"the agent token expired {int(now) - expiry} s ago")
        return payload[EXPIRY.size :].decode()

    def is_admin(self, headers: Mapping[str, str]) -> bool:
        """True if the request may change things at the control API."""
        found = self.holder(list(credentials(headers)))
        return found is not None and found.role == "admin"

    def holder(self, presented: Sequence[str]) -> Holder | None:
        """The holder of the keys that a request presents; None if the control API does not know them."""
        if any(map(is_token, presented)) or self.find_call_key(presented) is not None:
            return None
        if self.admin_key is None:
            return Holder("", "admin")
        if _presents(presented, self.admin_key):
            return Holder("admin", "admin")
        if self.read_key is not None and _presents(presented, self.read_key):
            return Holder("read", "read")
        hashes = (key_hash(key) for key in presented if key.startswith(KEY_PREFIX))
        return next((found for it in hashes if (found := self._named.get(it)) is not None), None)

    def find_call_key(self, presented: Iterable[str]) -> str | None:
        """The name of a key among them that opens only calls; None if there is none."""
        keys = (key for key in presented if self._callers and key.startswith(KEY_PREFIX))
        return next((name for key in keys if (name := self._callers.get(key_hash(key))) is not None), None)

    def verify_call_key(self, key: str) -> str:
        """The name of a named key that opens calls; raises `AuthError`."""
        found, of_api = self._callers.get(key_hash(key)), self._named.get(key_hash(key))
        if found is not None:
            return found
        if of_api is not None:
            raise AuthError(f"the key {of_api.name!r} has the role {of_api.role!r}; calls need one with {CALL!r}")
        raise AuthError("this named key is not one of this gateway's")

    def _sign(self, payload: bytes) -> bytes:
        mac = self._mac.copy()
        mac.update(payload)
        return mac.digest()


def credentials(headers: Mapping[str, str]) -> Iterator[str]:
    """Yield every key that a request presents, where SDKs put them: `Authorization: Bearer` and `x-api-key`."""
    for name, value in headers.items():
        # The length of its name rules out most headers.
        if len(name) in _KEY_LENGTHS and (low := name.lower()) in _KEY_HEADERS:
            scheme, _, rest = value.strip().partition(" ")
            if low == "x-api-key":
                yield value.strip()
            elif scheme.lower() == "bearer":
                yield rest.strip()


def _presents(presented: Sequence[str], key: str) -> bool:
    """True if the key is among them. All are compared, in constant time."""
    wanted = key.encode()
    return any([hmac.compare_digest(one.encode(errors="replace"), wanted) for one in presented])


def is_token(credential: str) -> bool:
    """True for the form of an agent token, valid or not."""
    return credential.startswith(PREFIX) and not credential.startswith(KEY_PREFIX)


def _decode(token: str) -> bytes:
    if not is_token(token):
        raise AuthError(f"an agent token starts with {PREFIX}")
    text = token.removeprefix(PREFIX)
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise AuthError("the agent token is cut off or garbled") from None
