"""The control API as one HTML page for people: made from its OpenAPI document, without scripts, nothing fetched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any

from penstock.gateway.api.openapi import ApiRoute, document
from penstock.gateway.reading.filters.query import FIELDS

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
pre { background: var(--soft); padding: .6rem .8rem; overflow-x: auto; border-radius: 4px; }
h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; font-size: 1.05rem; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
td, th { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; white-space: nowrap; }
b.method { color: #2a7; margin-right: .5rem; }
"""


def page(routes: Sequence[ApiRoute], version: str) -> str:
    """The API as one HTML page, without scripts and without anything fetched from elsewhere."""
    doc = document(routes, version)
    parts = [f"<p>{_marked(text)}</p>" for text in doc["info"]["description"].split("\n\n")]
    parts += [_filter_table(), _contents(routes)]
    parts += [_endpoint(route, doc) for route in routes]
    parts += [_model(name, schema) for name, schema in sorted(doc["components"]["schemas"].items())]
    title = escape(f"{doc['info']['title']} {version}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>{''.join(parts)}</body></html>"
    )


def _marked(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table. Cells of rows are HTML already; those of the head are escaped."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>" if rows else ""


def _filter_table() -> str:
    fields = FIELDS["spans"]
    rows = [(_code(name), _code(" ".join(f.operators)), escape(f.help)) for name, f in fields.items()]
    return "<h2>The filter language</h2>" + _table(("field", "operators", "meaning"), rows)


def _contents(routes: Sequence[ApiRoute]) -> str:
    rows = [
        (f'<a href="#{route.name}">{_code(f"{route.method} {route.path}")}</a>', escape(route.summary))
        for route in routes
    ]
    return "<h2>Endpoints</h2>" + _table(("endpoint", ""), rows)


def _endpoint(route: ApiRoute, doc: dict[str, Any]) -> str:
    operation = doc["paths"][route.path][route.method.lower()]
    rows = [(_code(p["name"]), p["in"], _type(p["schema"]), _marked(p["description"])) for p in operation["parameters"]]
    answers = [
        (_code(status), ", ".join(_content(kind, about) for kind, about in answer["content"].items()))
        for status, answer in operation["responses"].items()
    ]
    asked = (
        f"<p>Body: {_type(operation['requestBody']['content']['application/json']['schema'])}</p>" if route.body else ""
    )
    return (
        f'<h2 id="{route.name}"><b class="method">{route.method}</b>{_code(route.path)}</h2>'
        f"<p>{_marked(route.description)}</p>{_table(('parameter', 'in', 'type', 'meaning'), rows)}{asked}"
        f"{_table(('status', 'answer'), answers)}"
    )


def _content(kind: str, about: dict[str, Any]) -> str:
    return _type(about["schema"]) if kind == "application/json" else _code(kind)


def _model(name: str, schema: dict[str, Any]) -> str:
    rows = [
        (_code(field), _type(about), _marked(about.get("description", "")))
        for field, about in schema.get("properties", {}).items()
    ]
    about = _marked(schema.get("description", ""))
    return f'<h2 id="{name}">{escape(name)}</h2><p>{about}</p>' + _table(("field", "type", "meaning"), rows)


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words, with links to the models it names."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{name}">{_code(name)}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " ".join(_code(str(value)) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(str(schema.get("const", schema.get("type", "any"))))
