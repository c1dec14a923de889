"""How the client of the suite's scenarios is authorized, where a scenario asks for it.

Most take the SDK's own flow; what is here is the person at the browser, who says yes. The SDK has no part for workload
identity (a signed assertion is the grant) and none for DPoP (every request carries a proof that its sender holds a
key), so these flows are written out.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

import httpx2
import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm
from mcp.client.auth import OAuthClientProvider
from mcp.client.auth.extensions.client_credentials import (
    ClientCredentialsOAuthProvider,
    PrivateKeyJWTOAuthProvider,
    SignedJWTParameters,
)
from mcp.client.auth.extensions.identity_assertion import IdentityAssertionOAuthProvider
from mcp.client.auth.utils import build_protected_resource_metadata_discovery_urls as metadata_urls
from mcp.client.auth.utils import extract_resource_metadata_from_www_auth as metadata_url
from mcp.shared.auth import AuthorizationCodeResult, OAuthClientInformationFull, OAuthClientMetadata, OAuthToken
from pydantic import AnyUrl

Json = dict[str, Any]
Flow = AsyncGenerator[httpx2.Request, httpx2.Response]

CALLBACK = "http://localhost:3030/callback"
METADATA_URL = "https://conformance-test.local/client-metadata.json"
"""The identity that the suite accepts of clients that describe themselves at a URL."""
JWT_BEARER = "urn:ietf:params:oauth:grant-type:jwt-bearer"
TOKEN_EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
ID_TOKEN, ID_JAG = "urn:ietf:params:oauth:token-type:id_token", "urn:ietf:params:oauth:token-type:id-jag"


class Memory:
    """Keeps tokens and the client's registration as long as the process lives."""

    def __init__(self, client: OAuthClientInformationFull | None = None) -> None:
        self._client, self._tokens = client, None

    async def get_tokens(self) -> OAuthToken | None:
        return self._tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self._tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self._client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self._client = client_info

    _client: OAuthClientInformationFull | None
    _tokens: OAuthToken | None


async def _redirected(url: str) -> dict[str, str]:
    """What the authorization server tells the client by way of the browser."""
    async with httpx2.AsyncClient() as browser:
        answer = await browser.get(url, follow_redirects=False)
    return {name: values[0] for name, values in parse_qs(urlsplit(answer.headers["location"]).query).items()}


class Person:
    """Follows the authorization URL, agrees, and comes back with the code."""

    def __init__(self) -> None:
        self._brought: dict[str, str] = {}

    async def go(self, url: str) -> None:
        self._brought = await _redirected(url)

    async def come_back(self) -> AuthorizationCodeResult:
        given = self._brought
        return AuthorizationCodeResult(code=given["code"], state=given.get("state"), iss=given.get("iss"))


def by_person(url: str, given: Json) -> httpx2.Auth:
    """The flow with a browser; registered before where the scenario hands out a registration."""
    person, client = Person(), None
    if "client_id" in given:
        client = OAuthClientInformationFull(
            client_id=given["client_id"],
            client_secret=given["client_secret"],
            redirect_uris=[AnyUrl(CALLBACK)],
            token_endpoint_auth_method="client_secret_basic",
        )
    metadata = OAuthClientMetadata(client_name="penstock conformance", redirect_uris=[AnyUrl(CALLBACK)])
    return OAuthClientProvider(
        url, metadata, Memory(client), person.go, person.come_back, client_metadata_url=METADATA_URL
    )


def by_secret(url: str, given: Json) -> httpx2.Auth:
    return ClientCredentialsOAuthProvider(url, Memory(), given["client_id"], given["client_secret"])


def by_key(url: str, given: Json) -> httpx2.Auth:
    signed = SignedJWTParameters(
        issuer=given["client_id"],
        subject=given["client_id"],
        signing_key=given["private_key_pem"],
        signing_algorithm=given.get("signing_algorithm", "ES256"),
    )
    return PrivateKeyJWTOAuthProvider(url, Memory(), given["client_id"], signed.create_assertion_provider())


async def by_enterprise(url: str, given: Json) -> httpx2.Auth:
    """The company's identity provider vouches for the user: its assertion is exchanged for a token of the server."""
    async with httpx2.AsyncClient() as http:
        resource = (await http.get(metadata_urls(None, url)[0])).json()

        async def vouched(audience: str, _: str) -> str:
            form = {
                "grant_type": TOKEN_EXCHANGE,
                "requested_token_type": ID_JAG,
                "audience": audience,
                "resource": resource["resource"],
                "subject_token": given["idp_id_token"],
                "subject_token_type": ID_TOKEN,
                "client_id": given["idp_client_id"],
            }
            async with httpx2.AsyncClient() as provider:
                return (await provider.post(given["idp_token_endpoint"], data=form)).json()["access_token"]

    return IdentityAssertionOAuthProvider(
        url,
        Memory(),
        client_id=given["client_id"],
        client_secret=given["client_secret"],
        issuer=resource["authorization_servers"][0],
        assertion_provider=vouched,
        token_endpoint_auth_method="client_secret_basic",
    )


