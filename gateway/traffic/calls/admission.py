"""Finds the rollout of a call and decides whether it may pass: the first steps in the life of a call. No I/O.

An address in the path, the headers or the baggage comes first, then an agent token, then the conversation that the
request continues, or the connection it comes on (`calls.conversation_matcher`).
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
from dataclasses import replace
from typing import Final, Literal, NamedTuple
from urllib.parse import unquote

from penstock.gateway.model.base import CALL, ID_PATTERN, Role
from penstock.gateway.model.settings import ADMIN_KEY, READ_KEY, LocalNames
from penstock.gateway.traffic.calls.call_request import (
    AGENT_HEADERS,
    NOTED,
    SESSION_HEADERS,
    TURN_METADATA,
    AddressError,
    CallAddress,
    CallRequest,
    HeadDecision,
    Tunnel,
    agent_kind,
    from_headers,
    from_path,
    session_rollout,
)
from penstock.gateway.traffic.calls.conversation_matcher import ConversationMatcher, decode_request
from penstock.gateway.traffic.calls.conversations import EMPTY
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.wire.dialects import OPAQUE, find
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.family import INSECURE, SUBPROTOCOL
from penstock.gateway.wire.dialects.loose_json import RequestFields, detached_fields, loads, obj
from penstock.gateway.wire.dialects.mcp import MCP, PREFIX
from penstock.gateway.wire.dialects.request_body import MULTIPART, is_form
from penstock.gateway.wire.http.client_connection import ConnectionHints
from penstock.gateway.wire.http.headers import CREDENTIALS
from penstock.gateway.wire.http.redaction import url as redact_url
from penstock.gateway.wire.http.request import ClientFault, Headers, HttpRequest

# Credentials and roles: keys for the control API, each with a name and a role, and agent tokens that open the data
# plane for one rollout.
#
# A token is stateless: `pst_` and the base64 of expiry, rollout and their HMAC-SHA256 under the gateway's secret. It
# needs no storage and cannot be revoked alone; a new secret ends them all. Without an admin key everybody who reaches
# the port is admin (the gateway then listens on loopback only), except a request with an agent token: that opens only
# its rollout, whatever else the gateway allows. Of named keys the gateway knows only the SHA-256, which is enough
# because they are random (`make_key`). Keys with the role `call` open calls of any rollout and nothing else; of the
# other keys only the admin key opens calls. Pure: the caller brings headers and the clock.

TOKEN_PREFIX = "pst_"
KEY_PREFIX = "pst_key_"
"""Prefix of named keys, which are masked like agent tokens. No token begins so, because each begins with the highest
bytes of its expiry, which are zero."""
LOGIN_PREFIX = f"{KEY_PREFIX}login."
"""Prefix of tokens that stand for a key for calls, after somebody has signed in a client with it (`api.login`). No key
begins so, because keys have no dots."""
LoginKind = Literal["access", "refresh"]
"""A token that opens calls, or one by which a client gets another such token."""
PURPOSE = b"penstock agent token 1\0"
_LOGIN_PURPOSE: Final = b"penstock login 1\0"
_HASH_BYTES: Final = 8
"""Bytes of a key's hash in a login token: another key of the same name ends it."""
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
            if key is not None and (not key or key.startswith(TOKEN_PREFIX)):
                raise ValueError(
                    f"the {name} must not be empty nor start with {TOKEN_PREFIX!r}, which marks agent tokens"
                )
        if read_key is not None and admin_key is None:
            raise ValueError(
                f"{READ_KEY} is set and {ADMIN_KEY} is not: without an admin key everybody may change everything, so a "
                f"read key protects nothing; set {ADMIN_KEY} too, or unset {READ_KEY}"
            )
        self._named, self._callers = dict(named), dict(callers)
        self._caller_hashes = {name: hashed for hashed, name in self._callers.items()}
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
        self._login_mac = hmac.new(secret, _LOGIN_PURPOSE, hashlib.sha256)

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
        return TOKEN_PREFIX + base64.urlsafe_b64encode(payload + _sign(self._mac, payload)).decode().rstrip("=")

    def rollout_of(self, token: str, now: float) -> str:
        """The rollout that a token opens; raises `AuthError`. `now`: seconds since the epoch."""
        blob = _decode(token)
        payload, signature = blob[:-32], blob[-32:]
        if len(payload) <= EXPIRY.size or not hmac.compare_digest(signature, _sign(self._mac, payload)):
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

    @property
    def has_call_keys(self) -> bool:
        """True if there are keys that open only calls."""
        return bool(self._callers)

    def find_call_key(self, presented: Iterable[str]) -> str | None:
        """The name of a key among them that opens only calls; None if there is none."""
        keys = (key for key in presented if self._callers and key.startswith(KEY_PREFIX))
        return next((name for key in keys if (name := self._caller(key)) is not None), None)

    def verify_call_key(self, key: str) -> str:
        """The name of a named key that opens calls; raises `AuthError`."""
        if key.startswith(LOGIN_PREFIX):
            return self.login_key(key, "access", time.time())
        found, of_api = self._callers.get(key_hash(key)), self._named.get(key_hash(key))
        if found is not None:
            return found
        if of_api is not None:
            raise AuthError(f"the key {of_api.name!r} has the role {of_api.role!r}; calls need one with {CALL!r}")
        raise AuthError("this named key is not one of this gateway's")

    def _caller(self, key: str) -> str | None:
        try:
            return self.verify_call_key(key)
        except AuthError:
            return None

    def mint_login(self, name: str, kind: LoginKind, expires_s: int, now: float) -> str:
        """Return a token that stands for the key for calls of this name; raises `AuthError` if there is none. `now`:
        seconds since the epoch."""
        payload = EXPIRY.pack(int(now) + expires_s) + kind[:1].encode() + self._short_hash(name) + name.encode()
        return LOGIN_PREFIX + base64.urlsafe_b64encode(payload + _sign(self._login_mac, payload)).decode().rstrip("=")

    def login_key(self, token: str, kind: LoginKind, now: float) -> str:
        """The name of the key that a login token stands for; raises `AuthError`."""
        blob = _blob(token.removeprefix(LOGIN_PREFIX)) if token.startswith(LOGIN_PREFIX) else b""
        payload, signature = blob[:-32], blob[-32:]
        at = EXPIRY.size + 1
        if len(payload) <= at + _HASH_BYTES or not hmac.compare_digest(signature, _sign(self._login_mac, payload)):
            raise AuthError("the login token is not one of this gateway's")
        if payload[at - 1 : at] != kind[:1].encode():
            raise AuthError(f"the login token is no {kind} token")
        if now >= EXPIRY.unpack(payload[: EXPIRY.size])[0]:
            raise AuthError("the login token has expired")
        name = payload[at + _HASH_BYTES :].decode()
        if payload[at : at + _HASH_BYTES] != self._short_hash(name):
            raise AuthError(f"the login token stands for another key of the name {name!r} than the present one")
        return name

    def _short_hash(self, name: str) -> bytes:
        hashed = self._caller_hashes.get(name)
        if hashed is None:
            raise AuthError(f"there is no key {name!r} any more")
        return bytes.fromhex(hashed)[:_HASH_BYTES]


