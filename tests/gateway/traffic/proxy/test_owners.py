"""No call goes to a provider that it is not of, and no key. Drawn in the pure part, then asked of a gateway that has an
upstream of every family on a host of its own."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import anthropic
import openai
import pytest
from anthropic.lib.bedrock import AnthropicBedrock
from anthropic.lib.vertex import AnthropicVertex
from fakes.process import PATIENCE, ROOT, upstream
from fakes.raw import error_of
from fakes.rig import MESSAGES, Within, based
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.config import GatewayConfig
from penstock.gateway.model.facts import LEFT_OUT
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.traffic.upstreams.routes import RouteTable
from penstock.gateway.wire.dialects import FAMILIES as FAMILIES_BY_NAME
from penstock.gateway.wire.dialects import family, find
from penstock.gateway.wire.dialects.family import OPENAI, OWNERS, KeyFilter, key_kind
from penstock.gateway.wire.http.headers import frame_body, refusal_body
from penstock.gateway.wire.http.request import ClientFault, HttpRequest

GOOGLE = "gemini vertex"
VERTEX, BEDROCK = "/v1/projects/p/locations/us-east5", "/model/us.anthropic.claude-sonnet-4-5-v1%3A0"
PATHS = {
    "/v1/chat/completions": "openai",
    "/v1/embeddings": "openai",
    "/v1/audio/transcriptions": "openai chatgpt",
    "/v1/responses/resp_1/cancel": "openai chatgpt",
    "/v1/responses": "openai chatgpt",
    "/v1/traces/ingest": "openai chatgpt",
    "/tokenize": "openai",
    "/v1/messages": "anthropic",
    "/v1/messages/batches": "anthropic",
    "/v1/v1/messages/count_tokens": "anthropic",
    "//v1//messages/batches/": "anthropic",
    "/messages/count_tokens": "anthropic",
    "/v1/organizations/me": "anthropic",
    "/api/oauth/usage": "anthropic",
    "/v1/files": "openai anthropic chatgpt gemini",
    "/v1/batches/b1": "openai chatgpt gemini",
    "/v1/agents/sessions/s1/events?beta=true": "openai anthropic chatgpt",
    "/v1/skills": "openai anthropic chatgpt",
    "/anthropic/v1/messages": "anthropic azure bedrock",
    "/openai/deployments/d/chat/completions?api-version=2025-04-01": "azure",
    "/openai/v1/responses": "azure bedrock",
    "/openai/files?api-version=2025-04-01": "azure bedrock",
    f"{BEDROCK}/converse": "bedrock",
    f"{BEDROCK}/invoke": "bedrock",
    f"{BEDROCK}/invoke-with-response-stream": "bedrock",
    f"{BEDROCK}/count-tokens": "bedrock",
    "/%6dodel/m/invoke": "bedrock",
    "/async-invoke": "bedrock",
    f"{VERTEX}/publishers/anthropic/models/claude@1:streamRawPredict": "vertex",
    "/projects/p/locations/l/publishers/anthropic/models/count-tokens:rawPredict": "vertex",
    f"{VERTEX}/publishers/google/models/imagen:predict": "vertex",
    f"{VERTEX}/publishers/openai/v1/responses": "vertex",
    f"{VERTEX}/endpoints/openapi/chat/completions": "vertex",
    f"{VERTEX}/workspaces/w/invoke/v1/messages": "vertex",
    f"{VERTEX}/publishers/google/models/gemini-3:generateContent": GOOGLE,
    "/v1beta1/projects/p/locations/l/endpoints/1:streamGenerateContent?alt=sse": GOOGLE,
    "/v1beta/models/gemini-3:generateContent": GOOGLE,
    "/v1beta/interactions/i/cancel": "gemini",
    "/v1beta/openai/chat/completions": "gemini",
    "/upload/v1beta/files": "gemini",
    "/ws/google.ai.generativelanguage.v1beta.GenerativeService.BidiGenerateContent": "gemini",
    "/v1/realtime": "openai chatgpt",
    "/v1internal:streamGenerateContent?alt=sse": "codeassist",
    "/v1internal/operations/o": "codeassist",
    "/backend-api/wham/usage": "chatgpt",
    "/v1/logs": "",
    "/v1/metrics": "",
    "/v1/agl/queues/rollouts/dequeue": "",
    "/rewards": "",
    "//events/": "",
    "/v1/%65vents": "",
    "/wrapped": "",
    "/v1/openai/deployments/d/chat/completions?api-version=2025-04-01": "azure",
    "/v1/v1internal:generateContent": "codeassist",
    "/v1/v1beta/cachedContents": "gemini",
}
"""Families that have a path, as the providers' pages say."""
ANY = "/any/path/of/nobody"
READ = {"/v1/chat/completions", "/v1/embeddings", "/v1/messages", "/messages/count_tokens", "/v1/responses",
        "/anthropic/v1/messages"}  # fmt: skip
