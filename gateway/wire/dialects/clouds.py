"""The paths at which clouds offer formats of other APIs: Azure, Vertex, Bedrock, and Gemini's OpenAI endpoint. Pure.

A row of the table says which format stands behind a path, by the path that its own API has for it. The call is then
read by that format's dialect. The model stands in the body, as in the format's own API, or in the path: then the
server takes that one, whatever the body says (`in_path`).
"""

from __future__ import annotations

import re
import types
from copy import copy
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from penstock.gateway.wire.dialects.base import Dialect, Facts
from penstock.gateway.wire.dialects.family import ANTHROPIC, OPENAI, Family
from penstock.gateway.wire.dialects.loose_json import RequestFields, label


class CloudPath(NamedTuple):
    """A path of a cloud, read."""

    path: str
    """The path that the format's own API has for such a call."""
    api: Family
    """The API whose format it is: its clients know this API's errors."""
    model: str | None
    """The model that the path names; None where the body names it."""


class _Row(NamedTuple):
    pattern: re.Pattern[str]
    """Its group `model` is the model that the path names; `path` the end of the path, which is that of the format."""
    api: Family
    path: str = ""
    """The format's path, where the end of the path is not."""


def _row(api: Family, pattern: str, path: str = "") -> _Row:
    return _Row(re.compile(pattern), api, path)


_PROJECT: Final = "(?:/v1(?:beta1)?)?/projects/[^/]+/locations/[^/]+"
_MODEL: Final = "(?P<model>[^/:]+)"
_PREDICT: Final = f"/models/{_MODEL}:(?:rawPredict|streamRawPredict)"
_ROWS: Final = (
    # Azure: a deployment, the v1 API (which Bedrock has too), models of several providers; Anthropic's models.
    _row(OPENAI, f"/openai/deployments/{_MODEL}(?P<path>/.+)"),
    _row(OPENAI, "/openai(?:/v1)?(?P<path>/.+)"),
    _row(OPENAI, "/models(?P<path>/(?:chat/completions|embeddings))"),
    _row(ANTHROPIC, "/anthropic(?P<path>/.+)"),
    # Gemini.
    _row(OPENAI, "/v1beta/openai(?P<path>/.+)"),
    # Vertex: models of all providers in OpenAI's format, an endpoint with a model of one's own, OpenAI's models.
    _row(
        OPENAI,
        f"{_PROJECT}/(?:endpoints/openapi|(?P<model>endpoints/[^/:]+))"
        "(?P<path>/(?:chat/completions|completions|embeddings))",
    ),
    _row(OPENAI, f"{_PROJECT}/publishers/openai/v1(?P<path>/.+)"),
    # Vertex: models in their provider's format. Mistral's and AI21's is OpenAI's.
    _row(ANTHROPIC, f"{_PROJECT}/publishers/anthropic/models/count-tokens:rawPredict", "/messages/count_tokens"),
    _row(ANTHROPIC, f"{_PROJECT}/publishers/anthropic{_PREDICT}", "/messages"),
    _row(OPENAI, f"{_PROJECT}/publishers/(?:mistralai|ai21){_PREDICT}", "/chat/completions"),
    # Claude Platform on Google Cloud.
    _row(ANTHROPIC, f"{_PROJECT}/(?:workspaces/[^/]+|claudeOrganization)/invoke(?P<path>/.+)"),
)


@lru_cache(maxsize=8192)
def cloud_path(path: str) -> CloudPath | None:
    """Read a path (no query, below the rollout's address); None for paths of no row. Remembered: paths repeat."""
    for row in _ROWS:
        if (found := row.pattern.fullmatch(path)) is not None:
            named = found.groupdict()
            model = named.get("model")
            return CloudPath(row.path or named["path"], row.api, None if model is None else unquote(model))
    return None


class _InPath(Dialect):
    """Put before a format's own class: its requests name no model, or one that counts for nothing."""

    def model(self, request: bytes, path: str = "", asked: RequestFields | None = None) -> str | None:
        """The model in the path; that of the body without a path."""
        found = cloud_path(path.partition("?")[0])
        return super().model(request, path, asked) if found is None else label(found.model)

    def renamed(self, path: str, model: str) -> str:
        """The path with this model in the place of its own."""
        head, mark, query = path.partition("?")
        for row in _ROWS:
            found = row.pattern.fullmatch(head)
            if found is not None and found.groupdict().get("model") is not None:
                start, end = found.span("model")
                made = quote(model, safe="@/" if "/" in head[start:end] else "@")
                return head[:start] + made + head[end:] + mark + query
        return path

    def asks_stream(self, request: bytes, path: str) -> bool:
        return ":streamRawPredict" in path or super().asks_stream(request, path)

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        """The facts of the format, without the body's model."""
        facts = super().facts(request, response, stream, asked)
        facts.model = None
        return facts


def in_path(dialect: Dialect) -> Dialect:
    """Return the dialect for paths that name the model."""
    of, made = type(dialect), copy(dialect)
    made.__class__ = types.new_class(of.__name__, (_InPath, of))
    return made