def _sign(mac: hmac.HMAC, payload: bytes) -> bytes:
    mac = mac.copy()
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
    return credential.startswith(TOKEN_PREFIX) and not credential.startswith(KEY_PREFIX)


def _decode(token: str) -> bytes:
    if not is_token(token):
        raise AuthError(f"an agent token starts with {TOKEN_PREFIX}")
    return _blob(token.removeprefix(TOKEN_PREFIX))


def _blob(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise AuthError("the token is cut off or garbled") from None


def check_target(target: str) -> None:
    """Raise `ClientFault` for a target that is no path, or leads out of one."""
    if not target.startswith("/"):
        shown = redact_url(target[:80])
        raise ClientFault(400, "target", f"the request target {shown!r} must be a path, starting with /", "target")
    if "/." in target or "%2" in target:
        path = target.partition("?")[0].lower().replace("%2e", ".").replace("%2f", "/")
        if {".", ".."} & set(path.split("/")):
            raise ClientFault(400, "target", "the path may not hold the segments . and ..", "target")


_OPERATION = re.compile(
    r"/+(inference/+)?(v1/+)*(load_lora_adapter|unload_lora_adapter|adapters|pause|resume|sleep|wake_up|abort_requests|"
    r"collective_rpc|init_weight_transfer_engine|start_weight_update|update_weights|finish_weight_update|"
    r"update_weight_version|weight_checker|release_kv_cache_memory|reset_[a-z]+_cache|scale_elastic_ep)(/.*)?"
)
"""Paths that operate a vLLM server: some need no key, and for the others the gateway would send its own."""


def check_path(path: str) -> None:
    """Raise `ClientFault` for a path that operates the server: an agent may use a model, not change a shared server."""
    if _OPERATION.fullmatch(unquote(path)):
        message = f"the path {redact_url(path[:80])!r} operates the model server; agents may not do that"
        raise ClientFault(403, "path", message, "path")


PACKED: Final = 64 << 10
"""Bytes beyond which a request with a content encoding is decoded on the thread."""


class Admission:
    """Admits calls. Knows the keys and the conversations."""

    def __init__(self, auth: Auth, joining: ConversationMatcher, token_required: bool, local_only: bool) -> None:
        """`local_only`: only this machine can connect."""
        self.matcher = joining
        self._auth = auth
        self._foreign_pages = local_only and not token_required
        """True if a page of a foreign site could call, in a browser on this machine."""
        self._hosts: set[bytes] = set()
        """Some values of `Host` that were found valid."""
        self._token_required = token_required

    def open_tunnel(self, request: HttpRequest, wanted: ConnectionPool) -> Tunnel:
        """Admit a sidecar's connection: its address, host and key; raises `ClientFault`."""
        headers = {low: value for low, _, value in request.headers}
        try:
            address = from_headers(headers)
        except AddressError as error:
            raise ClientFault(400, "address", str(error), error.part) from None
        headers[b"authorization"] = headers.pop(b"proxy-authorization", b"")
        shown = self._authorize(_credential(headers), [(low, low, value) for low, value in headers.items()])
        return Tunnel(_agreed(address, shown.rollout), shown.rollout is not None, wanted, shown.key)

    def admit_tunnelled(
        self, request: HttpRequest, hints: ConnectionHints, tunnel: Tunnel, server: ConnectionPool | None
    ) -> CallRequest:
        """Admit a call that came through a tunnel, which names its rollout; an agent token in place of a key names it,
        too. `server`: the MCP server that it calls, if any. Raises `ClientFault`."""
        target = request.target.decode("latin-1")
        check_target(target)
        dialect = find(request.method, target.partition("?")[0] if server is None else PREFIX + server.name)
        if dialect.family is MCP and server is None:
            # `/mcp/NAME` is an address of this gateway, and means nothing on another host.
            dialect = OPAQUE
        admitted = CallRequest(
            _NOWHERE, dialect, target, request.body(), server or tunnel.direct_pool, tunnel.token, tunnel.key
        )
        if admitted.dialect is not OPAQUE:
            _unpack(admitted, request)
        headers = {low: value for low, _, value in request.headers}
        if admitted.dialect is OPAQUE or admitted.dialect.media:
            admitted.form = _form(request.headers)
        admitted.baggage = _baggage(request)
        shown = self._verified(_credential(headers))
        admitted.key = shown.key or tunnel.key
        address = _agreed(tunnel.address, shown.rollout)
        if address is None:
            named = {low: value for low, value in headers.items() if low in SESSION_HEADERS}
            address = from_headers(named) or _hosted_session(dialect, target)
            address = address or self.matcher.match(admitted, hints, request.headers)
        if request.websocket:
            admitted.said = {low: value for low, value in headers.items() if low in NOTED}
        if address.agent is None and not AGENT_HEADERS.isdisjoint(headers):
            address = replace(address, agent=agent_kind(headers))
        admitted.address = address
        return admitted

    def admit_message(
        self,
        opening: CallRequest,
        dialect: Dialect,
        body: bytes,
        hints: ConnectionHints,
        metadata: bytes = b"",
        of: CallRequest | None = None,
    ) -> CallRequest:
        """Admit a request that came as a message on a WebSocket, whose opening was admitted. `metadata`: JSON of its
        body that stands for headers; `of`: for steering input, the call whose settings it has."""
        address = opening.address if of is None else of.address
        call = CallRequest(address, dialect, opening.path, body, opening.direct_pool, opening.token, opening.key)
        call.baggage = opening.baggage
        call.said = said = _metadata(metadata) if metadata else opening.said
        if of is not None:
            call.peeked, call.conversation = (
                detached_fields(RequestFields(of.model) if of.peeked is None else of.peeked),
                EMPTY,
            )
        elif address.origin == "implicit":
            named = from_headers({name: value for name, value in (said or {}).items() if name in SESSION_HEADERS})
            if named is not None:
                call.address = replace(named, agent=address.agent)
                hints.last = named.rollout
            elif not address.session:
                call.address = self.matcher.match(call, hints)
        if said and address.agent in (None, opening.said and agent_kind(opening.said)):
            call.address = replace(call.address, agent=agent_kind(said))
        return call

    def admit(self, request: HttpRequest, hints: ConnectionHints) -> CallRequest:
        """Admit a call and find its address; raises `ClientFault`. `hints`: of the connection it came on."""
        head = request.head
        decided = head.decision if head is not None else None
        if not isinstance(decided, HeadDecision):
            decided = _decide(request)
        dialect, address = decided.dialect, decided.address
        admitted = CallRequest(_NOWHERE, dialect, decided.path, request.body(), baggage=decided.baggage)
        admitted.decision, admitted.form = decided, decided.form
        if decided.packed:
            _unpack(admitted, request)
        if decided.credential is not None or self._token_required:
            shown = self._authorize(decided.credential, request.headers)
            admitted.token, admitted.key = shown.rollout is not None, shown.key
            address = _agreed(address, shown.rollout)
        elif self._foreign_pages and not decided.own_site and hints.peer:
            self._check_names({low: value for low, _, value in request.headers})
            decided.own_site = True
        address = address or decided.session
        if address is None:
            address = self.matcher.match(admitted, hints, request.headers)
        elif address.origin == "implicit":
            hints.last = address.rollout
        admitted.address = address
        if request.websocket:
            admitted.said = {low: value for low, _, value in request.headers if low in NOTED}
        return admitted

    def _check_names(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise `ClientFault` for a request of a foreign site's page: it would use the keys of this gateway."""
        host, origin = headers.get(b"host", b""), headers.get(b"origin", b"")
        if host not in self._hosts:
            if host and not self._auth.names.accepts_host(host.decode("latin-1")):
                raise _foreign("host", host)
            if len(self._hosts) < _HOSTS:
                self._hosts.add(host)
        if origin and not self._auth.names.accepts_origin(origin.decode("latin-1"), host.decode("latin-1")):
            raise _foreign("origin", origin)

    def _authorize(self, credential: str | None, headers: Headers) -> CallCredential:
        """The credential of a call; raises `ClientFault` if it needs one and has none."""
        shown = self._verified(credential)
        if shown is _NOTHING and self._token_required and not self._auth.is_admin(_text(headers)):
            kind, way = "an agent token", "`penstock token ROLLOUT`"
            if self._auth.has_call_keys:
                kind, way = f"{kind}, or a key for calls,", f"{way}, or `penstock key NAME --role {CALL}`,"
            message = f"{kind} is needed: {way} makes one, give it as the API key"
            raise ClientFault(401, "token", message, "authorization")
        return shown

    def _verified(self, credential: str | None) -> CallCredential:
        """Return what a token or a named key opens; raises `ClientFault` if it is not valid."""
        if credential is None:
            return _NOTHING
        try:
            if credential.startswith(KEY_PREFIX):
                return CallCredential(None, self._auth.verify_call_key(credential))
            return CallCredential(self._auth.rollout_of(credential, time.time()), None)
        except AuthError as error:
            kind = "key NAME --role call" if credential.startswith(KEY_PREFIX) else "token"
            login = credential.startswith(LOGIN_PREFIX)
            message = f"{error}; " + ("sign in again" if login else f"make a new one with `penstock {kind}`")
            fault = ClientFault(401, "token", message, "authorization")
            if login:
                # Claude Code then asks to sign in at once; else it tries again for minutes.
                fault.headers = [(b"x-should-retry", b"false")]
            raise fault from None


class CallCredential(NamedTuple):
    """The credential of a call: an agent token, or a key for calls."""

    rollout: str | None
    """The rollout that the token names."""
    key: str | None
    """The name of the key."""


_NOTHING: Final = CallCredential(None, None)
_NOWHERE = CallAddress("nowhere")
_HOSTS: Final = 64


def _foreign(field: str, value: bytes) -> ClientFault:
    shown = value.decode("latin-1")[:100]
    message = (
        f"{shown!r} is no name of this machine: without agent tokens only local programs and pages are served; if it "
        "is one, add it to `names` in the settings"
    )
    return ClientFault(403, "origin", message, field)


def _decide(request: HttpRequest) -> HeadDecision:
    """Decide what the head of a request tells of its call; raises `ClientFault`."""
    target = request.target.decode("latin-1")
    check_target(target)
    path, mark, query = target.partition("?")
    headers = {low: value for low, _, value in request.headers}
    try:
        address, below = from_path(path)
        address = address or from_headers(headers)
    except AddressError as error:
        raise ClientFault(400, "address", str(error), error.part) from None
    dialect, form = find(request.method, below), ""
    if dialect is OPAQUE:
        check_path(below)
    if dialect is OPAQUE or dialect.media:
        form = _form(request.headers)
    if address is not None and address.agent is None and not AGENT_HEADERS.isdisjoint(headers):
        address = replace(address, agent=agent_kind(headers))
    packed, credential = b"content-encoding" in headers, _credential(headers)
    noted = not NOTED.isdisjoint(headers)
    session = _hosted_session(dialect, below) if dialect.tells_sessions else None
    return HeadDecision(
        address, dialect, below + mark + query, form, packed, credential, _baggage(request), session, noted
    )


def _hosted_session(dialect: Dialect, path: str) -> CallAddress | None:
    """The address by the session that a path names; None if it names none."""
    name = dialect.session_id(path.partition("?")[0])
    return None if name is None else CallAddress(session_rollout("session", name), origin="implicit", session=True)


def _agreed(address: CallAddress | None, token: str | None) -> CallAddress | None:
    """The named address, or the token's; raises `ClientFault` if they are of different rollouts. A coding agent's
    session names a rollout only where nothing else does."""
    if address is None:
        return None if token is None else CallAddress(token)
    if token is not None and token != address.rollout:
        if address.session:
            return CallAddress(token, agent=address.agent)
        message = f"the agent token is for another rollout than {address.rollout!r}"
        raise ClientFault(403, "token", message, "authorization")
    return address


def _baggage(request: HttpRequest) -> str:
    """The baggage of a request; it may be in several headers."""
    return b",".join([value for low, _, value in request.headers if low == b"baggage"]).decode("latin-1")


def complete_request(request: HttpRequest, call: CallRequest) -> CallRequest:
    """Add the body and the baggage to a call that another worker has admitted."""
    call.body, call.baggage = request.body(), _baggage(request)
    _unpack(call, request)
    if call.dialect is OPAQUE or call.dialect.media:
        call.form = _form(request.headers)
    return call


def _form(headers: Headers) -> str:
    """The content type of a form; empty for any other body. Servers differ in which of several content types counts:
    where one of them is a form's, this one has no boundary, so that nothing of the form is certain."""
    types = {value.decode("latin-1") for low, _, value in headers if low == b"content-type"}
    forms = [one for one in types if is_form(one)]
    return "" if not forms else forms[0] if len(types) == 1 else MULTIPART


def _unpack(call: CallRequest, request: HttpRequest) -> None:
    """Undo the content encoding of a request, or leave that to the thread if it is long."""
    names = b",".join(value for low, _, value in request.headers if low == b"content-encoding").decode("latin-1")
    if names and len(call.body) > PACKED:
        call.encodings, call.waits = names, True
    elif names and (body := decode_request(call.body, names)) is not None:
        call.encoded_body, call.body = call.body, body


def _credential(headers: Mapping[bytes, bytes]) -> str | None:
    for name in CREDENTIALS:
        value = headers.get(name)
        if value is not None and b"pst_" in value:
            return value[value.index(b"pst_") :].decode("latin-1").strip()
    # Browsers can set no header of a WebSocket but this one.
    offered = headers.get(SUBPROTOCOL, b"").partition(INSECURE + b"pst_")
    return "pst_" + offered[2].partition(b",")[0].decode("latin-1").strip() if offered[1] else None


def _metadata(metadata: bytes) -> dict[bytes, bytes]:
    """Codex's metadata of a request on a WebSocket, as the headers that say the same over HTTP."""
    said = obj(loads(metadata))
    turn = said.get(TURN_METADATA.decode())
    said = obj(loads(turn)) | said if isinstance(turn, str) else said
    named = {name.replace("_", "-"): value for name, value in said.items() if isinstance(value, str) and value}
    return {
        header: value.encode("latin-1", "replace")
        for header in (*SESSION_HEADERS, *AGENT_HEADERS)
        if (value := named.get(header.decode())) is not None
    }


def _text(headers: Headers) -> dict[str, str]:
    return {low.decode("latin-1"): value.decode("latin-1") for low, _, value in headers}
