"""Upstreams whose credentials the gateway holds: it signs for AWS and sends Google's tokens, and keeps both fresh. They
need botocore, which cannot be installed next to the client of Kubernetes.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Mapping
from datetime import UTC, datetime, timedelta
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientSession
from anthropic.lib.bedrock import AsyncAnthropicBedrock
from anthropic.lib.vertex import AsyncAnthropicVertex
from fakes.cloud_credentials import Clouds, clouds
from fakes.event_stream import frame
from fakes.experiment import CANDIDATE, STABLE, policy, prompt
from fakes.local import Local, locally
from fakes.process import upstream
from fakes.tape import Tape
from fakes.waiting import until, when
from yarl import URL

from examples.demo import model as demo
from penstock.gateway.client.client import Client
from penstock.gateway.config import UpstreamSettings, load
from penstock.gateway.model.release import NewRelease
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.traffic.upstreams import cloud_auth
from penstock.gateway.traffic.upstreams.cloud_auth import AwsAuth, AwsCredentials, CloudAuthService
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.wire.http.redaction import Redactor

_ = pytest.importorskip("botocore"), pytest.importorskip("google.auth")
Headers = Mapping[str, str]
PATH = "/model/us.anthropic.claude-3-5-haiku-20241022-v1%3A0"
REQUEST = b'{"messages": [{"role": "user", "content": [{"text": "h\xc3\xa9"}]}]}'
ANSWER: dict[str, Any] = {
    "output": {"message": {"role": "assistant", "content": [{"text": "Hello."}]}},
    "stopReason": "end_turn",
    "usage": {"inputTokens": 3, "outputTokens": 2},
}
OWN = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=AKIDOFTHEAGENT/20261122/us-east-1/bedrock/aws4_request, Signature=f0",
    "X-Amz-Date": "20201122T210000Z", "X-Amz-Security-Token": "the-agent-s-own-token", "amz-sdk-invocation-id": "6d1f",
    "X-Amz-Content-SHA256": "0" * 64, "X-Amzn-Bedrock-Trace": "ENABLED", "x-api-key": "sk-ant-of-the-agent",
}  # fmt: skip
"""What an agent sends that signs with keys of its own."""


def aws(cloud: Clouds, name: str = "bedrock", dialect: str = "bedrock") -> str:
    return upstream(name, cloud.url, dialect) + 'auth = "aws"\n\n'


@pytest_asyncio.fixture
async def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncGenerator[Clouds]:
    """Both clouds; this machine has no credentials."""
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_PROFILE",
        "AWS_DEFAULT_REGION",
    ):
        monkeypatch.delenv(name, raising=False)
    nowhere = str(tmp_path / "nowhere")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "HOME", "CLOUDSDK_CONFIG"):
        monkeypatch.setenv(name, nowhere)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    monkeypatch.setattr(cloud_auth, "LOOK_S", 0.05)
    async with clouds() as made:
        made.answer = json.dumps(ANSWER).encode()
        yield made


@pytest.fixture
def role(cloud: Clouds, monkeypatch: pytest.MonkeyPatch) -> Clouds:
    """The gateway runs in a container with a role."""
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{cloud.url}/credentials")
    return cloud


@pytest.fixture
def account(cloud: Clouds, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clouds:
    """The gateway has the key of a service account."""
    (tmp_path / "account.json").write_text(cloud.service_account())
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
    return cloud


async def ask(
    gateway: Local, path: str = f"{PATH}/converse", body: bytes = REQUEST, rollout: str = "r1", headers: Headers = OWN
) -> tuple[int, str]:
    url = URL(f"{gateway.url}/rollout/{rollout}/attempt/a1{path}", encoded=True)
    async with ClientSession() as session, session.post(url, data=BytesIO(body), headers=headers) as answer:
        return answer.status, await answer.text()


async def wanted(gateway: Local, holds: Callable[[int], bool]) -> str:
    """Ask until the status of an answer, or what has happened meanwhile, is as wanted."""
    return (await when(lambda: ask(gateway, rollout="r2"), lambda it: holds(it[0]), pause_s=0.1))[1]


async def test_a_request_is_signed_and_the_agent_s_own_signature_is_gone(
    cloud: Clouds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.secrets["AKIDOFTHEGATEWAY"] = "the-secret-of-the-gateway-1"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOFTHEGATEWAY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret-of-the-gateway-1")
    cloud.answer = json.dumps(ANSWER | {"trace": "the-secret-of-the-gateway-1"}).encode()
    async with locally(tmp_path / "g", aws(cloud)) as gateway:
        paths = [f"{PATH}/converse", f"{PATH}/converse?b=%2F&a=1", "/model/arn:aws:bedrock:a:1:x/y%20z/invoke"]
        assert [(await ask(gateway, path))[0] for path in paths] == [200] * 3
        large = b'{"messages": [{"role": "user", "content": [{"text": "%b"}]}]}' % (b"x" * (3 << 20))
        assert (await ask(gateway, body=large))[0] == 200
        async with ClientSession() as session:
            tape = Tape(gateway.url, session)
            spans = await tape.spans("r1", 4)
            exchange = (await tape.detail(spans[0])).exchange
    assert [(by.key, by.region, by.service) for by in cloud.signed] == [
        ("AKIDOFTHEGATEWAY", "eu-west-3", "bedrock")
    ] * 4
    assert [seen.path for seen in cloud.seen[:3]] == paths
    seen = cloud.seen[0]
    assert not [it for _, it in seen.headers if "AGENT" in it or "agent-s" in it or "of-the-agent" in it]
    assert (seen.header("x-amzn-bedrock-trace"), seen.header("amz-sdk-invocation-id")) == ("ENABLED", "6d1f")
    assert seen.all("x-amz-content-sha256") == seen.all("x-amz-security-token") == []
    assert {span.status for span in spans} == {"ok"}
    assert exchange is not None
    kept = {name.lower(): value for name, value in exchange.request_headers}
    assert (kept["authorization"], kept["x-amz-date"]) == ("***", seen.header("x-amz-date"))
    assert "of-the-gateway" not in exchange.model_dump_json()


async def test_keys_of_a_role_are_refreshed_before_they_expire_and_hidden(role: Clouds, tmp_path: Path) -> None:
    role.lifetime_s = 540.0
    async with locally(tmp_path / "g", aws(role)) as gateway:
        assert (await ask(gateway))[0] == 200
        first = role.signed[0].key
        await wanted(gateway, lambda status: role.signed[-1].key != first)
        token = role.seen[-1].header("x-amz-security-token")
        async with ClientSession() as session:
            event = {"events": [{"name": "told", "attributes": {"said": f"it is {token}"}}]}
            async with session.post(f"{gateway.url}/rollout/r3/attempt/a1/events", json=event) as answer:
                assert answer.status < 300, await answer.text()
            (span,) = await Tape(gateway.url, session).spans("r3", 1)
        assert (span.attributes or {})["said"] == "it is " + "*" * len(token)
        role.statuses, role.answer = [400], f"no: {role.seen[-1].header('x-amz-security-token')}".encode()
        status, said = await ask(gateway)
        assert (status, said) == (400, "no: " + "*" * (len(role.answer) - 4))
        role.answer, role.broken = json.dumps(ANSWER).encode(), True
        await when(lambda: failing(gateway, "bedrock"), lambda it: it.startswith("auth: "))
        assert (await ask(gateway))[0] == 200, "the keys that are there are still good"
        role.broken = False
        await when(lambda: failing(gateway, "bedrock"), lambda it: not it)
    assert "number-" not in gateway.log


async def failing(gateway: Local, name: str) -> str:
    """What `penstock upstreams` says that fails."""
    async with ClientSession() as session, session.get(f"{gateway.url}/api/upstreams") as answer:
        return {one["name"]: one for one in (await answer.json())["upstreams"]}[name]["failing"]


async def test_without_credentials_a_call_is_refused_until_there_are_some(
    cloud: Clouds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = upstream("spare", cloud.url, "bedrock", key_env="SPARE") + (
        '[[route]]\nmodel = "two"\nupstream = ["bedrock", "spare"]\n'
    )
    monkeypatch.setenv("SPARE", "ya29.spare-key-of-the-gateway")
    cloud.tokens.append("ya29.spare-key-of-the-gateway")
    async with locally(tmp_path / "g", aws(cloud) + spare) as gateway:
        status, said = await ask(gateway)
        assert (status, json.loads(said)["__type"]) == (503, "ServiceUnavailableException")
        assert "upstream 'bedrock': its log says why" in said
        assert "no AWS credentials were found (environment, profile," in gateway.log
        assert (await ask(gateway, "/model/two/converse"))[0] == 200, "another upstream of the route has a key"
        assert (await failing(gateway, "bedrock")).startswith("auth: no AWS credentials were found")
        cloud.secrets["AKIDOFAPROFILE"] = "the-secret-of-a-profile-1"
        (tmp_path / "nowhere").write_text(
            "[default]\naws_access_key_id = AKIDOFAPROFILE\naws_secret_access_key = the-secret-of-a-profile-1\n"
        )
        await wanted(gateway, lambda status: status == 200)
        async with ClientSession() as session:
            spans = await Tape(gateway.url, session).spans("r1", 2)
    assert (spans[0].status, spans[0].error, spans[0].upstream) == ("error", "auth", "bedrock")
    assert 'auth = "aws": no credentials could be had (calls are refused)' in gateway.log


async def test_expired_credentials_are_not_used(role: Clouds, tmp_path: Path) -> None:
    role.lifetime_s = 2.0
    async with locally(tmp_path / "g", aws(role)) as gateway:
        await wanted(gateway, lambda status: status == 200)
        role.broken = True
        said = await wanted(gateway, lambda status: status == 503)
        assert "the gateway has no credentials for upstream 'bedrock'" in said
        role.broken, role.lifetime_s = False, 3600.0
        await wanted(gateway, lambda status: status == 200)


async def test_a_call_waits_for_the_first_credentials(
    role: Clouds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    come, begun = asyncio.Event(), asyncio.Event()
    given = Clouds.credentials

    async def slow(self: Clouds, request: Any) -> Any:
        begun.set()
        await come.wait()
        return await given(self, request)

    monkeypatch.setattr(Clouds, "credentials", slow)
    async with clouds() as late:
        late.answer = role.answer
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{late.url}/credentials")
        async with locally(tmp_path / "g", aws(late)) as gateway:
            asked = asyncio.ensure_future(ask(gateway))
            await begun.wait()
            left = asyncio.ensure_future(ask(gateway))
            await until(lambda: len(gateway.gateway.proxy.running) == 2)
            left.cancel()
            await until(lambda: len(gateway.gateway.proxy.running) == 1)
            assert not asked.done()
            come.set()
            assert (await asked)[0] == 200


async def test_a_signature_is_made_when_the_request_is_written(
    role: Clouds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call may wait at a paused upstream for longer than a signature is good."""
    async with locally(tmp_path / "g", aws(role)) as gateway:
        assert (await ask(gateway))[0] == 200
        gate = gateway.gateway.pools["bedrock"].gate
        gate.pause(60)
        asked = asyncio.ensure_future(ask(gateway))
        await until(lambda: gate.waiting == 1)
        later = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=90)
        monkeypatch.setattr(import_module("botocore.auth"), "get_current_datetime", lambda: later.replace(tzinfo=None))
        gate.open()
        assert (await asked)[0] == 200
    assert role.signed[-1].time == later


