"""The tools that read, called by the official SDK's client over stdio, against a gateway with a release under way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
from conftest import StartGateway
from fakes.mcp_client import answered, connected, refused
from fakes.mcp_wire import Client as ToolClient
from fakes.mcp_wire import call, config, mcp_server
from fakes.ports import steady_ports
from fakes.process import Gateway, running, upstreams, write_config
from fakes.worlds import World, world
from mcp.client.client import Client

from penstock.gateway.client.client import Client as ControlClient
from penstock.gateway.mcp_server.tools import TOOLS
from penstock.gateway.model.rollout import Judgement

KEY = "an-admin-key-that-nobody-may-see"


def url_of(here: World) -> str:
    return f"http://127.0.0.1:{here.ports[4747]}"


async def test_rollouts_are_listed_and_searched(tmp_path: Path) -> None:
    async with world("worked", tmp_path) as here, connected(url_of(here)) as client:
        few, text = await answered(client, "list_rollouts", limit=3)
        assert [one["id"] for one in few["rollouts"]] == ["q2.1", "q2.0", "q1.1"]
        assert few["rollouts"][0] | {"created": ""} == {
            "id": "q2.1", "status": "succeeded", "mode": "train", "group": "q2", "reward": 0.25, "attempts": 1,
            "calls": 2, "errors": 0, "input_tokens": 72, "output_tokens": 10, "tool_calls": 0, "created": "",
            "task": '{"id":"q2","question":"When does it leave?"}',
        }  # fmt: skip
        assert f"cursor={few['next']!r} goes on" in text
        more, _ = await answered(client, "list_rollouts", limit=100, cursor=few["next"])
        assert [one["id"] for one in more["rollouts"][:2]] == ["q1.0", "r1"]
        assert (len(more["rollouts"]), "next" in more) == (26, False)
        bad, _ = await answered(client, "list_rollouts", filter="reward<0.5 group:q1")
        assert [one["id"] for one in bad["rollouts"]] == ["q1.1"]
        none, said = await answered(client, "list_rollouts", filter="model:nothing*")
        assert (none, said) == ({"rollouts": []}, "No rollout matches 'model:nothing*'.")
        spans, lines = await answered(client, "list_spans", rollout="q1.0")
        assert [(one["kind"], one["sequence"]) for one in spans["spans"]] == [("llm", 1), ("llm", 2), ("reward", 3)]
        assert spans["spans"][2]["says"] == "1 by user"
        assert lines.splitlines()[0].startswith("q1.0/a1 #1  chat  policy  ok")
        newest, _ = await answered(client, "list_spans", filter="kind:reward", limit=2)
        assert [one["rollout"] for one in newest["spans"]] == ["q2.1", "q2.0"]


async def test_what_was_said_is_read(tmp_path: Path) -> None:
    async with world("worked", tmp_path) as here, connected(url_of(here)) as client:
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
        offered: list[Any] = [
            {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "book")
        ]
        await post(f"{url_of(here)}/rollout/t/attempt/a1/v1/chat/completions", [], tools=offered)
        await kept(url_of(here), "t")
        with_tools, text = await answered(client, "read_transcript", rollout="t")
        assert with_tools["spans"][0]["tools"] == ["look", "book"]
        assert "\ntools: look, book\n" in text
        found, said = await answered(client, "diagnose_rollout", rollout="q1.0")
        assert (found["trainable"], found["findings"][0]["code"]) == (False, "no_token_ids")
        assert found["findings"][0]["places"] == ["a1#1", "a1#2"]
        assert "way out: set train = true" in said


async def test_long_texts_come_in_pieces(tmp_path: Path) -> None:
    async with world("new", tmp_path) as here, connected(url_of(here)) as client:
        url = f"{url_of(here)}/rollout/long/attempt/a1/v1/chat/completions"
        talk = [{"role": "user", "content": f"{number} " + "word " * 2000} for number in range(12)]
        await post(url, talk[:6])
        await post(url, talk)
        await kept(url_of(here), "long")
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


async def test_tools_behind_the_gateway_are_read(start_gateway: StartGateway, http: aiohttp.ClientSession) -> None:
    async with mcp_server() as server:
        gateway = await start_gateway(config(server))
        agent = ToolClient(f"{gateway.address('r1')}/mcp/tools", http, {})
        await agent.open()
        for id in (7, 8):
            _ = await agent.say(call("echo", {"text": "hello"}, id))
        await kept(gateway.url, "r1")
        async with connected(gateway.url) as client:
            rows, _ = await answered(client, "list_spans", rollout="r1", filter="kind:tool")
            assert [row["kind"] for row in rows["spans"]] == ["tool", "tool"]
            told, text = await answered(client, "read_transcript", rollout="r1")
            calls = [one for one in told["spans"] if one["sequence"] in {row["sequence"] for row in rows["spans"]}]
            assert [one["repeated"] for one in calls] == [0, 0], text
            assert all("hello" in one["messages"][0]["text"] for one in calls), text
            assert all("hello" in one["answers"][0]["text"] for one in calls), text


async def test_versions_and_releases_are_read(tmp_path: Path) -> None:
    async with world("canary", tmp_path) as here, connected(url_of(here)) as client:
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
        assert "+You are a careful travel agent of Acme Air.\n" in diff["diff"]
        compared, text = await answered(client, "compare_versions", name="planner", one="v1", other="v2")
        assert sum(side["rollouts"] for side in compared["versions"]) == 8
        assert compared["verdict"].startswith("Too little to tell: it takes 10 rewarded rollouts of each version")
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


async def test_how_things_stand(tmp_path: Path) -> None:
    async with world("worked", tmp_path) as here, connected(url_of(here)) as client:
        stats, text = await answered(client, "show_stats")
        assert stats["totals"]["calls"] == stats["by_model"]["policy"]["calls"] == 34
        assert "Rewards: 4 user, mean 0.625." in text
        queue, said = await answered(client, "show_queue")
        assert (queue["state"], queue["waiting"], queue["workers"]) == ("open", {}, [])
        assert said == "Queue open: 0 waiting; 0 claimed.\nNo worker was heard of lately."


async def test_every_answer_is_as_its_schema_says(tmp_path: Path) -> None:
    """The SDK's client holds answers against schemas too; this says which tool was not called."""
    arguments = {
        "list_spans": {"rollout": "c1"}, "read_transcript": {"rollout": "c1"},
        "read_call": {"rollout": "c1", "sequence": 1}, "diagnose_rollout": {"rollout": "c1"},
        "read_version": {"name": "planner"}, "diff_versions": {"name": "planner", "one": "v1", "other": "v2"},
        "compare_versions": {"name": "planner", "one": "v1", "other": "v2"}, "show_release": {"release": "planner"},
        "post_reward": {"rollout": "c1", "value": 1, "reason": "done"},
        "propose_version": {"name": "planner", "text": "{customer} {date} is short", "note": "short"},
    }  # fmt: skip
    async with world("canary", tmp_path) as here, connected(url_of(here), "--write") as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(listed) == {tool.name for tool in TOOLS}
        for name, tool in listed.items():
            fields, text = await answered(client, name, **arguments.get(name, {}))
            assert tool.output_schema is not None
            jsonschema.validate(fields, tool.output_schema)
            jsonschema.validate(arguments.get(name, {}), tool.input_schema)
            assert text


