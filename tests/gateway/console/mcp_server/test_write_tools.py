"""What `--write` allows, and that nothing is changed without it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

import jsonschema
import pytest
import pytest_asyncio
from fakes.goldens import check_text
from fakes.mcp_client import answered, beside, connected, refused
from fakes.mistakes import tells
from fakes.worlds import BASE, STUBS, world
from mcp.client.client import Client as SdkClient

from penstock.console.mcp_server.server import TOOLS
from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.model.rollout import Reward

pytestmark = pytest.mark.asyncio(loop_scope="module")

WRITING = {"post_reward", "propose_version"}
TEXT = "You help {customer} of Acme Air on {date}. Be brief."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Client]:
    """A gateway with a release under way."""
    async with (
        world("canary", tmp_path_factory.mktemp("world")) as here,
        Client(f"http://127.0.0.1:{here.ports[4747]}") as made,
    ):
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: Client) -> AsyncGenerator[SdkClient]:
    """Of a server that may write."""
    async with beside(gateway.url, write=True) as made:
        yield made


@pytest.mark.slow
async def test_the_list_of_tools_is_what_it_was() -> None:
    """`UPDATE_GOLDENS=1` writes it anew. It is what models read: read it as one."""
    async with connected("http://127.0.0.1:9", "--write") as client:
        tools = [
            tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in (await client.list_tools()).tools
        ]
    text = json.dumps(tools, indent=2, ensure_ascii=False) + "\n"
    check_text("mcp-tools.json", text)
    for tool in tools:
        hints = tool["annotations"]
        assert hints["readOnlyHint"] == (tool["name"] not in WRITING)
        assert (hints["destructiveHint"], hints["openWorldHint"]) == (False, False)
        for name, field in tool["inputSchema"]["properties"].items():
            assert field.get("description"), f"{tool['name']}: {name}"


async def test_without_write_nothing_is_changed(gateway: Client) -> None:
    async def is_there() -> tuple[int, int]:
        """(spans of a rollout, versions)."""
        versions = (await gateway.resource("planner")).versions
        return len([span async for span in gateway.spans("c2")]), len(versions)

    async with beside(gateway.url) as client:
        before = await is_there()
        assert WRITING.isdisjoint(tool.name for tool in (await client.list_tools()).tools)
        for name, arguments in (
            ("post_reward", {"rollout": "c2", "value": 1, "reason": "x"}),
            ("propose_version", {"name": "planner", "text": TEXT, "note": "x"}),
        ):
            said = await refused(client, name, **arguments)
            assert said.startswith(f"{name} is not allowed")
            assert "`penstock mcp --write`" in said
        assert "this server only reads" in str(client.instructions)
        assert await is_there() == before


async def test_rewards_are_posted(gateway: Client, client: SdkClient) -> None:
    kept, text = await answered(
        client, "post_reward", rollout="r1", value=0.5, reason="It did not answer.", dimensions={"polite": 1},
        key="once",
    )  # fmt: skip
    assert kept == {
        "rollout": "r1", "attempt": "a1", "sequence": 3, "reward": 0.5, "trusted": True, "late": False
    }  # fmt: skip
    assert tells(text, "#3", "r1/a1", "reward 0.5")
    again, _ = await answered(client, "post_reward", rollout="r1", value=1, reason="Again.", key="once")
    assert (again["sequence"], again["reward"]) == (3, 0.5)
    (span,) = [span async for span in gateway.spans("r1", filter="kind:reward")]
    given = Reward.of(span)
    assert (given.source, given.reason, given.dimensions) == ("judge", "It did not answer.", {"polite": 1})
    wrong = {
        "arguments: a reward needs a value or dimensions": {"reason": "x"},
        "post_reward: reason: it is missing": {"value": 1},
        "post_reward: value: 'nan' is not a finite number": {"value": "nan", "reason": "x"},
        "has 0 attempts": {"rollout": "waits", "value": 1, "reason": "x"},
        "has no span 9: the last is 3": {"value": 1, "reason": "x", "sequence": 9},
    }
    _ = await gateway.enqueue([RolloutSpec(id="waits")])
    for said, arguments in wrong.items():
        assert said in await refused(client, "post_reward", **({"rollout": "r1"} | arguments))


async def test_versions_are_proposed_and_nothing_more(gateway: Client, client: SdkClient) -> None:
    before = await gateway.resource("planner")
    made, text = await answered(client, "propose_version", name="planner", text=TEXT, note="It talks too much.")
    assert (made["version"], made["parent"], made["there_already"]) == ("v3", "v1", False)
    assert made["next"] == "penstock release start planner --candidate v3"
    assert tells(text, "planner@v3 is added", "from v1", "No agent gets it yet")
    assert f"+{TEXT}\n" in made["diff"]
    found = await gateway.resource("planner")
    assert (found.stable, found.releases) == (before.stable, before.releases)
    new = found.versions[-1]
    assert (new.author, new.note) == ("mcp (MCP)", "It talks too much.")
    again, said = await answered(client, "propose_version", name="planner", text=TEXT, note="Again.")
    assert (again["there_already"], len((await gateway.resource("planner")).versions)) == (True, 3)
    assert "nothing was added" in said
    wrong = {
        "text: missing {customer}, missing {date}. A version keeps the slots of planner@v1": {"text": "Hi"},
        "text: missing {date}": {"text": "Hi {customer}"},
        "added {x}": {"text": TEXT + "{x}"},
        "there is no resource 'x'; there are ": {"name": "x"},
        "has no version 'v9'": {"parent": "v9"},
        "version": {"version": "v2"},
        "note: '' is not text of 1 character or more": {"note": ""},
    }
    for said, arguments in wrong.items():
        given = {"name": "planner", "text": TEXT, "note": "x"} | arguments
        assert said in await refused(client, "propose_version", **given)
    assert len((await gateway.resource("planner")).versions) == 3


async def test_models_are_not_proposed(gateway: Client, client: SdkClient) -> None:
    content = {"upstream": "vllm", "base": BASE, "adapter": "/adapters/policy/v11"}
    _ = await gateway.add_version("policy", NewVersion(kind="model", content=content, version="v11"))
    told, text = await answered(client, "read_version", name="policy")
    assert ("text" in told, told["content"]["adapter"]) == (False, "/adapters/policy/v11")
    assert text.startswith("policy@v11  model  stable\n")
    said = await refused(client, "propose_version", name="policy", text="x", note="x")
    assert tells(said, "'policy' is a model", "trainers publish")


async def test_every_answer_is_as_its_schema_says(client: SdkClient) -> None:
    """The SDK's client holds answers against schemas too; this says which tool was not called."""
    arguments = {
        "list_spans": {"rollout": "c1"}, "read_transcript": {"rollout": "c1"},
        "read_call": {"rollout": "c1", "sequence": 1}, "diagnose_rollout": {"rollout": "c1"},
        "read_version": {"name": "planner"}, "diff_versions": {"name": "planner", "one": "v1", "other": "v2"},
        "compare_versions": {"name": "planner", "one": "v1", "other": "v2"}, "show_release": {"release": "planner"},
        "post_reward": {"rollout": "c1", "value": 1, "reason": "done"},
        "propose_version": {"name": "planner", "text": (STUBS / "better.txt").read_text(), "note": "again"},
    }  # fmt: skip
    listed = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert set(listed) == {tool.name for tool in TOOLS}
    for name, tool in listed.items():
        fields, text = await answered(client, name, **arguments.get(name, {}))
        assert tool.output_schema is not None
        jsonschema.validate(fields, tool.output_schema)
        jsonschema.validate(arguments.get(name, {}), tool.input_schema)
        assert text