async def test_each_try_is_signed_anew(role: Clouds, tmp_path: Path) -> None:
    route = '[[route]]\nmodel = "*"\nupstream = ["bedrock", "other"]\n'
    role.statuses = [503, 503]
    async with locally(tmp_path / "g", aws(role) + aws(role, "other") + route) as gateway:
        assert (await ask(gateway))[0] == 200
    assert len(role.seen) == 3
    assert [len(seen.all("authorization")) for seen in role.seen] == [1, 1, 1]


async def test_google_s_token_is_sent_and_kept_fresh(account: Clouds, tmp_path: Path) -> None:
    path = "/v1/projects/p/locations/l/publishers/google/models/gemini-3-pro:generateContent?key=AIzaSyOfTheAgent00&a=1"
    account.answer = b'{"candidates": [{"content": {"parts": [{"text": "Hi."}]}, "finishReason": "STOP"}]}'
    account.lifetime_s = 200.0
    async with locally(tmp_path / "g", upstream("vertex", account.url, "vertex") + 'auth = "google"\n') as gateway:
        assert (await ask(gateway, path, headers=OWN | {"x-goog-api-key": "AIzaSyOfTheAgent00"}))[0] == 200
        assert (await ask(gateway, path, headers=OWN | {"x-goog-user-project": "billed"}))[0] == 200
        first, *_ = tokens = [seen.header("authorization") for seen in account.seen]
        assert first.startswith("Bearer ya29.token-number-")
        async with asyncio.timeout(60):
            while account.seen[-1].header("authorization") in tokens:
                assert (await ask(gateway, path))[0] == 200
        seen = account.seen[0]
        assert seen.path == path.replace("key=AIzaSyOfTheAgent00&", "")
        assert seen.all("x-goog-api-key") == seen.all("x-api-key") == []
        assert account.seen[1].header("x-goog-user-project") == "billed"
        account.statuses, account.answer = [400], account.seen[-1].header("authorization").encode()
        assert "ya29" not in (await ask(gateway, path))[1]
        account.broken = True
        await when(lambda: failing(gateway, "vertex"), lambda it: it.startswith("auth: "))
        assert (await ask(gateway, path))[0] == 200, "the token before is still good"
    assert "ya29" not in gateway.log