async def test_what_cannot_be_answered_is_said_in_plain_words(tmp_path: Path) -> None:
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
    async with world("versions", tmp_path) as here, connected(url_of(here)) as client:
        for case, (arguments, said) in wrong.items():
            assert said in await refused(client, case.split()[0], **arguments), case


async def test_no_secret_is_told(tmp_path: Path) -> None:
    config = upstreams(openai="http://127.0.0.1:9/v1")
    async with running(tmp_path, config, env={"PENSTOCK_ADMIN_KEY": KEY}) as gateway:
        async with connected(gateway.url) as client:
            said = await refused(client, "show_queue")
            assert "put its admin key as PENSTOCK_ADMIN_KEY into the environment of this server's entry" in said
        async with connected(gateway.url, PENSTOCK_ADMIN_KEY=KEY) as client:
            assert (await answered(client, "show_queue"))[0]["state"] == "open"
            assert KEY not in await everything(client)
        address = gateway.url.replace("://", "://somebody:hidden@").replace(str(gateway.port), "9")
        async with connected(address) as client:
            assert "hidden" not in await refused(client, "show_queue")


async def everything(client: Client) -> str:
    """All that the server says without being asked about something."""
    told = [json.dumps(await answered(client, name)) for name in ("list_rollouts", "show_stats", "list_resources")]
    listed = (await client.list_tools()).model_dump_json()
    return "".join([*told, listed, str(client.instructions), await refused(client, "read_transcript", rollout="x")])


async def test_a_gateway_may_come_later(tmp_path: Path) -> None:
    (port,) = steady_ports(1)
    async with connected(f"http://127.0.0.1:{port}") as client:
        said = await refused(client, "list_rollouts")
        assert said == (
            f"cannot reach the gateway at http://127.0.0.1:{port}: nothing answers there; is `penstock serve` running. "
            "A person can start it with `penstock serve`, or name another with --gateway URL in this server's entry."
        )
        home = tmp_path / "home"
        gateway = Gateway(write_config(home, upstreams(openai="http://127.0.0.1:9/v1")), home / "data", home / "err")
        await gateway.start(port)
        try:
            assert (await answered(client, "show_queue"))[0]["state"] == "open"
        finally:
            await gateway.terminate()


async def test_an_empty_tape_says_so(tmp_path: Path) -> None:
    async with world("new", tmp_path) as here, connected(url_of(here)) as client:
        none, said = await answered(client, "list_resources")
        assert (none["resources"], said.startswith("There are no resources yet")) == ([], True)
        assert "has no rollouts yet" in (await answered(client, "list_rollouts"))[1]