FAMILIES = ("openai", "anthropic", "gemini", "vertex", "codeassist", "bedrock", "azure", "chatgpt")
PUBLIC = ("openai", "gemini", "anthropic", "chatgpt")
"""Those that have a public endpoint, which no test may call."""
SIGNED = "AWS4-HMAC-SHA256 Credential=AKIA/20261129/us-east-1/{}/aws4_request, Signature="
FORMS = {
    "sk-proj-": "openai",
    "sk-or-v1-": "openai",
    "sk-ant-oat01-": "anthropic",
    "AIza": GOOGLE,
    "ya29.": f"{GOOGLE} codeassist",
    "auth_tokens/": GOOGLE,
    "ABSK": "bedrock",
    SIGNED.format("bedrock"): "bedrock",
    SIGNED.format("aws-external-anthropic"): "anthropic",
    SIGNED.format("s3"): "",
    "eyJhbGciOi.": None,
    "": None,
}
"""Families whose keys begin like this; None where that tells nothing."""
PLACES = {
    ("Authorization", "Bearer "): None,
    ("AUTHORIZATION", "bearer  "): None,
    ("authorization", ""): None,
    ("x-api-key", ""): "openai anthropic azure",
    ("api-key", ""): "anthropic azure",
    ("x-goog-api-key", ""): GOOGLE,
    ("X-Amz-Security-Token", ""): "bedrock",
    ("ChatGPT-Account-ID", ""): "chatgpt",
    ("Ocp-Apim-Subscription-Key", ""): "anthropic azure",
    ("Sec-WebSocket-Protocol", "realtime, openai-insecure-api-key."): "openai",
    ("X-My-Own", ""): None,
    ("Cookie", "a=b; c="): None,
    ("?key", ""): GOOGLE,
    ("?ke%79", ""): GOOGLE,
    ("?subscription-key", ""): "anthropic azure",
    ("?api_key", ""): None,
    ("?anything", ""): None,
}
"""Families whose keys of no known form stand there; None where that tells nothing."""
SECRET = "Zm9yLW5vYm9keS1lbHNl"


class Drawn(NamedTuple):
    """A call with one key."""

    path: str
    place: tuple[str, str]
    form: str

    @property
    def owners(self) -> set[str]:
        return set(FAMILIES) if self.path == ANY else set(PATHS[self.path].split())

    @property
    def target(self) -> str:
        mark = "&" if "?" in self.path else "?"
        place = self.place[0]
        return f"{self.path}{mark}{place[1:]}={quote(self.form)}{SECRET}" if place[0] == "?" else self.path

    @property
    def headers(self) -> list[tuple[str, str]]:
        return [] if self.place[0][0] == "?" else [(self.place[0], f"{self.place[1]}{self.form}{SECRET}")]

    def may_go(self, dialect: str, routed: bool) -> bool:
        """Whether an upstream of this dialect, on a host that is not known, may be given the call."""
        engine = dialect == "openai" and self.path in READ and self.owners & {"anthropic", "chatgpt"}
        return dialect in self.owners or (routed and bool(engine))

    def may_have(self, dialect: str, routed: bool) -> bool:
        """Whether it may be given the key."""
        told = FORMS[self.form] if self.place[0] != "ChatGPT-Account-ID" else "chatgpt"
        told = PLACES[self.place] if told is None else told
        if told is not None:
            return dialect in told.split()
        return dialect in self.owners or (routed and dialect == "openai" and not self.form)


CALLS = st.builds(Drawn, st.sampled_from([*PATHS, ANY]), st.sampled_from(list(PLACES)), st.sampled_from(list(FORMS)))