async def test_an_official_client_of_vertex_needs_no_token_of_its_own(account: Clouds, tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "model": "claude-opus-5-5",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "?"}],
    }
    account.answer = json.dumps(demo.message(asked, demo.DemoAnswer("Hello there."))).encode()
    account.headers = {"Content-Type": "application/json"}
    async with locally(tmp_path / "g", upstream("vertex", account.url, "vertex") + 'auth = "google"\n') as gateway:
        where: dict[str, Any] = {"project_id": "p", "region": "us-east5", "access_token": "ya29.none"}
        async with AsyncAnthropicVertex(base_url=f"{gateway.address('r1')}/v1", **where) as client:
            messages: Any = client.messages
            message = await messages.create(**asked)
    assert message.content[0].text == "Hello there."
    assert account.seen[0].header("authorization") == f"Bearer {account.tokens[-1]}"
    assert (
        account.seen[0].path
        == "/v1/projects/p/locations/us-east5/publishers/anthropic/models/claude-opus-5-5:rawPredict"
    )


async def test_without_google_s_credentials(cloud: Clouds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    path = "/v1/projects/p/locations/l/publishers/google/models/gemini-3-pro:generateContent"
    async with locally(tmp_path / "g", upstream("vertex", cloud.url, "vertex") + 'auth = "google"\n') as gateway:
        status, said = await ask(gateway, path)
    assert (status, json.loads(said)["error"]["status"]) == (503, "UNAVAILABLE")
    assert str(tmp_path) not in said
    assert "none.json was not found" in gateway.log


async def test_a_released_prompt_is_signed_for_and_so_is_what_mirrors_it(role: Clouds, tmp_path: Path) -> None:
    request: dict[str, Any] = {
        "anthropic_version": "bedrock-2023-05-31",
        "max_tokens": 9,
        "system": STABLE.replace("{date}", "Tuesday"),
        "messages": [{"role": "user", "content": "Hello"}],
    }
    role.answer = json.dumps(demo.message(request | {"model": "m"}, demo.DemoAnswer("Hi."))).encode()
    async with locally(tmp_path / "g", aws(role)) as gateway, Client(gateway.url) as client:
        await client.add_version("travel", prompt(STABLE, sent=True))
        await client.add_version("travel", prompt(CANDIDATE))
        how = policy(0.9, shadowed="required", shadow={"share": 1.0, "calls": 1})
        release = await client.start_release("travel", NewRelease(candidate="v2", policy=how))
        await when(lambda: client.release(release.id), lambda it: it.doing == "shadow")
        body = json.dumps(request).encode()
        assert (await ask(gateway, f"{PATH}/invoke", body))[0] == 200
        await when(lambda: client.release(release.id), lambda it: it.release.stage == "canary")
        for number in range(8):
            assert (await ask(gateway, f"{PATH}/invoke", body, rollout=f"later{number}"))[0] == 200
    said = [json.loads(seen.body)["system"].partition(" of ")[0] for seen in role.seen]
    old, new = "You are a travel agent", "You are a careful travel agent"
    assert (said[:2], set(said[2:]) | {old}) == ([old, new], {old, new})
    assert len(role.signed) == len(said) == 10


@pytest.mark.parametrize("stream", [False, True])
async def test_an_official_client_needs_no_key_of_its_own(role: Clouds, tmp_path: Path, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "What?"}]}
    said = demo.DemoAnswer("Hello there.")
    role.answer = json.dumps(demo.message(asked, said)).encode()
    if stream:
        datas = [line[5:] for line in b"".join(demo.message_events(asked, said)).splitlines() if line[:5] == b"data:"]
        kind = {":event-type": "chunk", ":content-type": "application/json", ":message-type": "event"}
        role.answer = b"".join(frame(kind, json.dumps({"bytes": b64encode(it).decode()}).encode()) for it in datas)
        role.headers = {"Content-Type": "application/vnd.amazon.eventstream"}
    async with locally(tmp_path / "g", aws(role)) as gateway:
        address = gateway.address("r1")
        async with AsyncAnthropicBedrock(api_key="none", aws_region="eu-west-3", base_url=address) as client:
            if stream:
                async with client.messages.stream(**asked) as answer:
                    assert await answer.get_final_text() == "Hello there."
            else:
                messages: Any = client.messages
                message = await messages.create(**asked)
                assert message.content[0].text == "Hello there."
        async with ClientSession() as session:
            tape = Tape(gateway.url, session)
            (span,) = await tape.spans("r1", 1)
            turn = (await tape.detail(span)).turn
    assert (span.dialect, span.model, span.stream, span.finish) == ("invoke", "m", stream, "end_turn")
    assert turn is not None
    assert (turn.problems, turn.choices[0].message.parts[0].text) == ([], "Hello there.")
    assert role.seen[0].path == f"/model/m/invoke{'-with-response-stream' if stream else ''}"


