"""Signing in a client such as Claude Code with a key for calls, and what the token opens."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import pytest
from fakes.budgets import budget, spans_of, world
from fakes.mistakes import tells
from fakes.process import Gateway

from penstock.gateway.api import login
from penstock.gateway.api.login import ACCESS_S, CODE_S, MOST_PENDING, DeviceLogins, LoginError
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.tape.store.audit_log import AuditLog
from penstock.gateway.traffic.calls.admission import LOGIN_PREFIX, Auth, AuthError, key_hash, make_key

DEVICE = "urn:ietf:params:oauth:grant-type:device_code"
SECRET = b"0123456789abcdef"
ASKED: Any = {"model": "claude-opus-5-5", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
KEY, OTHER = make_key(), make_key()
KEPT = f'[[key]]\nname = "ann"\nrole = "call"\nsha256 = "{key_hash(KEY)}"\n'


async def form(http: aiohttp.ClientSession, url: str, **said: str) -> tuple[int, dict[str, Any]]:
    async with http.post(url, data=said, headers={"user-agent": "<b>claude"}) as answer:
        assert answer.headers["cache-control"] == "no-store"
        return answer.status, await answer.json()


async def begin(http: aiohttp.ClientSession, gateway: Gateway) -> dict[str, Any]:
    """A sign-in as Claude Code begins it: from the metadata of the gateway's address."""
    async with http.get(f"{gateway.url}/.well-known/oauth-authorization-server") as answer:
        found = await answer.json()
    assert found["issuer"] == gateway.url
    assert set(found["grant_types_supported"]) == {DEVICE, "refresh_token"}
    status, begun = await form(http, found["device_authorization_endpoint"], surface="claude_code")
    assert (status, begun["expires_in"], begun["interval"]) == (200, CODE_S, 5)
    return begun | {"token_endpoint": found["token_endpoint"]}


async def decide(
    http: aiohttp.ClientSession, gateway: Gateway, code: str, key: str = KEY, decision: str = "allow", **headers: str
) -> tuple[int, str]:
    said = {"user_code": code, "key": key, "decision": decision}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with http.post(f"{gateway.url}/device", data=said, headers=named, allow_redirects=False) as answer:
        assert "location" not in answer.headers
        return answer.status, await answer.text()


async def signed_in(http: aiohttp.ClientSession, gateway: Gateway) -> dict[str, Any]:
    begun = await begin(http, gateway)
    assert (await decide(http, gateway, begun["user_code"]))[0] == 200
    status, found = await form(
        http, begun["token_endpoint"], grant_type=DEVICE, device_code=begun["device_code"], unknown="is ignored"
    )
    assert (status, found["token_type"], found["expires_in"], found["email"]) == (200, "Bearer", ACCESS_S, "ann")
    return found


def claude(gateway: Gateway, token: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gateway.url, auth_token=token, max_retries=0)


async def say(client: anthropic.AsyncAnthropic, asked: Any, headers: dict[str, str] | None = None) -> None:
    messages: Any = client.messages
    assert (await messages.create(**asked, extra_headers=headers)).type == "message"


