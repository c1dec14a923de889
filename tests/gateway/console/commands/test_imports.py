"""`penstock import`: what others have recorded gets on the tape, once; what is odd is said, whatever it is."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import zstandard
from aiohttp import web
from fakes.goldens import check_text
from fakes.shell import Shell
from fakes.worlds import STUBS
from google.protobuf.json_format import ParseDict
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock.console.commands import imports
from penstock.console.commands.import_agl import agl_attempts
from penstock.console.commands.import_langfuse import langfuse_attempts
from penstock.console.commands.import_litellm import convert, yaml_of
from penstock.console.commands.import_otlp import otlp_attempts, otlp_records
from penstock.console.commands.import_rollouts import ImportedAttempt, ImportReport, Record, messages, selection
from penstock.gateway.client.client import Client
from penstock.gateway.client.console import CommandError
from penstock.gateway.config import load
from penstock.gateway.followers.otlp.signals import JSON, TRACES, items, tree_of
from penstock.gateway.followers.otlp.span_import import entry_of
from penstock.gateway.model.rollout import Judgement, Reward
from penstock.gateway.model.span import Span

ROLLOUT_10 = "11112222333344445555666677778888"
ATTRIBUTES = {"gen_ai.request.model": "qwen", "gen_ai.usage.prompt_tokens": 12, "gen_ai.usage.completion_tokens": 5}
TIMES = {"start_time": 1785578400.5, "end_time": 1785578401.5}


def span_03(number: int, parent: int | None, **attributes: Any) -> dict[str, Any]:
    """A span as Agent Lightning 0.3 stores it."""
    ids = {"rollout_id": "ro-1", "attempt_id": "at-1", "sequence_id": number, "trace_id": "ab" * 16}
    ids |= {"span_id": f"{number:016x}", "parent_id": None if parent is None else f"{parent:016x}"}
    link: dict[str, Any] = {
        "context": {"trace_id": "cd" * 16, "span_id": "ef" * 8, "is_remote": False, "trace_state": {}}
    }
    parts: dict[str, Any] = {
        "events": [{"name": "retry", "attributes": {"n": 1}, "timestamp": 1785578401.0}],
        "links": [link],
    }
    resource = {"attributes": {"service.name": "agent"}, "schema_url": ""}
    status = {"status_code": "ERROR", "description": "late"} if number == 1 else {"status_code": "UNSET"}
    about = {"name": "openai.chat.completion", "attributes": attributes, "status": status, "resource": resource}
    return {**ids, **about, **parts, **TIMES, "context": None, "parent": None, "worker": 7}


SPANS_03 = [
    span_03(1, None, x=1),
    span_03(2, 1, **ATTRIBUTES),
    span_03(3, None, **{"agentlightning.reward.0.value": 0.5}),
]
ATTEMPT_03 = {"rollout_id": "ro-1", "attempt_id": "at-1", "sequence_id": 1, "status": "failed", **TIMES}
AGL_03: dict[str, Any] = {
    "rollouts": [
        {"rollout_id": "ro-1", "input": {"q": "?"}, "mode": "train", "status": "failed", "config": {}, **TIMES},
        {"rollout_id": "ro-2", "input": "waits", "status": "queuing", "config": {}, "start_time": 1785578400.0},
    ],
    "attempts": [ATTEMPT_03],
    "spans": SPANS_03,
}


def stub(name: str) -> Any:
    """A file that pages of the documentation import, whole or its first line."""
    content = (STUBS / name).read_bytes()
    return json.loads(content if name != "spans.json" else content.splitlines()[0])


async def found(client: Client, rollout: str) -> list[Span]:
    return [span async for span in client.spans(rollout)]


@pytest.mark.slow
async def test_traces_of_langfuse_are_rollouts(shell: Shell, client: Client) -> None:
    for new in (4, 0):
        done = await shell.run("import", "langfuse", str(STUBS / "langfuse.json"))
        assert (done.code, done.text) == (
            0, f"1 rollout: 4 spans, {new} of them new, 1 model call, 2 rewards, 2 left out\n"
        )  # fmt: skip
        assert "langfuse.json[0].observations[3]: it is neither" in done.err
        assert done.err.endswith("penstock doctor langfuse-t1\n")
    root, plan, answer, tool, *rewards = await found(client, "langfuse-t1")
    assert [span.parent_id for span in (plan, answer, tool)] == [root.span_id, plan.span_id, plan.span_id]
    said = answer.attributes or {}
    assert [said[f"gen_ai.usage.{name}"] for name in ("input_tokens", "output_tokens", "cost")] == [100, 7, 0.002]
    assert json.loads(said["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "12A"}]}
    ]
    assert (tool.status, (tool.attributes or {})["gen_ai.tool.name"]) == ("error", "seats")
    assert [(one.value, one.dimensions, one.span) for one in map(Reward.of, rewards)] == [
        (1.0, {}, None), (None, {"tone": 0.5}, answer.sequence),
    ]  # fmt: skip
    totals = (await client.rollout("langfuse-t1")).totals
    assert (totals.told, totals.input_tokens, totals.cost) == (1, 100, 0.002)
    verdict = (await client.diagnosis("langfuse-t1")).verdict
    assert "no calls but 1 in telemetry" in verdict


@pytest.mark.slow
async def test_both_versions_of_agent_lightning_are_read_from_files(shell: Shell, client: Client) -> None:
    (shell.folder / "03.json").write_text(json.dumps(AGL_03))
    old = await shell.run("import", "agl", "03.json")
    assert old.text == "1 rollout: 4 spans, 4 of them new, 1 model call, 1 reward, 1 left out\n"
    assert "03.json.rollouts[1]: the rollout has no attempt" in old.err
    root, first, second, _, reward = await found(client, "ro-1")
    assert (root.attempt, root.error, (root.attributes or {})["input.value"]) == ("at-1", "otel", '{"q":"?"}')
    said = first.attributes or {}
    assert (first.trace_id, first.span_id, first.status) == ("ab" * 16, f"{1:016x}", "error")
    assert said["otel.events"] == [{"name": "retry", "time_ns": 1785578401 * 10**9, "attributes": {"n": 1}}]
    assert said["otel.links"] == [{"trace_id": "cd" * 16, "span_id": "ef" * 8, "attributes": {}}]
    assert (said["otel.resource"], said["agentlightning.extra"]) == ({"service.name": "agent"}, '{"worker":7}')
    assert (first.parent_id, second.parent_id, Reward.of(reward).value) == (root.span_id, first.span_id, 0.5)

    new = await shell.run("import", "agl", str(STUBS / "agl.json"))
    assert new.text == "1 rollout: 2 spans, 2 of them new, 1 model call, 1 reward, 0 left out\n"
    _, call, reward = await found(client, ROLLOUT_10)
    said = call.attributes or {}
    assert (call.name, call.duration_ns, said["agentlightning.model_version"]) == ("chat qwen", 800_000_000, 4)
    assert (said["gen_ai.usage.input_tokens"], Reward.of(reward).reason) == (9, "exact")


@pytest.mark.slow
async def test_servers_are_read_page_by_page(shell: Shell, client: Client) -> None:
    many = [span_03(number, None, x=number) for number in range(1, 702)]
    old: dict[str, Any] = {"/v1/agl/rollouts": AGL_03["rollouts"][:1], "/v1/agl/spans": many}
    async with serving(old | {"/v1/agl/rollouts/ro-1/attempts": [ATTEMPT_03]}) as url:
        done = await shell.run("import", "agl", f"{url}/")
        assert done.text.startswith("1 rollout: 702 spans, 702 of them new")
    made = stub("agl.json")
    ended = [{"rollout_id": ROLLOUT_10, "state": "succeeded"}]
    new: dict[str, Any] = {
        "/api/rollouts/terminal": {"items": ended, "next_after": 1},
        f"/api/rollouts/{ROLLOUT_10}": {"rollout": made["rollouts"][0], "attempts": ["0"]},
        f"/api/rollouts/{ROLLOUT_10}/events": made["events"],
    }
    async with serving(new, "Bearer of-agl") as url:
        refused = await shell.run("import", "agl", url, AGL_KEY="wrong-key")
        assert refused.code == 1
        assert "AGL_KEY has the key" in refused.err
        assert "wrong-key" not in refused.err
        assert (await shell.run("import", "agl", url, AGL_KEY="of-agl")).text.startswith("1 rollout: 2 spans")
    (trace,) = stub("langfuse.json")
    pages: dict[str, Any] = {
        "/api/public/traces": {"data": [{**trace, "observations": ["o1"], "scores": []}]},
        "/api/public/traces/t1": trace,
    }
    async with serving(pages, "Basic cGs6c2s=") as url:
        assert "set LANGFUSE_PUBLIC_KEY" in (await shell.run("import", "langfuse", url)).err
        done = await shell.run("import", "langfuse", url, LANGFUSE_PUBLIC_KEY="pk", LANGFUSE_SECRET_KEY="sk")
        assert done.text.startswith("1 rollout: 4 spans, 4 of them")
        assert "is no server of Agent Lightning" in (await shell.run("import", "agl", url, AGL_KEY="x")).err
    assert [rollout.id async for rollout in client.rollouts()] == ["langfuse-t1", ROLLOUT_10, "ro-1"]


@asynccontextmanager
async def serving(answers: dict[str, Any], login: str | None = None) -> AsyncGenerator[str]:
    """A server that answers JSON, below `/v1/agl` pages of lists; 404 elsewhere, 401 without this `Authorization`."""

    async def answer(request: web.Request) -> web.Response:
        if request.path not in answers:
            return web.Response(status=404)
        if login not in (None, request.headers.get("Authorization")):
            return web.Response(status=401)
        said = answers[request.path]
        if request.path.startswith("/v1/agl"):
            at = int(request.query["offset"])
            said = {"items": said[at : at + int(request.query["limit"])]}
        return web.json_response(said)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.slow
async def test_files_of_a_collector_are_read(shell: Shell, client: Client) -> None:
    done = await shell.run("import", "otlp-file", str(STUBS / "spans.json"))
    assert done.text == "1 rollout: 1 span, 1 of them new, 1 model call, 0 rewards, 1 left out\n"
    (span,) = await found(client, "otlp-5b8efff798038103d269b633813fc60c")
    said = span.attributes or {}
    assert (said["otel.resource"], said["otel.scope.name"]) == ({"service.name": "flights"}, "my.agent")
    assert (said["span.kind"], span.name, span.span_id) == ("client", "chat gpt-5-mini", "eee19b7ec3c1b174")
    nothing = await shell.run("import", "otlp-file", "penstock.toml")
    assert (nothing.code, nothing.err) == (1, "penstock: penstock.toml: No such file or directory\n")


def attempts_in(content: bytes) -> list[ImportedAttempt]:
    report = ImportReport()
    made = list(otlp_attempts(otlp_records(content, "file", report), report))
    assert not report.left_out
    return made


def test_all_forms_of_a_collectors_file_say_the_same() -> None:
    request = stub("spans.json")
    span = request["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    span["attributes"] += [
        {"key": "list", "value": {"arrayValue": {"values": [{"boolValue": True}, {"doubleValue": 1.5}]}}},
        {"key": "map", "value": {"kvlistValue": {"values": [{"key": "b", "value": {"bytesValue": "aGk="}}]}}},
    ]
    span["links"] = [{"traceId": "ab" * 16, "spanId": "cd" * 8}]
    text = json.dumps(request).encode()
    binary = deepcopy(request)
    inner = binary["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    for one in (inner, inner["links"][0]):
        one |= {name: base64_of(one[name]) for name in ("traceId", "spanId", "parentSpanId") if name in one}
    proto = ParseDict(binary, ExportTraceServiceRequest()).SerializeToString()
    wanted = attempts_in(text)
    assert wanted[0].spans[0].attributes["list"] == [True, 1.5]
    packed = zstandard.ZstdCompressor().compress
    forms = [proto, framed(proto), framed(packed(proto)), framed(packed(text)), packed(text)]
    assert all(attempts_in(form) == wanted for form in forms)
    twice = otlp_attempts(otlp_records(framed(proto) + framed(proto), "file", ImportReport()), ImportReport())
    assert [len(one.spans) for one in twice] == [2]


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(4) + message


def base64_of(hexadecimal: str) -> str:
    from base64 import b64encode

    return b64encode(bytes.fromhex(hexadecimal)).decode()


@pytest.mark.slow
async def test_files_that_cannot_be_read_are_refused_by_name(shell: Shell) -> None:
    files = {
        "cut.json": b'{"rollouts": [', "cut.gz": gzip.compress(b"{}" * 999)[:-4], "odd.gz": b"\x1f\x8bnothing",
        "odd.pb": b"\x00\x00\x00\x04abcd", "empty": b"",
    }  # fmt: skip
    for name, content in files.items():
        (shell.folder / name).write_bytes(content)
        done = await shell.run("import", "otlp-file", name)
        assert (done.code, done.text, name in done.err) == (1, "", True), done.err
    (shell.folder / "lines.json").write_text('{"event_type": 7}\n{\n[]\n')
    done = await shell.run("import", "agl", "lines.json")
    assert (done.code, done.text) == (1, "0 rollouts: 0 spans, 0 of them new, 0 model calls, 0 rewards, 3 left out\n")
    assert "lines.json:1: rollout_id is missing" in done.err


# Whatever is in a record ----------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[Any, Callable[[Iterable[Record], ImportReport], Iterator[ImportedAttempt]]]] = {
    "agl 0.3": (AGL_03, agl_attempts),
    "agl 1.0": (stub("agl.json"), agl_attempts),
    "langfuse": (stub("langfuse.json")[0], lambda records, report: langfuse_attempts(records, report, "reward")),
    "otlp": (stub("spans.json"), otlp_attempts),
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20).filter(str.isascii)
    | st.sampled_from([2**64, -1, 1e300, "é\u0000", "00" * 16, "NaN"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "text", "é", ""]), inner),
    max_leaves=6,
)  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All (container, key) in a JSON value."""
    keys = (
        list(cast(Any, value))
        if isinstance(value, dict)
        else list(range(len(cast(Any, value) if isinstance(value, list) else ())))
    )
    for key in keys:
        yield value, key
        yield from places(value[key])


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_an_odd_record_is_reported_and_what_is_sent_is_taken(kind: str, data: st.DataObject) -> None:
    whole, make = KINDS[kind]
    record = deepcopy(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        spots = list(places(record))
        container, key = spots[data.draw(st.integers(0, len(spots) - 1))]
        if isinstance(container, dict) and data.draw(st.booleans()):
            del container[key]
        else:
            container[key] = data.draw(VALUES)
        if not list(places(record)):
            break
    report = ImportReport()
    made = list(make([Record("here", record)], report))
    assert made or report.left_out or not list(places(record)) or kind == "otlp"
    for one in made:
        for span in one.spans:
            sent = {"resourceSpans": [{"scopeSpans": [{"spans": [imports.otlp_span(span, one.rollout, one.attempt)]}]}]}
            (message,) = (
                it.message for it in items(TRACES, tree_of(TRACES, JSON, msgspec.json.encode(sent))) if it.message
            )
            assert entry_of(message, {}, {}).span_id == span.span_id
        for reward in one.rewards:
            assert Judgement(value=reward.value, dimensions=dict(reward.dimensions), key=reward.key)


def test_of_a_long_conversation_the_last_messages_are_kept() -> None:
    talk = [{"role": "user", "content": f"{number} {'x' * 500}"} for number in range(100)]
    found = cast(dict[str, Any], messages("gen_ai.input.messages", talk, "user"))
    kept = json.loads(found["gen_ai.input.messages"])
    assert kept[-1]["parts"][0]["content"].startswith("99 ")
    assert found["penstock.import.gen_ai.input.messages.left_out"] == 100 - len(kept) > 0
    asked = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}]}
    answer = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    said = json.loads(str(messages("m", [asked, answer, "text"], "user")["m"]))
    assert [part["type"] for one in said for part in one["parts"]] == ["tool_call", "tool_call_response", "text"]


