"""Paths of clouds: the format behind each, the model in them, and that nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes.wire_bodies import body
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.wire.dialects import OPAQUE, by_name, family, find
from penstock.gateway.wire.dialects.batches import find as find_batch
from penstock.gateway.wire.dialects.messages import MessagesDialect

PROJECT = "/v1/projects/p/locations/us-east5"
OPENAI = ("/openai", "/openai/v1", "/v1beta/openai", f"{PROJECT}/publishers/openai/v1")
ANTHROPIC = ("/anthropic", "/anthropic/v1", f"{PROJECT}/workspaces/w/invoke/v1")
OPS = {
    OPENAI: ("/chat/completions", "/completions", "/embeddings", "/responses", "/responses/resp_1"),
    ANTHROPIC: ("/messages", "/messages/count_tokens"),
}
IN_PATH = (
    "/openai/deployments/{}/chat/completions", "/openai/deployments/{}/completions",
    "/openai/deployments/{}/embeddings", "/openai/deployments/{}/responses",
    f"{PROJECT}/publishers/anthropic/models/{{}}:rawPredict",
    f"{PROJECT}/publishers/anthropic/models/{{}}:streamRawPredict",
    "/v1beta1/projects/p/locations/l/publishers/mistralai/models/{}:rawPredict",
    "/v1beta/models/{}:generateContent", f"{PROJECT}/publishers/google/models/{{}}:countTokens", "/model/{}/converse",
)  # fmt: skip


def below() -> Iterator[tuple[str, str]]:
    """(path of a cloud, path of the format's own API)."""
    for roots, ends in OPS.items():
        yield from ((root + end, end) for root in roots for end in ends)


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_cloud_s_path_is_of_the_format_that_its_own_api_has_there(method: str) -> None:
    for path, own in below():
        dialect = find(method, path)
        assert dialect is find(method, own)
        assert dialect is OPAQUE or dialect.model(b'{"model":"m"}', path) == "m"
        assert family(dialect, path, []).name == ("anthropic" if "/messages" in own else "openai")


@pytest.mark.parametrize("path", IN_PATH)
@given(
    st.text(min_size=1, max_size=20).filter(lambda it: it.isprintable() and "/" not in it),
    st.sampled_from(["", "?a=/b:c"]),
)
def test_a_renamed_path_names_the_new_model(path: str, name: str, query: str) -> None:
    dialect = find("POST", path.format("m"))
    made = dialect.renamed(path.format("claude%40x") + query, name)
    assert dialect.model(body({"model": "other"}), made) == name
    head, _, tail = path.partition("{}")
    assert (made[: len(head)], made.removesuffix(tail + query) + tail + query) == (head, made), "nothing else changes"
    assert (made.isascii(), find("POST", made.partition("?")[0])) == (True, dialect)
    assert by_name(dialect.name).renamed("/v1/chat/completions", name) == "/v1/chat/completions"


def test_the_model_of_the_body_is_none_where_the_path_names_one() -> None:
    dialect = find("POST", IN_PATH[0].format("prod"))
    assert dialect.facts(body({"model": "gpt-5"}), b"{}", False).model is None
    assert dialect.model(body({"model": "gpt-5"})) == "gpt-5", "without a path there is nothing else"


@pytest.mark.parametrize(
    "path",
    [
        "/openai/deployments/d/extensions/chat/completions", "/openai/deployments/d/responses/r/cancel",
        "/openai/v1/messages",
        "/anthropic/v1/chat/completions", "/openai/model/m/converse", "/openai/mcp/files", "/anthropic/mcp/x",
        "/openai/v1beta/models/m:generateContent", "/v1/openai/chat/completions", "/openai", "/openai/v1/",
        f"{PROJECT}/publishers/meta/models/llama:rawPredict", f"{PROJECT}/endpoints/1:rawPredict",
        f"{PROJECT}/endpoints/1/operations/2", f"{PROJECT}/publishers/anthropic/models/a/b:rawPredict",
        f"{PROJECT}/publishers/anthropic/models/claude:predict", "/models/images/embeddings",
    ],
)  # fmt: skip
def test_any_other_path_is_opaque(path: str) -> None:
    assert find("POST", path) is OPAQUE


def test_batches_of_clouds() -> None:
    found = [
        find_batch("POST", "/openai/batches"), find_batch("GET", "/openai/v1/files/f/content"),
        find_batch("GET", f"{PROJECT}/workspaces/w/invoke/v1/messages/batches/b/results"),
        find_batch("POST", "/anthropic/v1/messages/batches"), find_batch("POST", "/openai/v1/messages"),
    ]  # fmt: skip
    assert [it and (it[0].of, it[0].does, it[1]) for it in found] == [
        ("openai", "make", None), ("openai", "results", "f"), ("anthropic", "results", "b"),
        ("anthropic", "make", None), None,
    ]  # fmt: skip


def test_files_by_reference_are_media() -> None:
    content = [
        {"type": "image", "source": {"type": "file", "file_id": "f1"}},
        {"type": "document", "source": {"type": "file", "file_id": "f2"}, "title": "t"},
        {"type": "container_upload", "file_id": "f3"},
    ]
    turn = MessagesDialect().read(
        body({"model": "m", "messages": [{"role": "user", "content": content}]}), b"{}", False
    )
    assert turn.problems == []
    assert [(part.type, part.data) for part in turn.messages[0].parts] == [("media", it) for it in content]


def test_google_s_error_in_a_list() -> None:
    turn = find("POST", "/v1beta/openai/chat/completions").read(b"{}", body([{"error": {"message": "bad key"}}]), False)
    assert (turn.error, turn.problems) == ("bad key", [])