def sent(routes: RouteTable, call: Drawn) -> tuple[list[tuple[ConnectionPool, bytes]], bool]:
    """What each upstream that a call is for would be sent, and whether a route leads there; raises `ClientFault`."""
    asked = HttpRequest()
    asked.method, asked.target = "POST", call.target.encode()
    asked.headers = [(name.lower().encode(), name.encode(), value.encode()) for name, value in call.headers]
    path = call.target.partition("?")[0]
    found = routes.choose("m", find("POST", path), call.target, asked.headers)
    made: list[tuple[ConnectionPool, bytes]] = []
    for pool in found.pools:
        head, left = pool.heads.compose(asked, call.target.encode(), None, None, found.families)
        if found.route is not None or not left:
            made.append((pool, head))
    return made, found.route is not None


@settings(max_examples=1000)
@given(CALLS, st.lists(st.sampled_from(FAMILIES), unique=True), st.lists(st.sampled_from(FAMILIES), unique=True))
def test_no_call_and_no_key_goes_to_another_provider(call: Drawn, dialects: list[str], route: list[str]) -> None:
    upstreams = [{"name": f"u-{it}", "base_url": f"http://{it}.internal", "dialect": it} for it in dialects]
    leads = [f"u-{it}" for it in route if it in dialects]
    config = GatewayConfig.model_validate(
        {"upstream": upstreams, "route": [{"model": "m", "upstream": leads}] if leads else []}
    )
    pools = {one.name: ConnectionPool(one) for one in config.upstreams()}
    routes = RouteTable(config.route, pools, {one.name for one in config.upstream})
    refusal, made, routed = None, [], False
    try:
        made, routed = sent(routes, call)
    except ClientFault as error:
        refusal = error
    if refusal is not None:
        dialect = find("POST", call.path.partition("?")[0])
        body = json.loads(refusal_body(family(dialect, call.path, []), refusal))
        assert (refusal.status, refusal.field) == (404, "path")
        assert "__type" in body or body["error"]["message"]
        assert len(call.owners) != 1 or routes or not call.owners & set(dialects), "somebody serves it"
        return
    assert call.owners, "what is the gateway's own goes nowhere"
    for pool, head in made:
        assert any(call.may_go(one.name, routed) for one in pool.serves), pool.name
        assert SECRET.encode() not in head or call.may_have(pool.config.dialect, routed), head


@pytest.mark.parametrize(
    ("host", "dialect", "header", "passes"),
    [
        ("api.openai.com", "openai", "Bearer sk-proj-x", True),
        ("api.openai.com", "openai", "Bearer eyJhbGciOi.x", True),
        ("eu.api.openai.com.", "openai", "Bearer sk-or-x", False),
        ("api.openai.com", "openai", "Bearer sk-ant-x", False),
        ("api.openai.com", "openai", "Bearer gsk_x", False),
        ("vllm.internal", "openai", "Bearer gsk_x", True),
        ("vllm.internal", "openai", "Bearer of-its-own", True),
        ("api.anthropic.com", "openai", "Bearer sk-ant-x", True),
        ("api.anthropic.com", "anthropic", "Bearer sk-x", False),
        ("api.deepseek.com", "anthropic", "Bearer sk-x", True),
        ("openrouter.ai", "openai", "Bearer sk-or-x", True),
        ("openrouter.ai", "openai", "Bearer sk-proj-x", False),
        ("us-east5-aiplatform.googleapis.com", "gemini", "Bearer ya29.x", True),
        ("generativelanguage.googleapis.com", "openai", "Bearer AIzax", True),
        ("generativelanguage.googleapis.com", "openai", "Bearer sk-x", False),
        ("bedrock-runtime.us-east-1.amazonaws.com", "openai", f"{SIGNED.format('bedrock')}x", True),
        ("bedrock-runtime.us-east-1.amazonaws.com", "openai", "Bearer sk-x", False),
        ("r.openai.azure.com", "openai", "Bearer eyJhbGciOi.x", True),
        ("r.openai.azure.com", "openai", "Bearer sk-proj-x", False),
        ("not-openrouter.ai", "openai", "Bearer sk-proj-x", True),
    ],
)
def test_a_known_host_gets_the_keys_of_its_owner(host: str, dialect: str, header: str, passes: bool) -> None:
    keys = KeyFilter.of(FAMILIES_BY_NAME[dialect], host)
    assert keys is not None
    assert keys.accepts(key_kind(b"authorization", header.encode()), own=True) is passes