HOSTS = {
    "bedrock-runtime.us-east-1.amazonaws.com": ("bedrock", "us-east-1"),
    "bedrock-runtime-fips.us-gov-west-1.amazonaws.com": ("bedrock", "us-gov-west-1"),
    "bedrock-runtime.cn-north-1.amazonaws.com.cn": ("bedrock", "cn-north-1"),
    "vpce-1a2b.bedrock-runtime.eu-central-2.vpce.amazonaws.com": ("bedrock", "eu-central-2"),
    "bedrock-mantle.us-east-1.api.aws": ("bedrock-mantle", "us-east-1"),
    "aws-external-anthropic.us-west-2.api.aws": ("aws-external-anthropic", "us-west-2"),
    "my-proxy.example": ("bedrock", "eu-west-3"),
}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.usefixtures("cloud")
async def test_the_service_and_region_of_a_host(host: str) -> None:
    config = UpstreamSettings(name="u", base_url=f"https://{host}/v1", dialect="bedrock", auth="aws")
    made = AwsAuth(config, AwsCredentials(import_module("botocore.session")))
    assert (made.service, made.region) == HOSTS[host]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"base_url": "https://api.openai.com/v1", "auth": "aws"}, "api.openai.com takes no such credentials"),
        ({"base_url": "https://aiplatform.googleapis.com", "auth": "aws"}, "takes no such credentials"),
        (
            {"base_url": "https://bedrock-runtime.us-east-1.amazonaws.com", "auth": "google"},
            "takes no such credentials",
        ),
        ({"base_url": "https://example.com", "auth": "aws", "dialect": "openai"}, "tells no service of AWS"),
        ({"base_url": "https://example.com", "auth": "aws", "dialect": "bedrock"}, "export AWS_REGION=..."),
    ],
)
@pytest.mark.usefixtures("cloud")
async def test_settings_that_cannot_work(said: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION")
    with pytest.raises(ConfigError, match=why):
        CloudAuthService([ConnectionPool(UpstreamSettings(name="u", **said))], Redactor(), lambda _: None)


@pytest.mark.parametrize(("auth", "module", "package"), [
    ("aws", "botocore.session", "botocore"), ("google", "google.auth", "google-auth"),
])  # fmt: skip
async def test_a_missing_library_is_said_at_the_start(
    auth: Any, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name) if name == module else AssertionError(name)

    monkeypatch.setattr(cloud_auth, "import_module", missing)
    config = UpstreamSettings(name="u", base_url="https://example.com", dialect="bedrock", auth=auth)
    with pytest.raises(ConfigError, match=rf"needs {package}, which is not here: pip install '\.\[clouds\]'"):
        CloudAuthService([ConnectionPool(config)], Redactor(), lambda _: None)


def test_an_upstream_has_one_key(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text(upstream("u", "https://example.com", "bedrock", "KEY") + 'auth = "aws"\n')
    with pytest.raises(ConfigError, match='key_env and auth = "aws" are both a key of its own: leave one out'):
        load(tmp_path / "penstock.toml")
