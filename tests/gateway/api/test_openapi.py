"""The API's description of itself: complete, consistent, and true of what the server does."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.experiment import policy, prompt
from fakes.hook import SECRET
from fakes.local import Local, locally
from fakes.mcp_wire import config, mcp_server
from fakes.memory_tape import MemoryTape, call, serving
from fakes.process import upstreams
from fakes.provider import Provider
from fakes.tape import Tape
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from penstock.gateway.api import openapi
from penstock.gateway.api.openapi import document, field_docs
from penstock.gateway.api.routes import ROUTES
from penstock.gateway.client.client import Client
from penstock.gateway.model.answers import SpanPage
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.release import NewRelease
from penstock.gateway.reading.filter_fields import FIELDS

DOC = document(ROUTES, "1.2.3")
REGISTRY: Any = Registry[Any]().with_resource("urn:document", DRAFT202012.create_resource(DOC)).crawl()
OPERATIONS = [(path, method, op) for path, ops in DOC["paths"].items() for method, op in ops.items()]


def test_every_route_is_described_once() -> None:
    described = {(method.upper(), path) for path, method, _ in OPERATIONS}
    assert described == {(route.method, route.path) for route in ROUTES}
    names = [operation["operationId"] for _, _, operation in OPERATIONS]
    assert len(set(names)) == len(names)
    assert DOC["openapi"] == "3.1.0"
    assert DOC["info"]["version"] == "1.2.3"


def test_every_reference_leads_somewhere() -> None:
    known = {f"#/components/schemas/{name}" for name in DOC["components"]["schemas"]}
    assert set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(DOC))) <= known


def test_everything_has_a_description() -> None:
    for path, _, operation in OPERATIONS:
        assert len(operation["description"]) > 10, path
        assert operation["summary"], path
        for parameter in operation["parameters"]:
            assert parameter["description"], (path, parameter["name"])
    for name, schema in DOC["components"]["schemas"].items():
        for field, about in schema.get("properties", {}).items():
            assert about.get("description"), (name, field)


def test_path_parameters_are_those_of_the_path() -> None:
    for path, _, operation in OPERATIONS:
        declared = [p["name"] for p in operation["parameters"] if p["in"] == "path"]
        assert declared == re.findall(r"\{(\w+)\}", path)


def test_schemas_are_valid() -> None:
    for schema in DOC["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_query_parameters_carry_their_bounds() -> None:
    parameters = {p["name"]: p for p in DOC["paths"]["/api/spans"]["get"]["parameters"]}
    assert set(parameters) == {"filter", "limit", "cursor"}
    assert parameters["limit"]["schema"] == {"default": 100, "maximum": 1000, "minimum": 1, "type": "integer"}


def test_only_what_needs_no_key_says_so() -> None:
    public = {path for path, _, operation in OPERATIONS if operation.get("security") == [{}]}
    assert public == {"/healthz", "/readyz", "/api/openapi.json", "/api/docs"}


def test_inherited_fields_keep_their_docstrings() -> None:
    docs = field_docs(SpanPage)
    assert docs["next"].startswith("Cursor of the next page")
    assert docs["spans"] == "Those that match."


BODIES: dict[str, Any] = {
    "/api/tokens": {"rollout": "r1"},
    "/api/sql": {"query": "select count(*) from spans"},
    "/api/rollouts": {"rollouts": [{"id": "q2", "input": {"question": "?"}}]},
    "/api/claims": {"worker": "w1"},
    "/api/workers/{wid}/heartbeat": {"attempts": [{"rollout": "q1", "attempt": "a1", "running": True}]},
    "/api/rollouts/{rid}/attempts/{aid}/finish": {"status": "failed", "rewards": [{"value": 1}]},
    "/api/rollouts/{rid}/attempts/{aid}/rewards": {"dimensions": {"style": 0.5}},
    "/api/rollouts/{rid}/attempts/{aid}/events": {"events": [{"name": "stdout", "attributes": {"text": "hi"}}]},
    "/api/queue": {"state": "open"},
    "/api/policy/waiting/{question}": {"verdict": "approve"},
    "/api/policy/test": {"rules": [{"name": "none", "verdict": "deny"}]},
    "/api/resources/{resource}": {"kind": "prompt", "content": {"text": "Text two"}},
    "/api/resources/{resource}/releases": {"candidate": "v2", "policy": {"margin_absolute": 0.1}},
    "/api/releases/{release}/rehearse": {"worker": "w1"},
    "/api/upstreams/{upstream}/pause": {"bound_s": 5},
    "/api/runs": {"id": "grpo-7", "kind": "grpo", "config": {"lr": 1e-6}},
    "/api/runs/{run}": {"made": [{"name": "known", "version": "v1"}]},
    "/api/runs/{run}/metrics": {"points": [{"step": 0, "values": {"reward": 0.5, "kl": None}}]},
    "/api/runs/{run}/events": {"events": [{"text": "published policy v12"}]},
    "/api/runs/{run}/finish": {"status": "succeeded"},
}
"""What is sent to each path that takes a body; nothing where it is not here."""


async def ready(client: Client, action: str) -> str:
    """A release to which this can be done."""
    resource = "prompt-" + action.strip("{}")
    for text in ("one", "two"):
        await client.add_version(resource, prompt(f"Text {text}"))
    how = policy(replay={"closed_loop": 1})
    release = (await client.start_release(resource, NewRelease(candidate="v2", policy=how))).id
    while (await client.release(release)).release.stage != "canary":  # noqa: ASYNC110 - a few requests
        await asyncio.sleep(0)
    if action == "resume":
        await client.decide(release, "hold", ActionRequest())
    return release


@pytest.fixture
async def local(provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Local]:
    """In front of the provider and of a server of tools."""
    monkeypatch.setenv("PAGER_SECRET", SECRET)
    async with mcp_server(sessions=False) as server:
        own = upstreams(openai=provider.openai_url, anthropic=provider.url)
        # Nobody listens there: that is an answer, too.
        hook = '[[webhook]]\nname = "pager"\nurl = "http://127.0.0.1:1/"\nsecret_env = "PAGER_SECRET"\n'
        async with locally(tmp_path, f"{own}\n{config(server)}\n{hook}") as made:
            yield made


@pytest.mark.slow
async def test_the_server_answers_as_described(http: aiohttp.ClientSession, local: Local, client: Client) -> None:
    """Every operation in turn, against one gateway; JSON answers are held against the schema of the document."""
    answered = (await local.ask(http, "r1"))["id"]
    await Tape(local.url, http).spans("r1", 1)
    for text in ("zero", "one"):
        await client.add_version("known", prompt(f"Text {text}"))
    lists = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    async with http.post(f"{local.url}/mcp/tools", json=lists) as response:
        assert response.status == 200
    while not (await client.server_definitions("tools")).versions:  # noqa: ASYNC110 - a few requests
        await asyncio.sleep(0)
    bodies = BODIES | {"/api/feedback": {"response_id": answered, "value": 1}}
    for path, method, operation in OPERATIONS:
        # A rollout that came by its address can be judged; only one that was queued can be cancelled and requeued.
        rid = "q2" if path.endswith(("/cancel", "/requeue")) else "none" if path.endswith("/forget") else "r1"
        release = await ready(client, path.rpartition("/")[2]) if "{release}" in path else ""
        names = {
            "resource": "known",
            "release": release,
            "upstream": "fake-openai",
            "run": "grpo-7",
            "question": "none",
            "server": "tools",
            "webhook": "pager",
        }
        url = local.url + path.format(rid=rid, aid="a1", wid="w1", sequence=1, **names)
        needed = {
            "/api/changes": {"follow": "false"},
            "/api/whole": {"ids": rid},
            "/api/breakdown": {"by": "agent"},
            "/api/search": {"text": "x"},
        }
        query = needed.get(path, {})
        sent = bodies.get(path, {}) if method == "post" else None
        async with http.request(method, url, json=sent, params=query) as response:
            # No release waits for approval here, no tool call for a person, a short tape has no index, and a
            # rollout of no name is not forgotten: that is refused, as it is described.
            none = path.endswith(("{release}/approve", "/api/index/rebuild"))
            expected = 404 if path.endswith(("/{question}", "/forget")) else 409 if none else 200
            assert response.status == expected, (path, await response.text())
            content = operation["responses"][str(expected)]["content"]
            assert response.content_type in content
            schema = content[response.content_type].get("schema", {})
            if response.content_type == "application/json" and "$ref" in schema:
                validate(await response.json(), schema)


async def test_errors_and_pages_of_changes_are_as_described(http: aiohttp.ClientSession) -> None:
    tape = MemoryTape()
    tape.add(call(1))
    async with serving(tape) as served:
        async with http.get(f"{served.url}/api/changes?follow=false") as response:
            content = DOC["paths"]["/api/changes"]["get"]["responses"]["200"]["content"]
            validate(await response.json(), content["application/json"]["schema"])
        for path in ("/api/spans?limit=0", "/api/rollouts/x", "/api/x"):
            async with http.get(served.url + path) as response:
                validate(await response.json(), {"$ref": "#/components/schemas/ErrorAnswer"})


def validate(value: Any, schema: dict[str, Any]) -> None:
    validator: Any = Draft202012Validator({"$ref": "urn:document" + schema["$ref"]}, registry=REGISTRY)
    validator.validate(value)


# --- the page ---


class Page(HTMLParser):
    """Collects what a page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links |= {value for name, value in attrs if name in ("href", "src") and value}


def test_the_page_is_self_contained_and_its_links_lead_somewhere() -> None:
    page = Page(openapi.page(ROUTES, "1.2.3"))
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert page.links <= {f"#{name}" for name in page.ids}
    assert len(set(page.ids)) == len(page.ids)


def test_the_page_names_everything() -> None:
    text = openapi.page(ROUTES, "1.2.3")
    for name in (*(route.path for route in ROUTES), *FIELDS["spans"], *DOC["components"]["schemas"]):
        assert f"<code>{name}</code>" in text or f">{name}</h2>" in text
