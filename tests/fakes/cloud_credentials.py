"""AWS and Google as a gateway with credentials of theirs meets them: endpoints that give credentials out, and a model's
endpoint that checks signatures by AWS' description of Signature Version 4, and tokens.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, quote

from aiohttp import web
from aiohttp.test_utils import TestServer
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

SKEW = timedelta(minutes=5)
"""How far a signature's time may be from the server's."""
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/([^/]+)/aws4_request, ?SignedHeaders=([^,]+), ?"
    r"Signature=([0-9a-f]{64})"
)


@dataclass
class Seen:
    """A request for a model."""

    method: str
    path: str
    """With its query, as it came."""
    headers: list[tuple[str, str]]
    """Names in lower case."""
    body: bytes

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    def header(self, name: str) -> str:
        """The value of a header that came once."""
        (value,) = self.all(name)
        return value


@dataclass
class SignedBy:
    """What a signature says of itself."""

    key: str
    region: str
    service: str
    time: datetime


def check_signature(seen: Seen, secrets: dict[str, str], now: datetime) -> SignedBy:
    """Raises `PermissionError` where a signature is not right. `secrets`: by access key."""
    found = _AUTHORIZATION.fullmatch(seen.header("authorization"))
    if found is None:
        raise PermissionError("IncompleteSignatureException")
    key, day, region, service, names, signature = found.groups()
    signed, stamp = names.split(";"), seen.header("x-amz-date")
    time = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    needed = {"host"} | {name for name, _ in seen.headers if name.startswith("x-amz-")}
    if signed != sorted(signed) or not needed <= set(signed) or not stamp.startswith(day):
        raise PermissionError("InvalidSignatureException: not all that must be signed is")
    if abs(now - time) > SKEW:
        raise PermissionError("InvalidSignatureException: Signature expired")
    path, _, query = seen.path.partition("?")
    lines = [f"{name}:{','.join(' '.join(it.split()) for it in seen.all(name))}" for name in signed]
    parts = [
        seen.method,
        quote(path, safe="/-_.~"),
        "&".join(sorted(filter(None, query.split("&")))),
        *lines,
        "",
        names,
    ]
    canonical = "\n".join([*parts, hashlib.sha256(seen.body).hexdigest()])
    scope = f"{day}/{region}/{service}/aws4_request"
    to_sign = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    made = f"AWS4{secrets.get(key, '')}".encode()
    for step in (day, region, service, "aws4_request", to_sign):
        made = hmac.new(made, step.encode(), hashlib.sha256).digest()
    if key not in secrets or not hmac.compare_digest(made.hex(), signature):
        raise PermissionError("SignatureDoesNotMatch")
    return SignedBy(key, region, service, time)


@dataclass
class Clouds:
    """Both clouds, at one address."""

    url: str = ""
    answer: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict[str, str])
    statuses: list[int] = field(default_factory=list[int])
    """Statuses of the next answers; 200 afterwards."""
    lifetime_s: float = 3600.0
    """How long what is given out is good."""
    broken: bool = False
    """Whether nothing is given out."""
    secrets: dict[str, str] = field(default_factory=dict[str, str])
    """Secrets by access key; those that were given out are added."""
    session_tokens: dict[str, str] = field(default_factory=dict[str, str])
    tokens: list[str] = field(default_factory=list[str])
    """Google's access tokens that are good."""
    asked: int = 0
    """Requests for credentials."""
    seen: list[Seen] = field(default_factory=list[Seen])
    """Requests for a model that were admitted."""
    signed: list[SignedBy] = field(default_factory=list[SignedBy])
    key: rsa.RSAPrivateKey = field(default_factory=lambda: rsa.generate_private_key(65537, 2048))

    def service_account(self) -> str:
        """The file of a service account, whose tokens are given out here."""
        pem = self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return json.dumps(
            {
                "type": "service_account", "project_id": "p", "private_key_id": "k", "private_key": pem.decode(),
                "client_email": "gateway@p.iam.gserviceaccount.com", "client_id": "1", "token_uri": f"{self.url}/token",
            }
        )  # fmt: skip

    async def credentials(self, request: web.Request) -> web.Response:
        """Keys of a role, as a container's endpoint gives them out."""
        self.asked += 1
        if self.broken:
            return web.json_response({"message": "no keys today"}, status=503)
        name, until = f"ASIAEXAMPLE{self.asked:05}", datetime.now(UTC) + timedelta(seconds=self.lifetime_s)
        secret, token = f"secret-number-{self.asked}-of-the-role", f"session-token-number-{self.asked}-of-the-role"
        self.secrets[name], self.session_tokens[name] = secret, token
        given = {"AccessKeyId": name, "SecretAccessKey": secret, "Token": token}
        return web.json_response(given | {"Expiration": until.strftime("%Y-%m-%dT%H:%M:%SZ")})

    async def token(self, request: web.Request) -> web.Response:
        """An access token for an assertion that the service account has signed."""
        self.asked += 1
        if self.broken:
            return web.json_response({"error": "unavailable", "error_description": "no tokens today"}, status=400)
        (assertion,) = parse_qs(await request.text())["assertion"]
        head, claims, signature = assertion.split(".")
        signed = f"{head}.{claims}".encode()
        self.key.public_key().verify(_unpadded(signature), signed, padding.PKCS1v15(), hashes.SHA256())
        said: dict[str, Any] = json.loads(_unpadded(claims))
        assert said["iss"] == "gateway@p.iam.gserviceaccount.com"
        assert said["scope"] == "https://www.googleapis.com/auth/cloud-platform"
        self.tokens.append(f"ya29.token-number-{self.asked}-of-the-gateway")
        return web.json_response(
            {"access_token": self.tokens[-1], "expires_in": int(self.lifetime_s), "token_type": "Bearer"}
        )

    async def model(self, request: web.Request) -> web.Response:
        """A model's answer to whoever is known."""
        headers = [(name.decode().lower(), value.decode("latin-1")) for name, value in request.raw_headers]
        seen = Seen(request.method, request.raw_path, headers, await request.read())
        try:
            if seen.header("authorization").startswith("AWS4"):
                by = check_signature(seen, self.secrets, datetime.now(UTC))
                if (token := self.session_tokens.get(by.key)) is not None and seen.header(
                    "x-amz-security-token"
                ) != token:
                    raise PermissionError("UnrecognizedClientException")
                self.signed.append(by)
            elif seen.header("authorization").removeprefix("Bearer ") not in self.tokens:
                raise PermissionError("UNAUTHENTICATED")
        except (PermissionError, ValueError) as problem:
            return web.json_response({"message": f"not admitted: {problem}"}, status=403)
        self.seen.append(seen)
        status = self.statuses.pop(0) if self.statuses else 200
        return web.Response(body=self.answer, status=status, headers=self.headers)


def _unpadded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


@asynccontextmanager
async def clouds() -> AsyncGenerator[Clouds]:
    made = Clouds()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_get("/credentials", made.credentials)
    app.router.add_post("/token", made.token)
    app.router.add_route("*", "/{tail:.*}", made.model)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    made.url = str(server.make_url("")).rstrip("/")
    try:
        yield made
    finally:
        await server.close()
