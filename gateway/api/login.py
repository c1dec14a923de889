"""Claude Code's gateway protocol: a developer signs in at the gateway with a key for calls.

    GET  /.well-known/oauth-authorization-server     where to sign in (RFC 8414)
    POST /oauth/device_authorization                 begins a sign-in (RFC 8628): a code for the client, one for people
    GET  /device, POST /device                       the page on which a person allows it, with a key for calls
    POST /oauth/token                                the client asks whether it was allowed, or renews its token
    GET  /api/oauth/usage                            what the key's budget in dollars has left
    GET  /managed/settings                           404: this gateway manages no settings of clients
    GET  /protocol                                   this contract, for people

A token stands for the key with which a person allows the sign-in (`Auth.mint_login`): calls count in its budgets, and
nothing else opens. There is nothing to sign in with unless `penstock.toml` has a key with the role `call`. Nobody is
ever redirected. Codes live for ten minutes in the memory of the process that answers the control API; their number is
bounded, and so is how often an address may begin a sign-in or try a code. `process.dispatch` puts the client's address
into the path.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any, Final, Literal
from urllib.parse import parse_qs, unquote

import orjson
from aiohttp import web

from penstock.gateway.api.guard import AGENT, CONTROL, HEADERS, Control
from penstock.gateway.api.openapi import STYLE
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.tools.oauth import origin_of
from penstock.gateway.traffic.budgets.claims import PERIODS
from penstock.gateway.traffic.budgets.operations import BudgetShortfall
from penstock.gateway.traffic.calls.admission import LOGIN_PREFIX, AuthError, credentials
from penstock.gateway.wire.dialects.family import ANTHROPIC

PATHS: Final = frozenset(
    {
        "/.well-known/oauth-authorization-server", "/oauth/device_authorization", "/oauth/token", "/device",
        "/api/oauth/usage", "/managed/settings", "/protocol",
    }
)  # fmt: skip
SCOPE: Final = f"{AGENT}login/{{scheme}}/{{peer}}"
"""The path before these where the embedded server sees them; no client can ask for such a path."""
ACCESS_S: Final = 12 * 3600
"""Seconds for which a token opens calls."""
REFRESH_S: Final = 30 * 86400
"""Seconds for which a client may renew it."""
CODE_S: Final = 600
INTERVAL_S: Final = 5
MOST_PENDING: Final = 1000
"""Most sign-ins that wait for a person at a time."""
BEGINS: Final = 30
"""How often in a minute an address may begin a sign-in."""
TRIES: Final = 20
"""How often in a minute an address may try a code."""
_LETTERS: Final = "BCDFGHJKLMNPQRSTVWXZ"
_BODY: Final = 8 << 10
_DEVICE_GRANT: Final = "urn:ietf:params:oauth:grant-type:device_code"


@dataclass(slots=True)
class DeviceLogin:
    """A sign-in that a client has begun."""

    user_code: str
    peer: str
    agent: str
    """The client's `User-Agent`."""
    began: float
    polled: float = 0.0
    state: Literal["pending", "denied"] = "pending"
    key: str | None = None
    """Name of the key with which a person has allowed it."""