def test_a_selection_finds_what_was_imported() -> None:
    assert selection(["a", "b"]) == "a b"
    assert selection([f"ro-{number}" for number in range(4)]) == "'rollout:ro-*'"


# LiteLLM --------------------------------------------------------------------------------------------------------------

SECRETS = ("sk-of-azure", "sk-of-the-proxy", "of-redis")


@pytest.mark.slow
async def test_a_configuration_of_litellm_becomes_one_of_ours(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    done = await shell.run("import", "litellm-config", str(STUBS / "litellm.yaml"), "--output", "made.toml")
    assert (done.code, done.text) == (0, "")
    text = (shell.folder / "made.toml").read_text()
    assert not [secret for secret in SECRETS if secret in text + done.err]
    check_text("litellm-config.txt", text)
    config = load(shell.folder / "made.toml")
    assert config.route[0].shares == {"openai": 3, "azure": 1}
    assert [(one.name, one.window) for one in config.budget] == [("claude", "30d"), ("litellm", "month")]
    again = await shell.run("import", "litellm-config", str(STUBS / "litellm.yaml"), "--output", "made.toml")
    assert (again.code, "made.toml is there already" in again.err) == (1, True)


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system [true]",
        "[" * 5000,
        "a: &a [x]\nb: [" + "*a," * 1001 + "]",
        "api_key: sk-secret\n\tbad",
        "- a list",
        "a: 2026-99-99",
        "",
    ],
)
def test_hostile_yaml_is_refused_without_its_text(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "config.yaml").write_text(text)
    with pytest.raises(CommandError) as refused:
        yaml_of(file)
    assert "config.yaml" in str(refused.value)
    assert "sk-secret" not in str(refused.value)


@given(data=st.data())
def test_an_odd_configuration_is_noted(data: st.DataObject) -> None:
    yaml: Any = pytest.importorskip("yaml")
    config = yaml.safe_load((STUBS / "litellm.yaml").read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        spots = list(places(config)) or [(config, "model_list")]
        container, key = spots[data.draw(st.integers(0, len(spots) - 1))]
        container[key] = data.draw(VALUES)
    made = convert(config, {})
    made.check(made.toml("config.yaml"))
    assert made.routes or made.notes


@pytest.mark.slow
async def test_nothing_is_imported_where_nobody_listens(shell: Shell) -> None:
    shell.env["PENSTOCK_GATEWAY"] = "http://127.0.0.1:9"
    done = await shell.run("import", "agl", str(STUBS / "agl.json"))
    assert done.code == 1
    assert "cannot reach the gateway" in done.err