def test_a_login_of_one_api_goes_to_no_other() -> None:
    found: list[bool] = []
    for host in ("vllm.internal", "api.openai.com"):
        keys = KeyFilter.of(OPENAI, host)
        assert keys is not None
        found += [
            keys.accepts(key_kind(b"authorization", it), own=False) for it in (b"Bearer of-vllm", b"Bearer eyJa.b")
        ]
    assert found == [True, False, False, False]


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("accept-language", "sk-SK,sk;q=0.9", None),
        ("x-title", "sk-learn tutor", None),
        ("x-title", f"sk-{SECRET}", "openai"),
        ("x-model", "hf_small", None),
        ("x-own", f"Token hf_{SECRET}", "other"),
        ("x-own", "sk-ant-x", "anthropic"),
        ("x-amzn-oidc-data", f"eyJhbGciOi.{SECRET}", "jwt"),
        ("sec-websocket-protocol", f"realtime, openai-insecure-api-key.{SECRET}", "openai"),
        ("sec-websocket-protocol", "realtime", None),
    ],
)
def test_a_key_is_known_by_its_form_under_any_name(name: str, value: str, found: str | None) -> None:
    assert key_kind(name.encode(), value.encode()) == found


def test_no_key_passes_behind_a_body() -> None:
    asked = HttpRequest()
    asked.chunked, asked.trailers = True, [
        (b"x-own", b"X-Own", f"sk-ant-{SECRET}".encode()), (b"cookie", b"Cookie", b"sk-or-x"), (b"x", b"X", b"1"),
    ]  # fmt: skip
    assert frame_body(asked, b"abc") == b"3\r\nabc\r\n0\r\nX: 1\r\n\r\n"


def test_the_docs_show_the_table() -> None:
    page = (ROOT / "docs" / "dialects.md").read_text()
    rows = [f"| `{row.form}` | {', '.join(one.name for one in row.families)} |\n" for row in OWNERS]
    assert f"| path | families |\n|---|---|\n{''.join(rows)}\n" in page


# A gateway ------------------------------------------------------------------------------------------------------------