class DeviceLogins:
    """The sign-ins that have begun. On the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_device = dict[str, DeviceLogin]()
        """By the hash of the client's code, the oldest first."""
        self._minute = 0
        self._counts = Counter[tuple[str, str]]()

    def allows(self, what: str, peer: str, most: int) -> bool:
        """Count one more of this by this address; False if it has done so too often within the minute."""
        minute = int(self._clock() // 60)
        if minute != self._minute:
            self._minute = minute
            self._counts.clear()
        self._counts[what, peer] += 1
        return self._counts[what, peer] <= most

    def begin(self, peer: str, agent: str) -> tuple[str, DeviceLogin] | None:
        """The client's code and the sign-in; None if too many wait."""
        self._drop_old()
        if len(self._by_device) >= MOST_PENDING:
            return None
        letters = "".join(secrets.choice(_LETTERS) for _ in range(8))
        code = secrets.token_urlsafe(32)
        found = self._by_device[_hash(code)] = DeviceLogin(letters, peer, agent[:200], self._clock())
        return code, found

    def find(self, user_code: str) -> DeviceLogin | None:
        """The sign-in of a code as a person types it, if it waits."""
        self._drop_old()
        wanted = "".join(filter(_LETTERS.__contains__, user_code.upper()))
        found = (one for one in self._by_device.values() if one.state == "pending" and one.key is None)
        return next((one for one in found if secrets.compare_digest(one.user_code, wanted)), None)

    def poll(self, device_code: str) -> str:
        """The name of the key with which it was allowed, once; raises `LoginError` with what to tell the client."""
        self._drop_old()
        name = _hash(device_code)
        found = self._by_device.get(name)
        if found is None:
            raise LoginError(400, "expired_token")
        if found.key is None and found.state == "pending":
            early, found.polled = self._clock() - found.polled < INTERVAL_S - 1, self._clock()
            raise LoginError(400, "slow_down" if early else "authorization_pending")
        del self._by_device[name]
        if found.key is None:
            raise LoginError(400, "access_denied")
        return found.key

    def seconds(self, login: DeviceLogin) -> int:
        """Seconds since a sign-in began."""
        return int(self._clock() - login.began)

    def _drop_old(self) -> None:
        oldest = self._clock() - CODE_S
        for name, one in list(self._by_device.items()):
            if one.began > oldest:
                break
            del self._by_device[name]


class LoginError(Exception):
    """An answer of RFC 6749 or RFC 8628 that is no success."""

    def __init__(self, status: int, error: str, description: str = "") -> None:
        super().__init__(error)
        self.status, self.error, self.description = status, error, description


def _hash(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()


LOGINS: Final = web.AppKey("logins", DeviceLogins)


async def serve(request: web.Request) -> web.StreamResponse:
    """Answer a request of this contract."""
    path = f"/{request.match_info['path']}"
    handler = _HANDLERS.get((request.method, path))
    if handler is None:
        allowed = ", ".join(method for method, known in _HANDLERS if known == path)
        return _json(405, {"error": "invalid_request", "error_description": f"use {allowed}"}, {"Allow": allowed})
    try:
        return await handler(request, request.app[CONTROL])
    except LoginError as error:
        told = {"error": error.error} | ({"error_description": error.description} if error.description else {})
        return _json(error.status, told)


def _json(status: int, body: Any, headers: dict[str, str] | None = None) -> web.Response:
    kept = HEADERS | {"Content-Type": "application/json"} | (headers or {})
    return web.Response(status=status, body=orjson.dumps(body), headers=kept)


def _peer(request: web.Request) -> str:
    """The client's address; empty where there is none, as of a Unix socket."""
    return unquote(request.match_info["peer"]).removeprefix("-")


def _origin(request: web.Request) -> str:
    headers = [(name.lower(), name, value) for name, value in request.raw_headers]
    return origin_of(headers, request.match_info["scheme"])


def _check_available(control: Control) -> None:
    if not control.auth.has_call_keys:
        message = "nobody can sign in: the gateway's settings have no key for calls (`penstock key NAME --role call`)"
        raise LoginError(404, "not_found", message)


async def _form(request: web.Request) -> dict[str, str]:
    body = await request.read()
    if len(body) > _BODY:
        raise LoginError(413, "invalid_request", f"the form is larger than {_BODY} bytes")
    try:
        return {name: values[0] for name, values in parse_qs(body.decode(), max_num_fields=64).items()}
    except ValueError:
        raise LoginError(400, "invalid_request", "the body is no form (application/x-www-form-urlencoded)") from None


async def _metadata(request: web.Request, control: Control) -> web.StreamResponse:
    _check_available(control)
    origin = _origin(request)
    return _json(
        200,
        {
            "issuer": origin,
            "device_authorization_endpoint": f"{origin}/oauth/device_authorization",
            "token_endpoint": f"{origin}/oauth/token",
            "grant_types_supported": [_DEVICE_GRANT, "refresh_token"],
            "response_types_supported": [],
            "token_endpoint_auth_methods_supported": ["none"],
        },
    )


async def _begin(request: web.Request, control: Control) -> web.StreamResponse:
    _check_available(control)
    logins, peer = request.app[LOGINS], _peer(request)
    begun = logins.begin(peer, request.headers.get("User-Agent", "")) if logins.allows("begin", peer, BEGINS) else None
    if begun is None:
        raise LoginError(429, "slow_down", "too many sign-ins have begun: try again in a minute")
    code, login = begun
    shown, page = f"{login.user_code[:4]}-{login.user_code[4:]}", f"{_origin(request)}/device"
    return _json(
        200,
        {
            "device_code": code,
            "user_code": shown,
            "verification_uri": page,
            "verification_uri_complete": f"{page}?user_code={shown}",
            "expires_in": CODE_S,
            "interval": INTERVAL_S,
            "login_notice": "Your calls are recorded. Allow the sign-in with a key for calls of this gateway.",
        },
    )


async def _token(request: web.Request, control: Control) -> web.StreamResponse:
    _check_available(control)
    form = await _form(request)
    grant = form.get("grant_type")
    if grant == _DEVICE_GRANT:
        if "device_code" not in form:
            raise LoginError(400, "invalid_request", "device_code is missing")
        name = request.app[LOGINS].poll(form["device_code"])
    elif grant == "refresh_token":
        try:
            name = control.auth.login_key(form.get("refresh_token", ""), "refresh", time.time())
        except AuthError as error:
            raise LoginError(401, "invalid_grant", f"{error}: sign in again") from None
    else:
        raise LoginError(400, "unsupported_grant_type", f"grant_type: {_DEVICE_GRANT} or refresh_token")
    try:
        access = control.auth.mint_login(name, "access", ACCESS_S, time.time())
        refresh = control.auth.mint_login(name, "refresh", REFRESH_S, time.time())
    except AuthError as error:  # the settings were reloaded since the sign-in was allowed
        raise LoginError(401, "invalid_grant", f"{error}: sign in again") from None
    said = {"access_token": access, "token_type": "Bearer", "expires_in": ACCESS_S, "refresh_token": refresh}
    return _json(200, said | {"email": name})


async def _page(request: web.Request, control: Control) -> web.StreamResponse:
    _check_available(control)
    logins, typed = request.app[LOGINS], request.query.get("user_code", "")[:32]
    if typed and not logins.allows("try", _peer(request), TRIES):
        return _html(429, "Too many tries from your address: wait a minute.")
    return _html(200, "", logins, typed, logins.find(typed) if typed else None)


async def _decide(request: web.Request, control: Control) -> web.StreamResponse:
    _check_available(control)
    logins, peer = request.app[LOGINS], _peer(request)
    if not _is_same_site(request):
        return _html(403, "This form came from another site. Open the page of your client again.")
    if not logins.allows("try", peer, TRIES):
        return _html(429, "Too many tries from your address: wait a minute.")
    form = await _form(request)
    typed, key = form.get("user_code", "")[:32], form.get("key", "").strip()
    login = logins.find(typed)
    if login is None:
        told = "There is no sign-in with this code: it was mistyped, has expired, or was used."
        return _html(404, told, logins, typed)
    name = None if key.startswith(LOGIN_PREFIX) else control.auth.find_call_key([key])
    if name is None:
        told = (
            "This is no key for calls of this gateway. Such a key begins with pst_key_; who runs the gateway makes it."
        )
        return _html(403, told, logins, typed, login)
    if form.get("decision") != "allow":
        login.state = "denied"
        return _html(200, "The sign-in was refused. You can close this page.")
    asked = ActionRequest(why=f"{login.agent} at {login.peer or 'this machine'}")
    asked.set_key(name)
    await control.audit_log.record(asked, "sign_in", name)
    if logins.find(typed) is not login:
        return _html(404, "This sign-in was decided, or has expired, meanwhile.")
    login.key = name
    return _html(200, f"Signed in with the key {name!r}. You can close this page and go back to your client.")


def _is_same_site(request: web.Request) -> bool:
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site is not None:
        return site in ("same-origin", "none")
    return origin is None or origin == _origin(request)


def _html(
    status: int, told: str, logins: DeviceLogins | None = None, typed: str = "", login: DeviceLogin | None = None
) -> web.Response:
    parts = [f"<p>{escape(told)}</p>"] if told else []
    if logins is not None:
        if login is not None:
            place = f"from {escape(login.peer)} " if login.peer else ""
            parts.append(
                f"<p>A client asked {place}{logins.seconds(login)} seconds ago: <code>{escape(login.agent)}</code>. "
                "Allow it only if you have just begun to sign in there, and the code is the one that it shows.</p>"
            )
        parts.append(
            '<form method="post" action="/device"><p><label>Code that your client shows<br>'
            f'<input name="user_code" value="{escape(typed)}" required autocomplete="off"></label></p>'
            "<p><label>Your key for calls (pst_key_…)<br>"
            '<input name="key" type="password" required autocomplete="off"></label></p>'
            '<p><button name="decision" value="allow">Allow</button> '
            '<button name="decision" value="refuse">Refuse</button></p></form>'
        )
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Sign in to Penstock</title>'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head><body><h1>Sign in to Penstock</h1>'
        f"{''.join(parts)}</body></html>"
    )
    policy = f"{HEADERS['Content-Security-Policy']}; form-action 'self'; img-src data:; base-uri 'none'"
    headers = HEADERS | {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": policy}
    return web.Response(status=status, text=page, headers=headers)


# What a budget has left, as Claude Code shows it.


async def _usage(request: web.Request, control: Control) -> web.StreamResponse:
    key = control.auth.find_call_key(list(credentials(request.headers)))
    if key is None:
        message = "the use of a budget is told to a key for calls, or to a client that has signed in with one"
        return _refused(401, message)
    found = [] if control.budgets is None else control.budgets.of_key(key)
    caps = [one for one in found if one.claim.limit.budget.unit == "usd" and one.window.ends_ns is not None]
    if not caps:
        return _refused(404, f"no budget in dollars counts the key {key!r}")
    fullest = max(caps, key=_percent)
    extra = {
        "is_enabled": True,
        "monthly_limit": round(fullest.claim.limit.budget.limit * 100),
        "used_credits": round(fullest.claim.limit.shown(fullest.sum.used) * 100),
        "utilization": _percent(fullest),
        "currency": "USD",
    }
    limits = [
        {
            "kind": "spend",
            "group": PERIODS.get(one.claim.limit.budget.window, one.claim.limit.budget.window),
            "percent": _percent(one),
            "resets_at": f"{datetime.fromtimestamp((one.window.ends_ns or 0) // 10**9, UTC):%Y-%m-%dT%H:%M:%S}.000Z",
            "severity": "normal" if _percent(one) < 75 else "warning",
            "is_active": one is fullest,
        }
        for one in caps
    ]
    return _json(200, {"extra_usage": extra, "limits": limits})


def _percent(one: BudgetShortfall) -> int:
    return round(100 * one.sum.used / one.claim.limit.most)


def _refused(status: int, message: str) -> web.Response:
    body = ANTHROPIC.error_body(status, message)
    headers = HEADERS | {"Content-Type": "application/json"} | ({"x-should-retry": "false"} if status == 401 else {})
    return web.Response(status=status, body=body, headers=headers)


async def _settings(request: web.Request, control: Control) -> web.StreamResponse:
    return _refused(404, "this gateway manages no settings of Claude Code")


async def _protocol(request: web.Request, control: Control) -> web.StreamResponse:
    text = PROTOCOL.format(access=ACCESS_S // 3600, refresh=REFRESH_S // 86400, code=CODE_S // 60)
    return web.Response(text=text, headers=HEADERS | {"Content-Type": "text/markdown; charset=utf-8"})


PROTOCOL: Final = """# Claude Code at this Penstock gateway

The paths of Claude Code's gateway protocol, below the gateway's own address:

| path | answer |
|---|---|
| `GET /.well-known/oauth-authorization-server` | OAuth metadata (RFC 8414); 404 without keys for calls |
| `POST /oauth/device_authorization` | begins a sign-in (RFC 8628); a code is valid for {code} minutes |
| `GET`, `POST /device` | the page on which a person allows it with a key for calls |
| `POST /oauth/token` | grants `urn:ietf:params:oauth:grant-type:device_code` and `refresh_token` |
| `POST /v1/messages`, `/v1/messages/count_tokens` | passed to the upstream, and recorded |
| `GET /v1/models` | passed to the upstream |
| `POST /v1/metrics`, `/v1/logs`, `/v1/traces` | 200; logs and spans are kept in the session's rollout |
| `GET /managed/settings` | 404: no settings are managed |
| `GET /api/oauth/usage` | the fullest budget in dollars that counts the key; 404 without one |

A token opens calls for {access} hours and can be renewed for {refresh} days. It stands for the key that allowed it, and
ends when that key is removed from the gateway's settings. A used-up budget is a 429 `billing_error`.
"""

_HANDLERS: Final = {
    ("GET", "/.well-known/oauth-authorization-server"): _metadata,
    ("POST", "/oauth/device_authorization"): _begin,
    ("POST", "/oauth/token"): _token,
    ("GET", "/device"): _page,
    ("POST", "/device"): _decide,
    ("GET", "/api/oauth/usage"): _usage,
    ("GET", "/managed/settings"): _settings,
    ("GET", "/protocol"): _protocol,
}
