"""What is masked, and what must not be."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any
from urllib.parse import quote
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.traffic.calls.call_request import ADDRESS_HEADERS
from penstock.gateway.wire.http import redaction
from penstock.gateway.wire.http.redaction import MASK, Redactor

# fmt: off
SECRET = [
    "Authorization", "PROXY-AUTHORIZATION", "x-api-key", "X-API-Key", "api-key", "x-goog-api-key",
    "Ocp-Apim-Subscription-Key", "cookie", "Set-Cookie", "x-amz-security-token", "X-Amz-Signature",
    "X-Amz-Credential", "x-auth-token", "X-AuthToken", "authtoken", "accessToken", "access_token", "refreshToken",
    "client_secret", "clientSecret", "password", "userPassword", "sig", "jwt", "key", "apikey", "apiKey",
    "x-session-key", "sessionKey", "x-private-key", "x-csrf-token", "private_key",
    "X-Pwd", "X-Pass", "X-Otp", "X-Authz", "X-Session", "X-Csrf", "X-Xsrf", "X-Vendor-Bearer", "x-portkey-config",
    "x-portkey-virtual-key", "auth[key]", "a[key]", "user[password]", "client_assertion", "passphrase", "PHPSESSID",
    "X-PW", "X-MFA-Code", "X-2FA", "X-BYOK", "X-Pin", "X-Sign", "X-Ticket", "x-api-keys", "X-OpenAIKey", "x-user-key",
]
HARMLESS = [
    "content-type", "x-ratelimit-remaining-tokens", "x-ratelimit-limit-tokens", "max_tokens", "idempotency-key",
    "Idempotency-Key", "X-Request-Id", "openai-organization", "traceparent", "sec-websocket-key", "Sec-WebSocket-Key",
    "prompt-cache-key", "www-authenticate", "x-stainless-lang", "monkey", "keyboard", "authority", "tokenizer",
    "date", "signal", "x-session-id", "session_id", "session-id", "thread-id", "x-claude-code-session-id",
    "x-rollout-id", "x-session-affinity", "x-request-id", "x-pass-through", "x-author", "x-compass", "x-assistant",
    "llm.token_count.prompt", "gen_ai.token.type", "gen_ai.usage.input_tokens", "x-design", "x-keypad",
]
# fmt: on


@pytest.mark.parametrize("name", SECRET)
def test_secret_names(name: str) -> None:
    assert redaction.is_secret(name.encode())
    assert redaction.url(f"/v1/x?a=1&{name}=hunter2&b=2") == f"/v1/x?a=1&{name}=***&b=2"


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_names(name: str) -> None:
    assert not redaction.is_secret(name.encode())
    assert Redactor().block([(name.encode(), b"kept")]) == name.encode() + b": kept\r\n"


def test_a_session_of_tools_is_told_by_its_fingerprint() -> None:
    """Whoever has the id has the session."""
    lines = [Redactor().block([(b"Mcp-Session-Id", value)]) for value in (b"s3cret-1", b"s3cret-1", b"s3cret-2")]
    assert lines[0] == lines[1] != lines[2]
    assert all(b"s3cret" not in line for line in lines)


def test_a_block_keeps_order_case_and_repetition() -> None:
    headers = [(b"B", b"1"), (b"Set-Cookie", b"x=1"), (b"a", b""), (b"Set-Cookie", b"y=2"), (b"B", b"2")]
    wanted = b"B: 1\r\nSet-Cookie: ***\r\na: \r\nSet-Cookie: ***\r\nB: 2\r\n"
    redactor = Redactor()
    assert redactor.block(headers) == redactor.block(headers) == wanted


def test_agent_tokens_are_masked_in_any_header() -> None:
    assert Redactor().block([(b"x-note", b"use pst_r1.a-b_C~9, please")]) == b"x-note: use ***, please\r\n"


@pytest.mark.parametrize("key", ["ek_68af296e8e408191a112", "sk-abcdefghijklmnop1", "Ab1~of-my-own-proxy.v2"])
def test_keys_of_browsers_are_masked_in_subprotocols_and_bodies(key: str) -> None:
    offered = (b"Sec-WebSocket-Protocol", f"realtime, openai-insecure-api-key.{key}, beta".encode())
    masked = b"Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.***, beta\r\n"
    assert Redactor().block([offered]) == masked
    known = Redactor().secrets([(offered[0].lower(), *offered)], "/v1/realtime")
    assert known.hide(f'{{"said": "{key}"}}'.encode()) == b'{"said": "%b"}' % (b"*" * len(key))


@pytest.mark.parametrize("end", ["\n", "\\n"])
def test_all_lines_of_a_private_key_are_masked(end: str) -> None:
    lines = ["-----BEGIN RSA PRIVATE KEY-----", "MIIEow", "abcd", "-----END RSA PRIVATE KEY-----"]
    assert redaction.plain_text(f"read {end.join(lines)}, then left") == "read ***, then left"
    assert redaction.attributes({"said": end.join(lines[:3])}) == {"said": "***"}


def test_headers_that_hold_urls_are_masked_as_urls() -> None:
    block = Redactor().block(
        [
            (b"Location", b"https://files.example/a?X-Amz-Signature=abc&part=2"),
            (b"Link", b'<https://a.example/?page=2&sig=abc>; rel="next", <https://b.example/?token=xyz>; rel="last"'),
            (b"Referer", b"https://user:secret@a.example/\xe9"),
        ]
    )
    assert b"abc" not in block
    assert b"xyz" not in block
    assert b"secret" not in block
    assert b"part=2" in block
    assert b"page=2" in block
    assert b"/\xe9" in block


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("/v1/chat", "/v1/chat"),
        ("/v1?key=", "/v1?key=***"),
        ("https://me:pa@ss@host/v1?x=1", "https://***@host/v1?x=1"),
        ("HTTPS://me@host/", "HTTPS://***@host/"),
        ("/v1?mail=a@b.example", "/v1?mail=a@b.example"),
        ("/v1?to=https://h/?token=t&x=1", "/v1?to=https://h/?token=***&x=1"),
        ("/v1?key=ab?cd;ef=1&x=2", "/v1?key=***&x=2"),
        ("/v1?api%5Fkey=1&%6Bey=2&x", "/v1?api%5Fkey=***&%6Bey=***&x"),
        ("/v1?KEY=1;Key=2", "/v1?KEY=***"),
        ("/t/pst_abc.def/v1", "/t/***/v1"),
        ("/cb?code=4/0AX4&state=x", "/cb?code=***&state=x"),
        ("/v1?pwd=x&a[key]=y&a%5Bkey%5D=z&b=1", "/v1?pwd=***&a[key]=***&a%5Bkey%5D=***&b=1"),
        ("/v1?error_code=404&language=en", "/v1?error_code=404&language=en"),
        ("/v1?to=https%3A%2F%2Fh%2F%3Ftoken%3Dt%26x%3D1&y=2", "/v1?to=https%3A%2F%2Fh%2F%3Ftoken%3D***%26x%3D1&y=2"),
        ("/v1?to=h%253Ftoken%253Dt%2526x%253D1", "/v1?to=h%253Ftoken%253D***%2526x%253D1"),
        ("/v1?key=a%26b%3Dc&x=1", "/v1?key=***&x=1"),
        ("/v1?to=https%3A%2F%2Fme%3Apw%40host%2Fa", "/v1?to=https%3A%2F%2F***@host%2Fa"),
        ("https://h/#access_token=abc&x=1", "https://h/#access_token=***&x=1"),
        ("/bot/sk-proj-abcdefghijklmnop/x", "/bot/***/x"),
    ],
)
def test_urls(text: str, wanted: str) -> None:
    assert redaction.url(text) == wanted


# fmt: off
SHAPED = st.one_of(
    st.builds(str.__add__, st.sampled_from([
        "sk-", "sk-ant-api03-", "sk-proj-", "sk_live_", "gsk_", "xai-", "hf_", "ghp_", "github_pat_", "glpat-", "xoxb-",
        "csk-", "lsv2_pt_", "hvs.", "pypi-AgEI", "dckr_pat_", "xapp-1-", "glsa_", "shpat_", "sntrys_", "tgp_v1_",
    ]), st.text("ABCDefgh0123_-", min_size=16, max_size=60)),
    st.builds(str.__add__, st.just("AIza"), st.text("ABCDefgh0123_-", min_size=35, max_size=35)),
    st.builds(str.__add__, st.sampled_from(["AKIA", "ASIA"]), st.text("ABCDEFGH0123", min_size=16, max_size=16)),
    st.builds("eyJ{}.{}.{}".format, *[st.text("ABCDefgh0123_-", min_size=12, max_size=30)] * 3),
    st.builds("{}{}".format, st.sampled_from(["dapi", "jina_", "rpa_", "ntn_", "sbp_"]),
              st.text("abcdef0123", min_size=32, max_size=40)),
    st.builds("SG.{0}.{0}".format, st.text("ABCDefgh0123_-", min_size=22, max_size=43)),
    st.builds("pst_{}".format, st.text("ABCDefgh0123_-", min_size=40, max_size=60)),
)
# fmt: on
NAMES = st.one_of(
    st.sampled_from([*HARMLESS, "X-Anything", "user-agent", "Referer", "X-Original-URL", "X-Forwarded-Uri", "baggage"]),
    st.text("abcdefgXYZ-_", min_size=1, max_size=20),
).filter(lambda name: name != "www-authenticate")


def encoded(text: str, times: int) -> str:
    for _ in range(times):
        text = quote(text, safe="")
    return text


PLACES = [
    "{}", "use {} please", "Bearer {}", "bearer {}", '{{"note":"{}"}}', "a=1,b={};p=1,c=2", "https://h/{}?x=1",
    "/v1?{}=1", "https://me:{}@h/p", "/v1?x={}&y=2", "a {} b",
]  # fmt: skip


@given(NAMES, SHAPED, st.sampled_from(PLACES), st.integers(0, 2))
def test_what_looks_like_a_secret_never_survives(name: str, secret: str, place: str, times: int) -> None:
    value = encoded(place.format(secret), times)
    block = Redactor().block([(name.encode(), value.encode())])
    assert secret.encode() not in block
    assert block.startswith(name.encode() + b": ")
    assert secret not in redaction.url("/v1?to=" + encoded(place.format(secret), times))
    assert secret not in str(redaction.attributes({name: {"a": [value]}}))


VALUES = st.text("abcXYZ019._~-", min_size=8, max_size=30).map(lambda text: "S3CRET" + text)


@given(st.sampled_from([name for name in SECRET if "[" not in name]), VALUES, st.integers(0, 2), st.data())
def test_what_has_a_secret_name_never_survives(name: str, secret: str, times: int, data: st.DataObject) -> None:
    nested = encoded(f"https://h/p?a=1&{name}={secret}&b=2", times)
    inside = data.draw(
        st.sampled_from(
            [
                (b"X-Original-URL", f"/v1?to={nested}&c=3"),
                (b"X-Forwarded-Uri", f"/v1?{encoded(name, times)}={secret}&c=3"),
                (b"x-anything", f"/v1?a[{name}]={secret}"),
                (b"baggage", f"penstock.rollout_id=r1, {name} = {secret};p=1,user.id=7"),
                (b"x-config", f'{{"a":1,"{name}": "{secret}","b":[]}}'),
                (b"x-config", f"{{'a': 1, '{name}': '{secret} {secret}', 'b': []}}"),
                (b"x-settings", f'region=eu; {name}="{secret} {secret}", a=1'),
                (b"x-settings", f"region: eu, {name}: {secret}"),
                (b"tracestate", f"vendor={name}:{secret}"),
                (name.encode(), secret),
            ]
        )
    )
    header = inside[0], inside[1].encode()
    assert secret.encode() not in Redactor().block([header])
    assert secret not in redaction.url(f"https://h/v1?x=1&{encoded(name, times)}={secret}&to={nested}")
    held = {f"http.request.header.{name}": [secret], "url.full": f"https://h/?{name}={secret}"}
    assert secret not in str(redaction.attributes(held))


# fmt: off
KEPT = [
    ("x-request-id", "0f6b6c52-9a37-4b5d-9f6e-2f1a8f0a7a11"), ("X-Request-Id", "req_011CQ2a3b4c5d6e7f8g9h0"),
    ("x-stainless-runtime-version", "3.11.7"), ("x-claude-code-session-id", "8a1b2c3d-1111-2222-3333-444455556666"),
    ("session_id", "0199-aaaa-bbbb-cccc"), ("x-session-id", "ses_5f3a9c"), ("thread-id", "0199aa"),
    ("x-ratelimit-remaining-tokens", "199983"), ("cf-ray", "8e1234567890abcd-FRA"), ("alt-svc", 'h3=":443"; ma=86400'),
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), ("user-agent", "claude-cli/2.1 (a, b)"),
    ("baggage", "penstock.rollout_id=r1,penstock.attempt_id=a1,user.id=7;p=1"), ("anthropic-beta", "a-2025-01-01,b"),
    ("referer", "https://a.example/p?page=2&sort=asc"), ("www-authenticate", 'Bearer realm="api", error="x"'),
    ("content-type", "text/event-stream; charset=utf-8"), ("date", "Sun, 22 Nov 2026 13:38:49 GMT"),
    ("openai-organization", "user-abcdefgh12345678"), ("x-note", "a basic question"), ("etag", 'W/"5f3a9c-sk"'),
    ("x-note", "token by token, then the api key"), ("x-model", "jina_embeddings_v3"), ("x-job", "rpa_nightly_run"),
    ("x-config", "region=eu, tokens: 12; mode='fast'"), ("accept", "text/html;q=0.9, */*;q=0.8"),
    ("nel", '{"report_to":"cf-nel","max_age":604800}'), ("x-model", "ft:gpt-4o-mini:org::AbCdEf12"),
]
# fmt: on


@pytest.mark.parametrize(("name", "value"), KEPT)
def test_what_is_harmless_survives(name: str, value: str) -> None:
    assert Redactor().block([(name.encode(), value.encode())]) == f"{name}: {value}\r\n".encode()


@given(st.uuids(), st.sampled_from(sorted(ADDRESS_HEADERS - {b"baggage"})))
def test_sessions_survive_that_calls_are_found_by(session: UUID, name: bytes) -> None:
    assert Redactor().block([(name, str(session).encode())]) == name + b": %b\r\n" % str(session).encode()


@pytest.mark.parametrize("value", ["Token {}", "ApiKey {}", "api-key {}", "Bearer: {}"])
def test_a_scheme_hides_what_follows_it(value: str) -> None:
    secret = "0a1b2c3d4e5f60718293a4b5c6d7e8f9"
    assert Redactor().block([(b"x-anything", value.format(secret).encode())]) == b"x-anything: ***\r\n"


def test_what_was_said_survives_in_attributes() -> None:
    said = {"gen_ai.input.messages": "what? set key=1 & code=2, then api_key=x", "llm.token_count.prompt": "12", "n": 3}
    assert redaction.attributes(said) == said


# fmt: off
DATA = [
    ("prompt_token_ids", ["1", "2"]), ("link.0.key_match", "span_id"), ("messaging.kafka.message.key", "order-4711-eu"),
    ("idempotency_key", "8f14e45f-ceea-467f-a9c1-7c3b1f2d9e10"), ("eos_token", "<|end_of_text|>"), ("key", "reward-1"),
    ("gen_ai.usage.input_tokens", "120"), ("gen_ai.usage.cache_read.input_tokens", 5), ("llm.token_count.prompt", 7),
    ("gen_ai.token.type", "input"), ("gen_ai.token.modality", "text"), ("token", "Hello"), ("cache.key", "user:12:x"),
    ("special_tokens", ["<|reserved_special_token_250|>"]), ("next_page_token", "CAUQAA"), ("signature", "EqQBCkYIBh"),
    ("token", "<|reserved_special_token_250|>"), ("api_key_env", "OPENAI_API_KEY"), ("db.key", "id"), ("author", "Ann"),
    ("k8s.secret.name", "openai"), ("auth.method", "bearer"), ("has_password", True), ("primaryKey", "customer_id"),
    ("code", "print(1)"), ("session.id", "0f6b6c52-9a37-4b5d-9f6e-2f1a8f0a7a11"), ("pin", "A7"), ("sort_key", "name"),
    ("http.request.header.x-ratelimit-remaining-tokens", ["99"]), ("url.full", "https://h/p?page=2"), ("pass", "yes"),
    ("process.command_args", ["--no-password", "x", "--api-key", "--n=1", "--password-file", "/p", "--max-tokens=8"]),
    ("env", "PATH=/usr/bin1:/b HF_TOKEN=$HF1 API_KEY=your-key-here MAX_TOKENS=4096k1234"), ("session_tokens", "120"),
    ("body", '{"max_tokens": "10", "key": "user:12", "said": "{\\"password\\": \\"x\\"}"}'), ("a", ["id=1", "a=b"]),
    ("exception.message", "see https://h:8080/a and mail me@h"), ("llm.logit_bias", '{"50256": -100}'),
]
CREDENTIALS = [
    "authorization", "Authorization", "proxy-authorization", "x-api-key", "X-API-Key", "api_key", "apikey", "cookie",
    "openaiApiKey", "OPENAI_API_KEY", "llm.api_key", "password", "db.password", "userPassword", "client_secret",
    "clientSecret", "webhook.secret", "access_token", "refreshToken", "id_token", "aws.session_token", "set-cookie",
    "private_key", "aws_secret_access_key", "secretKey", "credentials", "x-auth-token", "bearer_token", "signing-key",
    "http.request.header.x-vendor-key", "http.response.header.set-cookie", "rpc.grpc.request.metadata.x-token",
    "passphrase", "otp", "client_assertion", "authorization_code", "refresh_tokens", "cookies", "api_key_value",
    "github_token", "csrf-token", "http.request.header.authorization", "Ocp-Apim-Subscription-Key",
]
# fmt: on


@pytest.mark.parametrize(("name", "value"), DATA)
def test_data_of_attributes_stays(name: str, value: Any) -> None:
    assert redaction.attributes({name: value, "in": {name: value}}) == {name: value, "in": {name: value}}


FORMS: list[Callable[[str], Any]] = [
    lambda text: text, lambda text: [text], lambda text: {"value": text}, lambda text: [{"a": [text], "n": 1}],
]  # fmt: skip


@given(
    st.sampled_from(CREDENTIALS), st.text(min_size=1), st.sampled_from(["", "otel.", "a.b-c."]), st.sampled_from(FORMS)
)
def test_values_of_credentials_go(name: str, secret: str, before: str, form: Callable[[str], Any]) -> None:
    """Whatever the value looks like, and however deep it is."""
    name = name if "header." in name or "metadata." in name else before + name
    assert redaction.attributes({"n": {name: form(secret)}}) == {"n": {name: form("***")}}


@given(SHAPED, st.sampled_from(DATA), st.sampled_from(PLACES))
def test_a_secret_under_a_name_of_data_goes(secret: str, kept: tuple[str, Any], place: str) -> None:
    assert secret not in str(redaction.attributes({kept[0]: [place.format(secret)]}))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("cannot reach postgres://me:pw%40d@db:5432/x, again", "cannot reach postgres://me:***@db:5432/x, again"),
        ("('amqp://:pw@q/', 1)", "('amqp://:***@q/', 1)"),
        ("at https://h:80/ or http://h/a:b@c", "at https://h:80/ or http://h/a:b@c"),
    ],
)
def test_passwords_of_urls_in_texts_go(text: str, wanted: str) -> None:
    assert redaction.plain_text(text) == redaction.attributes({"a": text})["a"] == wanted


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("PATH=/b OPENAI_API_KEY=abc123def GITHUB_TOKEN='0a1b2c3d4e'", "PATH=/b OPENAI_API_KEY=*** GITHUB_TOKEN='***'"),
        (["run", "--api-key", "abc", "-v"], ["run", "--api-key", "***", "-v"]),
        (["--password=a b", "DB_PASSWORD=x", "--n=1"], ["--password=***", "DB_PASSWORD=***", "--n=1"]),
        ('{"Authorization": "Token a\\"bc", "n": "1"}', '{"Authorization": "***", "n": "1"}'),
        ('[{"apiKey":"abc"}]', '[{"apiKey":"***"}]'),
    ],
)
def test_credentials_in_environments_commands_and_json(value: Any, wanted: Any) -> None:
    assert redaction.attributes({"a": value}) == {"a": wanted}


def test_settings_of_connections_lose_their_keys() -> None:
    said = {"db.connection_string": "Server=h;User=me;Password=p!w;Timeout=5", "dsn": "host=h password='a b' x=1"}
    kept = {"db.connection_string": "Server=h;User=me;Password=***;Timeout=5", "dsn": "host=h password='***' x=1"}
    assert redaction.attributes(said) == kept
    assert redaction.attributes({"a.dsn": "postgresql://me:p@h/d?x=1"}) == {"a.dsn": "postgresql://***@h/d?x=1"}


def test_a_long_token_under_its_bare_name_goes() -> None:
    assert redaction.attributes({"token": "0a1b2c3d4e5f60718293", "x.token": "s3cr3tS3CR3Ts3cr3t"}) == {
        "token": "***", "x.token": "***",
    }  # fmt: skip


@given(st.text(alphabet=st.characters(codec="latin-1"), max_size=60))
def test_masking_twice_is_masking_once(text: str) -> None:
    once = redaction.url("/v1?" + text)
    assert redaction.url(once) == once


@given(st.text(alphabet="abc=&?#;%/@:", max_size=20), st.text(alphabet="abc=&;%/@:", max_size=20))
def test_a_key_never_shows(before: str, after: str) -> None:
    assert "S3CRET" not in redaction.url(f"/v1?{before}&api_key=S3CRET&{after}")


def test_what_is_remembered_is_bounded() -> None:
    redactor = Redactor()
    for number in range(9000):
        assert redactor.block([(b"x-%d" % number, b"1")]) == b"x-%d: 1\r\n" % number
    assert redactor.block([(b"x-api-key", b"1")]) == b"x-api-key: " + MASK + b"\r\n"


@pytest.mark.parametrize(
    "piece", ["eyJ-", "a.", "\\", '"a', "x ", "bearer ", "a=%25", "sk-", "-----BEGIN", "https%3A%2F%2Fa", "&a", '"a":']
)
def test_the_time_grows_with_the_length(piece: str) -> None:
    """A header of 200 KB: a pattern that looks at every end from every start would take minutes, and be killed."""
    value = (piece * 200_000)[:200_000].encode()
    assert Redactor().block([(b"x-long", b"@?" + value)])
    assert redaction.url("/v1?@" + value.decode())


def test_a_line_that_is_long_only_as_it_came_is_not_kept() -> None:
    """An upstream could fill the memory with them."""
    redactor = Redactor()
    tracemalloc.start()
    for number in range(100):
        padded = b"X: %b%d" % (b" " * 100_000, number)
        assert redactor.head_block(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n" % padded) == b"X: %d\r\n" % number
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1_000_000