class Fake:
    """An upstream that keeps what it was sent."""

    def __init__(self, stack: ExitStack) -> None:
        self.seen: list[str] = []
        seen = self.seen

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                seen.append(f"{self.requestline}\n{self.headers}\n{body.decode()}")
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            do_GET = do_POST

            def log_message(self, format: str, *args: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        self.url = f"http://127.0.0.1:{server.server_port}"


class World(NamedTuple):
    """A gateway and its upstreams, by family."""

    url: str
    fakes: dict[str, Fake]

    def asked(self, call: Drawn, number: int, headers: Sequence[tuple[str, str]] = (), method: str = "POST") -> int:
        """The status of the answer."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=PATIENCE)
        connection.putrequest(method, f"/rollout/o{number}/attempt/a1{call.target}")
        body = b'{"model":"m"}' if method == "POST" else b""
        for name, value in (*call.headers, *headers, ("Content-Length", str(len(body)))):
            connection.putheader(name, value)
        connection.endheaders(body)
        with connection.getresponse() as answer:
            said = answer.read()
        connection.close()
        assert answer.status in (200, 400, 403, 404, 415, 426), said
        assert answer.status == 200 or json.loads(said), "a refusal is in the shape of an API"
        return answer.status

    def taken(self) -> dict[str, list[str]]:
        """What upstreams were sent since this was asked last."""
        found = {name: list(fake.seen) for name, fake in self.fakes.items() if fake.seen}
        for fake in self.fakes.values():
            fake.seen.clear()
        return found


@pytest.fixture(scope="module", params=[FAMILIES, PUBLIC], ids=len)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        fakes = {name: Fake(stack) for name in request.param}
        config = "".join(upstream(f"u-{name}", fake.url, name) for name, fake in fakes.items())
        yield World(stack.enter_context(based(tmp_path_factory.mktemp("owners"), config)).url, fakes)


def test_a_gateway_sends_nothing_astray(world: World) -> None:
    draw = random.Random(40)
    for number in range(150):
        call = Drawn(draw.choice([*PATHS]), draw.choice([*PLACES]), draw.choice([*FORMS]))
        status = world.asked(call, number)
        for name, seen in world.taken().items():
            assert call.may_go(name, False), (call, name)
            assert SECRET not in "".join(seen) or call.may_have(name, False), (call, name)
            assert status == 200


def test_a_websocket_neither(world: World) -> None:
    upgrade = [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13"),
               ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")]  # fmt: skip
    for path in ("/v1/responses", "/v1/realtime", next(path for path in PATHS if path.startswith("/ws/")), ANY):
        for form in FORMS:
            call = Drawn(path, ("Authorization", "Bearer "), form)
            status = world.asked(call, 900, upgrade, "GET")
            for name, seen in world.taken().items():
                assert call.may_go(name, False), (call, name)
                assert SECRET not in "".join(seen) or call.may_have(name, False), (call, name)
                assert status == 200


def sdks(url: str) -> dict[str, Any]:
    """Clients whose calls go to a family, by its name."""
    said: list[Any] = [{"role": "user", "content": "private"}]
    vertex = AnthropicVertex(access_token=f"ya29.{SECRET}", project_id="p", region="us-east5",
                                       base_url=f"{url}/v1", max_retries=0)  # fmt: skip
    bedrock = AnthropicBedrock(api_key=f"ABSK{SECRET}", base_url=url, aws_region="us-east-1", max_retries=0)
    azure = openai.AzureOpenAI(azure_endpoint=url, api_key=SECRET, api_version="2025-04-01-preview", max_retries=0)
    return {
        "vertex": lambda: vertex.messages.create(model="claude-x", max_tokens=9, messages=said),
        "bedrock": lambda: bedrock.messages.create(model="us.anthropic.claude-v1:0", max_tokens=9, messages=said),
        "azure": lambda: azure.chat.completions.create(model="d", messages=said),
    }


@pytest.mark.parametrize("name", ["vertex", "bedrock", "azure"])
def test_official_clients_reach_their_own_provider_or_are_told(world: World, name: str) -> None:
    ask = sdks(f"{world.url}/rollout/sdk/attempt/a1")[name]
    if name in world.fakes:
        ask()
        ((family_, seen),) = world.taken().items()
        assert (family_, len(seen), SECRET in seen[0]) == (name, 1, True)
    else:
        with pytest.raises((anthropic.NotFoundError, openai.NotFoundError)) as caught:
            ask()
        assert f'dialect = "{name}"' in str(caught.value)
        assert world.taken() == {}


@pytest.mark.parametrize("configured", FAMILIES)
@pytest.mark.parametrize("name", ["Authorization", "x-api-key"])
def test_a_key_of_foundry_goes_to_no_public_endpoint(configured: str, name: str) -> None:
    config = GatewayConfig.model_validate(
        {"upstream": [{"name": "own", "base_url": "http://own.internal", "dialect": configured}]}
    )
    routes = RouteTable([], {one.name: ConnectionPool(one) for one in config.upstreams()}, {"own"})
    headers = [(b"anthropic-version", b"anthropic-version", b"2023-06-01"),
               (name.lower().encode(), name.encode(), b"of-nobody-else")]  # fmt: skip
    path = "/anthropic/v1/messages"
    with nullcontext() if configured in PATHS[path] else pytest.raises(ClientFault):
        assert routes.choose("m", find("POST", path), path, headers).pools[0].name == "own"


@pytest.mark.parametrize("key", ["sk-ant-api03-x", "eyJhbGciOi.x"])
async def test_a_key_of_another_provider_is_left_out_where_a_route_leads(within: Within, key: str) -> None:
    async with within(route=[{"model": "policy", "upstream": "up"}]) as made:
        headers = [("Authorization", f"Bearer {key}"), ("X-A", "1")]
        got, seen = await made.passes(made.call(b'{"model":"policy"}', headers, MESSAGES))
        assert (got[:13], key.encode() in seen, b"X-A: 1" in seen) == (b"HTTP/1.1 200 ", False, True)
        assert (await made.span()).attributes == {LEFT_OUT: ["authorization"]}
        assert made.gateway.metrics.credentials_left_out["up",] == 1
        async with made.client() as client:
            client.send(made.call(b'{"model":"m"}', [("Authorization", "Bearer AIzaSyA1")], MESSAGES))
            assert error_of(await client.message(), 403)["message"].startswith("authorization: ")