class Discovering(httpx2.Auth):
    """Learns from the server's refusal who gives tokens, gets one, and asks again."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._token: str | None = None

    async def async_auth_flow(self, request: httpx2.Request) -> Flow:
        if self._token is not None:
            self._sign(request, self._token)
        answer = yield request
        # One refusal for want of a token, and one because the server wants a value of its own in every proof.
        for _ in range(2):
            if answer.status_code != 401:
                return
            if self._token is None:
                async with httpx2.AsyncClient() as http:
                    self._token = await self._obtained(http, await self._authorization_server(http, answer))
            else:
                self._refused(answer)
            self._sign(request, self._token)
            answer = yield request

    async def _authorization_server(self, http: httpx2.AsyncClient, refusal: httpx2.Response) -> Json:
        for place in metadata_urls(metadata_url(refusal), self._url):
            found = await http.get(place)
            if found.status_code == 200:
                issuer = found.json()["authorization_servers"][0]
                return (await http.get(issuer + "/.well-known/oauth-authorization-server")).json()
        raise LookupError("the server does not say who gives tokens for it")

    async def _obtained(self, http: httpx2.AsyncClient, server: Json) -> str:
        """A token of this authorization server."""
        raise NotImplementedError

    def _sign(self, request: httpx2.Request, token: str) -> None:
        request.headers["Authorization"] = f"Bearer {token}"

    def _refused(self, answer: httpx2.Response) -> None:
        """Takes from a refusal what is needed to ask again."""


class Workload(Discovering):
    """A workload proves who it is by an assertion of its platform."""

    def __init__(self, url: str, given: Json) -> None:
        super().__init__(url)
        self._given = given

    async def _obtained(self, http: httpx2.AsyncClient, server: Json) -> str:
        form = {"grant_type": JWT_BEARER, "assertion": self._given["valid_jwt"], "client_id": self._given["client_id"]}
        return (await http.post(server["token_endpoint"], data=form)).json()["access_token"]


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class Dpop(Discovering):
    """Every request proves that its sender holds the key the token is bound to."""

    def __init__(self, url: str, given: Json) -> None:
        super().__init__(url)
        self._key = ec.generate_private_key(ec.SECP256R1())
        public = ECAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        self._jwk = {name: public[name] for name in ("kty", "crv", "x", "y")}
        self._nonce: str | None = None

    def _proof(self, method: str, url: str, token: str | None = None, nonce: str | None = None) -> str:
        bare = urlunsplit(urlsplit(url)._replace(query="", fragment=""))
        claims: Json = {"jti": secrets.token_urlsafe(16), "htm": method, "htu": bare, "iat": int(time.time())}
        if token is not None:
            claims["ath"] = _b64(hashlib.sha256(token.encode()).digest())
        if nonce is not None:
            claims["nonce"] = nonce
        return jwt.encode(claims, self._key, algorithm="ES256", headers={"typ": "dpop+jwt", "jwk": self._jwk})

    def _sign(self, request: httpx2.Request, token: str) -> None:
        request.headers["Authorization"] = f"DPoP {token}"
        request.headers["DPoP"] = self._proof(request.method, str(request.url), token, self._nonce)

    def _refused(self, answer: httpx2.Response) -> None:
        self._nonce = answer.headers.get("DPoP-Nonce", self._nonce)

    async def _obtained(self, http: httpx2.AsyncClient, server: Json) -> str:
        wanted = {"client_name": "penstock conformance", "redirect_uris": [CALLBACK], "application_type": "native"}
        registered = (await http.post(server["registration_endpoint"], json=wanted)).json()
        client, verifier = registered["client_id"], secrets.token_urlsafe(48)
        query = {
            "response_type": "code",
            "client_id": client,
            "redirect_uri": CALLBACK,
            "state": secrets.token_urlsafe(16),
            "code_challenge": _b64(hashlib.sha256(verifier.encode()).digest()),
            "code_challenge_method": "S256",
        }
        brought = await _redirected(f"{server['authorization_endpoint']}?{urlencode(query)}")
        form = {
            "grant_type": "authorization_code",
            "code": brought["code"],
            "redirect_uri": CALLBACK,
            "client_id": client,
            "code_verifier": verifier,
        }
        place = server["token_endpoint"]
        answer = await http.post(place, data=form, headers={"DPoP": self._proof("POST", place)})
        if answer.status_code == 400 and (nonce := answer.headers.get("DPoP-Nonce")):
            again = {"DPoP": self._proof("POST", place, nonce=nonce)}
            answer = await http.post(place, data=form, headers=again)
        return answer.json()["access_token"]
