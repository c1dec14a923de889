"""The table of names: documented, without doubles, and in the conventions' own form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.gateway.dialects import by_name
from penstock.gateway.otlp import semconv
from penstock.gateway.otlp.semconv import Row

DOCS = (Path(__file__).parents[3] / "docs" / "opentelemetry.md").read_text(encoding="utf-8")
TABLES: dict[str, tuple[Row, ...]] = {
    "every span": semconv.OF_EVERY_SPAN,
    "a call": semconv.OF_A_CALL,
    "a call of a model": semconv.OF_A_MODEL_CALL,
    "an attempt": semconv.OF_AN_ATTEMPT,
    "a reward": semconv.OF_A_REWARD,
}


@pytest.mark.parametrize("title", TABLES)
def test_every_attribute_is_documented_and_exists(title: str) -> None:
    row = re.search(rf"^\| {title} \| (.*) \|$", DOCS, re.MULTILINE)
    assert row is not None
    assert re.findall(r"`([^`]+)`", row[1]) == [name for name, _ in TABLES[title]]


def test_no_span_has_an_attribute_twice() -> None:
    for rows in (
        semconv.OF_EVERY_SPAN + semconv.OF_A_CALL + semconv.OF_A_MODEL_CALL,
        semconv.OF_AN_ATTEMPT,
        semconv.OF_EVERY_SPAN + semconv.OF_A_REWARD,
    ):
        names = [name for name, _ in rows]
        assert len(names) == len(set(names))


def test_names_have_the_form_of_the_conventions() -> None:
    for rows in TABLES.values():
        for name, _ in rows:
            assert re.fullmatch(r"[a-z][a-z0-9]*(?:[._][a-z0-9]+)+", name)


@pytest.mark.parametrize(
    ("dialect", "host", "name"),
    [
        ("chat", None, "openai"),
        ("chat", "api.openai.com", "openai"),
        ("chat", "eu.api.mistral.ai.evil.example", "openai"),
        ("chat", "api.mistral.ai", "mistral_ai"),
        ("responses", "me.openai.azure.com", "azure.ai.openai"),
        ("messages", "api.anthropic.com", "anthropic"),
        ("messages", "bedrock-runtime.eu-central-1.amazonaws.com", "aws.bedrock"),
    ],
)
def test_the_provider(dialect: str, host: str | None, name: str) -> None:
    otel = by_name(dialect).otel
    assert otel is not None
    assert semconv.provider(otel, host) == name


def test_the_kept_attributes_are_documented() -> None:
    for name in (semconv.SPAN_KIND, semconv.STATUS_DESCRIPTION, semconv.SCOPE_NAME, semconv.SCOPE_VERSION,
                 semconv.RESOURCE, semconv.EVENTS, semconv.LINKS, semconv.TRACE_STATE, semconv.DROPPED,
                 semconv.TRUNCATED, semconv.REWARD, semconv.REWARD_REASON, *semconv.ROLLOUT, *semconv.ATTEMPT,
                 semconv.CONTENT_OMITTED, *semconv.SENSITIVE - {"gen_ai.tool.call.arguments",
                                                                "gen_ai.tool.call.result"}):  # fmt: skip
        assert f"`{name}`" in DOCS, name