async def test_a_client_signs_in_with_a_key_and_has_its_budget(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    usd = budget(name="ann", per="key", unit="usd", limit=0.05, window="1d")
    more = f"require_token = true\n{KEPT}"
    async with world(tmp_path, usd, more=more) as (gateway, provider), AsyncExitStack() as stack:
        tokens = await signed_in(http, gateway)
        bearer = {"authorization": f"Bearer {tokens['access_token']}"}
        async with http.get(f"{gateway.url}/api/oauth/usage", headers=bearer) as answer:
            assert (await answer.json())["extra_usage"]["used_credits"] == 0
        client = await stack.enter_async_context(claude(gateway, tokens["access_token"]))
        asked: Any = {"model": "claude-opus-5-5", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
        headers = {"x-claude-code-session-id": "8a1b2c3d-1111-2222-3333-444455556666"}
        await say(client, asked, headers)
        assert tokens["access_token"] not in str(provider.log[0].headers), "the provider must not see it"
        async with http.get(f"{gateway.url}/api/oauth/usage", headers=bearer) as answer:
            said = await answer.json()
        assert (said["extra_usage"]["monthly_limit"], said["extra_usage"]["currency"]) == (5, "USD")
        (cap,) = said["limits"]
        assert (cap["group"], cap["is_active"], cap["resets_at"][10:]) == ("daily", True, "T00:00:00.000Z")
        with pytest.raises(anthropic.RateLimitError) as refused:
            await say(client, asked | {"max_tokens": 8_000}, headers)
        body = refused.value.response.json()
        assert body["error"]["type"] == "billing_error"
        async with http.get(f"{gateway.url}/api/rollouts", headers=bearer) as answer:
            assert answer.status == 403, "it opens nothing of the control API"
        log = {"timeUnixNano": str(time.time_ns()), "eventName": "claude_code.user_prompt", "attributes": [
            {"key": "session.id", "value": {"stringValue": headers["x-claude-code-session-id"]}}]}  # fmt: skip
        body = {"resourceLogs": [{"scopeLogs": [{"logRecords": [log, {"body": {"stringValue": "whose?"}}]}]}]}
        async with http.post(f"{gateway.url}/v1/logs", json=body, headers=bearer) as answer:
            assert (answer.status, (await answer.json())["partialSuccess"]["rejectedLogRecords"]) == (200, "1")
        kept = [path for path in gateway.data.rglob("*") if path.is_file()]
        assert not [path for path in kept if tokens["access_token"].encode() in path.read_bytes()]
        assert tokens["access_token"] not in gateway.log


async def test_a_sign_in_is_on_the_audit_log_before_it_is_allowed(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, seen = AuditLog.record, list[Any]()

    async def observed(self: AuditLog, said: ActionRequest, action: str, target: str) -> None:
        asked = {"grant_type": DEVICE, "device_code": begun["device_code"]}
        seen.append(await form(http, begun["token_endpoint"], **asked))
        await record(self, said, action, target)
        if len(seen) == 1:
            seen.append(await decide(http, gateway, begun["user_code"]))

    monkeypatch.setattr(AuditLog, "record", observed)
    async with world(tmp_path, more=KEPT) as (gateway, _):
        begun = await begin(http, gateway)
        assert (await decide(http, gateway, begun["user_code"]))[0] == 404, "the second person was quicker"
    assert seen[0] == (400, {"error": "authorization_pending"})
    assert [status for status, _ in seen] == [400, 400, 200]


async def test_a_used_up_budget_says_when_it_begins_anew(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    calls = budget(name="ann", per="key", limit=1, window="1d")
    async with world(tmp_path, calls, more=KEPT) as (gateway, _), AsyncExitStack() as stack:
        token = (await signed_in(http, gateway))["access_token"]
        client = await stack.enter_async_context(claude(gateway, token))
        asked: Any = {"model": "claude-opus-5-5", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
        await say(client, asked)
        with pytest.raises(anthropic.RateLimitError) as refused:
            await say(client, asked)
        told = refused.value.response.headers
        names = ["status", "overage-period", "overage-utilization", "overage-disabled-reason"]
        values = [told[f"anthropic-ratelimit-unified-{name}"] for name in names]
        assert values == ["rejected", "daily", "1", "org_spend_cap_reached"]
        assert int(told["anthropic-ratelimit-unified-reset"]) % 86_400 == 0
        assert told["x-should-retry"] == "false"
        assert "anthropic-ratelimit-unified-representative-claim" not in told
        async with http.get(f"{gateway.url}/api/oauth/usage", headers={"authorization": f"Bearer {token}"}) as answer:
            assert answer.status == 404, "it has no budget in dollars"


async def test_answers_tell_how_full_the_budget_is_and_not_the_providers_own_limits(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with world(tmp_path, budget(name="ann", per="key", limit=4, window="1d"), more=KEPT) as (gateway, provider):
        provider.headers = {"anthropic-ratelimit-requests-limit": "50", "x-own": "kept"}
        told: list[Any] = []
        for key in (KEY, KEY, KEY, KEY, "sk-ant-of-their-own"):
            headers = {"x-api-key": key}
            async with http.post(f"{gateway.url}/v1/messages", json=ASKED, headers=headers) as answer:
                assert (answer.status, answer.headers["x-own"]) == (200, "kept")
                _ = await answer.read()
                names = ("unified-status", "unified-overage-utilization", "unified-overage-surpassed-threshold")
                told.append([answer.headers.get(f"anthropic-ratelimit-{name}") for name in (*names, "requests-limit")])
            _ = await spans_of(http, gateway, "status:ok", len(told))
    assert told == [
        ["allowed", "0.00", None, None], ["allowed", "0.25", None, None], ["allowed", "0.50", None, None],
        ["allowed_warning", "0.75", "0.75", None], [None, None, None, "50"],
    ]  # fmt: skip


async def test_until_it_is_allowed_a_client_waits_and_gets_its_token_once(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with world(tmp_path, more=KEPT) as (gateway, _):
        begun = await begin(http, gateway)
        asked = {"grant_type": DEVICE, "device_code": begun["device_code"]}
        url = begun["token_endpoint"]
        assert await form(http, url, **asked) == (400, {"error": "authorization_pending"})
        assert await form(http, url, **asked) == (400, {"error": "slow_down"})
        async with http.get(begun["verification_uri_complete"]) as page:
            text = await page.text()
        assert tells(text, "from 127.0.0.1", "&lt;b&gt;claude", begun["user_code"], 'type="password"')
        assert "form-action 'self'" in page.headers["content-security-policy"]
        for wrong in (OTHER, "", "pst_key_x"):
            status, told = await decide(http, gateway, begun["user_code"], wrong)
            assert (status, "no key for calls" in told) == (403, True)
        assert (await decide(http, gateway, begun["user_code"], sec_fetch_site="cross-site"))[0] == 403
        assert (await decide(http, gateway, begun["user_code"], origin="https://evil.example"))[0] == 403
        assert [(await decide(http, gateway, code))[0] for code in ("BBBB-BBBB", "é\0", "")] == [404] * 3
        assert (await decide(http, gateway, begun["user_code"].lower().replace("-", " "), origin=gateway.url))[0] == 200
        assert (await decide(http, gateway, begun["user_code"]))[0] == 404, "a code is used once"
        status, found = await form(http, url, **asked)
        assert status == 200
        assert await form(http, url, **asked) == (400, {"error": "expired_token"})
        again = (await decide(http, gateway, (await begin(http, gateway))["user_code"], found["access_token"]))[0]
        assert again == 403, "a token signs in nobody"
        async with http.get(f"{gateway.url}/api/audit") as answer:
            (entry,) = (await answer.json())["entries"]
        assert (entry["action"], entry["key"], entry["target"]) == ("sign_in", "ann", "ann")
        assert entry["why"] == "<b>claude at 127.0.0.1"
        status, renewed = await form(http, url, grant_type="refresh_token", refresh_token=found["refresh_token"])
        assert (status, renewed["access_token"].startswith(LOGIN_PREFIX)) == (200, True)
        status, told = await form(http, url, grant_type="refresh_token", refresh_token=found["access_token"])
        assert (status, told["error"]) == (401, "invalid_grant")
        async with http.post(
            f"{gateway.url}/v1/messages", json={}, headers={"x-api-key": found["refresh_token"]}
        ) as no:
            assert (no.status, no.headers["x-should-retry"]) == (401, "false")
        refused = await begin(http, gateway)
        assert (await decide(http, gateway, refused["user_code"], decision="refuse"))[0] == 200
        asked = {"grant_type": DEVICE, "device_code": refused["device_code"]}
        assert await form(http, url, **asked) == (400, {"error": "access_denied"})


@pytest.mark.parametrize("more", ["", KEPT])
async def test_the_rest_of_the_contract(tmp_path: Path, http: aiohttp.ClientSession, more: str) -> None:
    async with world(tmp_path, more=more) as (gateway, provider):
        async with http.get(f"{gateway.url}/protocol") as answer:
            assert answer.content_type == "text/markdown"
            text = await answer.text()
            assert [path for path in login.PATHS if path not in text] == ["/protocol"]
        async with http.get(f"{gateway.url}/managed/settings") as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (404, "not_found_error")
        async with http.get(f"{gateway.url}/api/oauth/usage") as answer:
            assert answer.status == 401
        for path in ("/.well-known/oauth-authorization-server", "/device"):
            async with http.get(gateway.url + path) as answer:
                assert answer.status == (200 if more else 404)
        status, told = await form(http, f"{gateway.url}/oauth/token", grant_type="password")
        assert (status, told["error"]) == ((400, "unsupported_grant_type") if more else (404, "not_found"))
        async with http.put(f"{gateway.url}/oauth/token") as answer:
            assert (answer.status, answer.headers["allow"]) == (405, "POST")
        async with http.get(f"{gateway.url}/agent/login/http/1.1.1.1/protocol") as answer:
            assert answer.status == 404, "nobody names an address himself"
        async with http.post(f"{gateway.url}/oauth/token", data=b"x" * 9000) as answer:
            assert answer.status == (413 if more else 404)
        assert provider.log == []


def test_codes_are_bounded_and_end() -> None:
    now = 0.0
    logins = DeviceLogins(lambda: now)
    begun = [logins.begin("a", "x") for _ in range(MOST_PENDING)]
    assert logins.begin("b", "x") is None
    assert begun[0] is not None
    now = CODE_S + 1.0
    assert logins.find(begun[0][1].user_code) is None
    with pytest.raises(LoginError, match="expired_token"):
        logins.poll(begun[0][0])
    assert logins.begin("b", "x") is not None
    assert [logins.allows("try", "a", 2) for _ in range(3)] == [True, True, False]
    assert logins.allows("try", "b", 2)
    now += 60
    assert logins.allows("try", "a", 2)


async def test_an_address_begins_only_so_often(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, more=KEPT) as (gateway, _):
        url = f"{gateway.url}/oauth/device_authorization"
        found = await asyncio.gather(*(form(http, url) for _ in range(2 * login.BEGINS + 1)))
        assert (429, "slow_down") in [(status, body.get("error")) for status, body in found]
        codes = [json.dumps(body["user_code"]) for status, body in found if status == 200]
        assert len(set(codes)) == len(codes)


def auth(key: str = KEY, name: str = "ann", secret: bytes = SECRET) -> Auth:
    return Auth(None, secret, callers=[(key_hash(key), name)])


def test_a_token_ends_with_its_time_and_its_key() -> None:
    token = auth().mint_login("ann", "access", 10, now=100)
    assert auth().login_key(token, "access", now=109) == "ann"
    with pytest.raises(AuthError, match="expired"):
        auth().login_key(token, "access", now=110)
    with pytest.raises(AuthError, match="no refresh token"):
        auth().login_key(token, "refresh", now=100)
    with pytest.raises(AuthError, match="another key of the name 'ann'"):
        auth(OTHER).login_key(token, "access", now=100)
    with pytest.raises(AuthError, match="no key 'ann'"):
        auth(name="bob").login_key(token, "access", now=100)
    for wrong in (token[:-2], token[:-4] + "AAAA", LOGIN_PREFIX, LOGIN_PREFIX + "é", KEY, ""):
        with pytest.raises(AuthError):
            auth().login_key(wrong, "access", now=100)
    with pytest.raises(AuthError, match="not one of this gateway's"):
        auth(secret=b"another secret!!").login_key(token, "access", now=100)
