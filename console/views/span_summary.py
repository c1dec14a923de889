"""The few most telling attributes of an agent's span, as short texts. Pure.

Instrumentations write dozens: ids of threads, versions, whole requests as JSON. A line has room for four. The
attributes of the tables come first, then those that the agent's author has set; never JSON, and nothing that is part of
the span's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.gateway.model.span import Span

MOST, LONGEST = 4, 60
"""Attributes of a span, and characters of one."""
NAMED = {
    "gen_ai.agent.name": "agent",
    "gen_ai.tool.name": "tool",
    "tool.name": "tool",
    "gen_ai.request.model": "model",
    "llm.model_name": "model",
    "gen_ai.tool.call.arguments": "arguments",
    "gen_ai.tool.call.result": "result",
    "url.full": "url",
    "http.url": "url",
    "http.route": "route",
    "http.response.status_code": "http",
    "http.status_code": "http",
    "db.query.text": "query",
    "db.statement": "query",
    "input.value": "input",
    "output.value": "output",
}
"""Labels of the attributes that are shown first, in this order; of several attributes with one label only the first is
shown."""
TOKENS = (
    ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"),
    ("llm.token_count.prompt", "llm.token_count.completion"),
)
FURNITURE = (
    *("otel.", "span.kind", "openinference.", "telemetry.", "service.", "process.", "thread.", "host.", "os.", "code."),
    *("gen_ai.", "llm.", "openai.", "input.", "output.", "metadata", "session.", "user_agent.", "penstock."),
    *("http.", "url.", "server.", "client.", "network.", "net.", "db.", "agentlightning.", "error.type"),
)
"""Prefixes of the names of attributes that tell little, or that the tables above contain."""


def facts(span: Span) -> list[str]:
    """The attributes as texts such as `model gpt-5`, `120 → 7 tokens`, `city Bern`; the reason of a failure comes
    last."""
    attributes = span.attributes or {}
    found = dict.fromkeys((*_named(attributes, span.name or ""), *_tokens(attributes), *_others(attributes)))
    why = _short(attributes.get("otel.status_description"))
    return list(found)[:MOST] + ([why] if why else [])


def _named(attributes: Mapping[str, Any], name: str) -> Iterator[str]:
    seen: set[str] = set()
    for key, label in NAMED.items():
        value = _short(attributes.get(key))
        if value and label not in seen:
            seen.add(label)
            if value not in name:
                yield f"{label} {value}"


def _tokens(attributes: Mapping[str, Any]) -> Iterator[str]:
    for pair in TOKENS:
        if any(name in attributes for name in pair):
            given, made = (_short(attributes.get(name)) or "?" for name in pair)
            yield f"{given} → {made} tokens"
            return


def _others(attributes: Mapping[str, Any]) -> Iterator[str]:
    for key, value in attributes.items():
        if not key.startswith(FURNITURE) and (text := _short(value)):
            yield f"{key} {text}"


def _short(value: Any) -> str:
    """A value on one line, cut to `LONGEST`; empty for lists, maps and JSON."""
    if not isinstance(value, str | int | float):
        return ""
    text = " ".join(str(value).lower().split() if isinstance(value, bool) else str(value).split())
    if text[:1] in ("{", "["):
        return ""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1].rstrip()}…"
