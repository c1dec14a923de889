"""The tools that read, called by the official SDK's client, against a gateway with a release under way."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from fakes.mcp_client import answered, beside, connected, refused
from fakes.mcp_wire import Client as ToolClient
from fakes.mcp_wire import call, config, mcp_server
from fakes.mistakes import tells
from fakes.ports import steady_ports
from fakes.process import Gateway, running, upstreams, write_config
from fakes.worlds import world
from mcp.client.client import Client

from penstock.gateway.client.client import Client as ControlClient
from penstock.gateway.model.rollout import Judgement

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "an-admin-key-that-nobody-may-see"
NOWHERE = upstreams(openai="http://127.0.0.1:9/v1")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[str]:
    """A gateway with a release under way, a call that offered tools (`t`) and a long talk (`long`)."""
    async with world("canary", tmp_path_factory.mktemp("world")) as here:
        made = f"http://127.0.0.1:{here.ports[4747]}"
        offered: list[Any] = [
            {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "book")
        ]
        await post(f"{made}/rollout/t/attempt/a1/v1/chat/completions", [], tools=offered)
        talk = [{"role": "user", "content": f"{number} " + "word " * 2000} for number in range(12)]
        for messages in (talk[:6], talk):
            await post(f"{made}/rollout/long/attempt/a1/v1/chat/completions", messages)
        for rollout in ("t", "long"):
            await kept(made, rollout)
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def client(url: str) -> AsyncGenerator[Client]:
    async with beside(url) as made:
        yield made


async def kept(url: str, rollout: str) -> None:
    """When a reward is answered, every earlier call is durable."""
    async with ControlClient(url) as gateway:
        _ = await gateway.reward(rollout, "a1", Judgement(value=1))


async def post(url: str, messages: list[dict[str, str]], **more: Any) -> None:
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json={"model": "policy", "messages": messages} | more) as answer,
    ):
        assert answer.status == 200


async def test_rollouts_are_listed_and_searched(client: Client) -> None:
    few, text = await answered(client, "list_rollouts", filter="rollout:q*", limit=3)
    assert [one["id"] for one in few["rollouts"]] == ["q2.1", "q2.0", "q1.1"]
    assert few["rollouts"][0] | {"created": ""} == {
        "id": "q2.1", "status": "succeeded", "mode": "train", "group": "q2", "reward": 0.25, "attempts": 1,
        "calls": 2, "errors": 0, "input_tokens": 72, "output_tokens": 10, "unpriced": 2, "tool_calls": 0, "created": "",
        "task": '{"id":"q2","question":"When does it leave?"}',
    }  # fmt: skip
    assert f"cursor={few['next']!r} goes on" in text
    more, _ = await answered(client, "list_rollouts", filter="rollout:q*", limit=100, cursor=few["next"])
    assert ([one["id"] for one in more["rollouts"]], "next" in more) == (["q1.0"], False)
    every, _ = await answered(client, "list_rollouts", limit=100)
    assert [one["id"] for one in every["rollouts"][:3]] == ["long", "t", "c7"]
    assert (len(every["rollouts"]), "next" in every) == (39, False)
    bad, _ = await answered(client, "list_rollouts", filter="reward<0.5 group:q1")
    assert [one["id"] for one in bad["rollouts"]] == ["q1.1"]
    none, said = await answered(client, "list_rollouts", filter="model:nothing*")
    assert (none, said) == ({"rollouts": []}, "No rollout matches 'model:nothing*'.")
    spans, lines = await answered(client, "list_spans", rollout="q1.0")
    assert [(one["kind"], one["sequence"]) for one in spans["spans"]] == [("llm", 1), ("llm", 2), ("reward", 3)]
    assert spans["spans"][2]["says"] == "1 by user"
    assert lines.splitlines()[0].startswith("q1.0/a1 #1  chat  policy  ok")
    newest, _ = await answered(client, "list_spans", filter="kind:reward", limit=2)
    assert [one["rollout"] for one in newest["spans"]] == ["long", "t"]


async def test_what_was_said_is_read(client: Client) -> None:
    told, text = await answered(client, "read_transcript", rollout="q1.0")
    first, second, reward = told["spans"]
    assert [one["role"] for one in first["messages"]] == ["system", "user"]
    assert first["answers"] == [{"role": "assistant", "text": "You said: Where is the luggage?"}]
    assert (second["repeated"], second["messages"]) == (3, [{"role": "user", "text": "Thank you."}])
    assert reward["line"] == "#3  reward  1  by user"
    assert "→ answer: You said: Thank you." in text
    assert "\n  Customer: Ann\n" in text, "a line within a message is indented"
    rest, _ = await answered(client, "read_transcript", rollout="q1.0", from_sequence=2)
    assert rest["spans"] == told["spans"][1:]
    whole, _ = await answered(client, "read_call", rollout="q1.0", sequence=2)
    assert whole["text"].endswith("\nuser: Thank you.\n→ answer (stop): You said: Thank you.")
    answer, _ = await answered(client, "read_call", rollout="q1.0", sequence=2, what="answer")
    assert answer["text"] == "→ answer (stop): You said: Thank you."
    _, tools = await answered(client, "read_call", rollout="q1.0", sequence=2, what="tools")
    assert "no tools" in tools
    with_tools, text = await answered(client, "read_transcript", rollout="t")
    assert with_tools["spans"][0]["tools"] == ["look", "book"]
    assert "\ntools: look, book\n" in text
    found, said = await answered(client, "diagnose_rollout", rollout="q1.0")
    assert (found["trainable"], found["findings"][0]["code"]) == (False, "no_token_ids")
    assert found["findings"][0]["places"] == ["a1#1", "a1#2"]
    assert "way out: set train = true" in said


async def test_long_texts_come_in_pieces(client: Client) -> None:
    told, text = await answered(client, "read_transcript", rollout="long", max_characters=2000)
    assert len(text) < 4000
    assert [one["sequence"] for one in told["spans"]] == [1]
    assert told["spans"][0]["left_out"] > 0
    assert told["next_sequence"] == 2, text
    assert "from_sequence=2 goes on" in text
    pieces, offset, characters = list[str](), 0, 0
    while offset is not None:
        call, said = await answered(
            client, "read_call", rollout="long", sequence=2, offset=offset, max_characters=20_000
        )
        assert len(said) < 21_000
        pieces.append(call["text"])
        offset, characters = call.get("next_offset"), call["characters"]
    assert len("".join(pieces)) == characters > 120_000
    assert "".join(pieces).count("word") >= 24_000


@pytest.mark.slow
async def test_tools_behind_the_gateway_are_read(tmp_path: Path) -> None:
    async with (
        mcp_server() as server,
        aiohttp.ClientSession() as http,
        running(tmp_path, config(server)) as gateway,
        beside(gateway.url) as client,
    ):
        agent = ToolClient(f"{gateway.address('r1')}/mcp/tools", http, {})
        await agent.open()
        for id in (7, 8):
            _ = await agent.say(call("echo", {"text": "hello"}, id))
        await kept(gateway.url, "r1")
        rows, _ = await answered(client, "list_spans", rollout="r1", filter="kind:tool")
        assert [row["kind"] for row in rows["spans"]] == ["tool", "tool"]
        told, text = await answered(client, "read_transcript", rollout="r1")
        calls = [one for one in told["spans"] if one["sequence"] in {row["sequence"] for row in rows["spans"]}]
        assert [one["repeated"] for one in calls] == [0, 0], text
        assert all("hello" in one["messages"][0]["text"] for one in calls), text
        assert all("hello" in one["answers"][0]["text"] for one in calls), text


async def test_versions_and_releases_are_read(client: Client) -> None:
    every, _ = await answered(client, "list_resources")
    assert every["resources"] == [
        {"name": "planner", "kind": "prompt", "stable": "v1", "newest": "v2", "versions": 2,
         "live_releases": ["planner-1"]}
    ]  # fmt: skip
    one, _ = await answered(client, "list_resources", name="planner")
    assert [row["version"] for row in one["versions"]] == ["v1", "v2"]
    stable, _ = await answered(client, "read_version", name="planner")
    assert (stable["version"], stable["stable"], stable["slots"]) == ("v1", True, ["customer", "date"])
    assert "Customer: {customer}" in stable["text"]
    piece, _ = await answered(client, "read_version", name="planner", version="v2", offset=10, max_characters=500)
    assert piece["text"].startswith("careful travel agent")
    diff, _ = await answered(client, "diff_versions", name="planner", one="v1", other="v2")
    assert "+You are a careful travel agent" in diff["diff"]
    compared, text = await answered(client, "compare_versions", name="planner", one="v1", other="v2")
    assert sum(side["rollouts"] for side in compared["versions"]) == 8
    assert tells(compared["verdict"], "Too little to tell", "10 rewarded rollouts of each version")
    assert text.startswith(compared["verdict"])
    told, text = await answered(client, "read_transcript", rollout="c7")
    served = told["spans"][0]["versions"]["planner"]
    assert f"served by planner@{served}\n" in text
    releases, _ = await answered(client, "list_releases", live=True)
    assert [(row["id"], row["stage"]) for row in releases["releases"]] == [("planner-1", "canary")]
    release, page = await answered(client, "show_release", release="planner")
    assert release["release"]["split"] == 0.5
    assert [row["action"] for row in release["decisions"]] == ["start", "check", "replay", "shadow", "canary"]
    assert "▶ 50%" in page


async def test_how_things_stand(client: Client) -> None:
    stats, text = await answered(client, "show_stats")
    assert stats["totals"]["calls"] == stats["by_model"]["policy"]["calls"] == 45
    assert "Rewards: 14 user, mean 0.892" in text
    queue, said = await answered(client, "show_queue")
    assert (queue["state"], queue["waiting"], queue["workers"]) == ("open", {}, [])
    assert said.splitlines() == ["Queue open: 0 waiting; 0 claimed.", "No worker was heard of lately."]


async def test_what_cannot_be_answered_is_said_in_plain_words(client: Client) -> None:
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "list_rollouts modle:x": ({"filter": "modle:x"}, "unknown field 'modle'; did you mean 'mode'?"),
        "list_rollouts name": ({"filtre": "x"}, "filtre: there is no such argument; there are: filter, limit, cursor"),
        "list_rollouts bound": ({"limit": 1000}, "list_rollouts: limit: 1000 is not 100 or less"),
        "list_rollouts cursor": ({"cursor": "x"}, "cursor"),
        "show_queue none": ({"x": 1}, "show_queue: x: there is no such argument; it takes none"),
        "read_transcript missing": ({}, "read_transcript: rollout: it is missing"),
        "read_transcript id": ({"rollout": "a/b"}, "rollout: 'a/b' is not an id"),
        "read_transcript unknown": ({"rollout": "nope"}, "there is no rollout 'nope'; list_rollouts lists them"),
        "read_transcript attempt": ({"rollout": "r1", "attempt": "a7"}, "has no attempt 'a7'; it has a1"),
        "read_call span": ({"rollout": "r1", "sequence": 9}, "has no span 9; list_spans lists them"),
        "read_call reward": ({"rollout": "q1.0", "sequence": 3}, "#3  reward  1  by user can be read"),
        "read_version name": ({"name": "x"}, "there is no resource 'x'; there are planner"),
        "read_version version": ({"name": "planner", "version": "v9"}, "has no version 'v9'; its newest are v1, v2"),
        "compare_versions same": ({"name": "planner", "one": "v1", "other": "v1"}, "one and the same version"),
        "show_release name": ({"release": "x"}, "there is no release 'x'"),
        "list_rollout name": ({}, "there is no tool 'list_rollout'; did you mean list_rollouts? There are: "),
        "nothing like it": ({}, "there is no tool 'nothing'. There are: "),
    }  # fmt: skip
    for case, (arguments, said) in wrong.items():
        assert said in await refused(client, case.split()[0], **arguments), case


@pytest.mark.slow
async def test_no_secret_is_told(tmp_path: Path) -> None:
    async with running(tmp_path, NOWHERE, env={"PENSTOCK_ADMIN_KEY": KEY}) as gateway:
        async with beside(gateway.url) as client:
            said = await refused(client, "show_queue")
            assert tells(said, "admin key as PENSTOCK_ADMIN_KEY", "this server's entry")
        async with connected(gateway.url, PENSTOCK_ADMIN_KEY=KEY) as client:
            assert (await answered(client, "show_queue"))[0]["state"] == "open"
            assert KEY not in await everything(client)
        async with beside(gateway.url.replace("://", "://somebody:hidden@").replace(str(gateway.port), "9")) as client:
            assert "hidden" not in await refused(client, "show_queue")


async def everything(client: Client) -> str:
    """All that the server says without being asked about something."""
    told = [json.dumps(await answered(client, name)) for name in ("list_rollouts", "show_stats", "list_resources")]
    listed = (await client.list_tools()).model_dump_json()
    return "".join([*told, listed, str(client.instructions), await refused(client, "read_transcript", rollout="x")])


@pytest.mark.slow
async def test_a_gateway_may_come_later(tmp_path: Path) -> None:
    (port,) = steady_ports(1)
    async with beside(f"http://127.0.0.1:{port}") as client:
        said = await refused(client, "list_rollouts")
        assert tells(said, f"cannot reach the gateway at http://127.0.0.1:{port}", "`penstock serve`", "--gateway URL")
        gateway = Gateway(write_config(tmp_path, NOWHERE), tmp_path / "data", tmp_path / "err")
        await gateway.start(port)
        try:
            assert (await answered(client, "show_queue"))[0]["state"] == "open"
            none, said = await answered(client, "list_resources")
            assert (none["resources"], said.startswith("There are no resources yet")) == ([], True)
            assert "has no rollouts yet" in (await answered(client, "list_rollouts"))[1]
        finally:
            await gateway.terminate()
