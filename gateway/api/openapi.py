"""The control API's description of itself as OpenAPI 3.1, made from the table that serves it.

An `ApiRoute` has everything about an endpoint, its handler included. `gateway.api.routes` registers handlers from the
same rows that are described here, so no endpoint can exist undescribed. Query parameters are the fields of a pydantic
model, which also checks them. Descriptions are the docstrings below the fields in the source. They are read on the
first request for the document, so importing the models stays cheap.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from http import HTTPStatus
from typing import Any, cast, get_args

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from penstock.gateway.model.answers import ErrorAnswer
from penstock.gateway.model.base import ID_PATTERN, ActionRequest, Role
from penstock.gateway.reading.filter_fields import FIELDS

REF = "#/components/schemas/{model}"
OCTETS, EVENTS, HTML, TEXT = "application/octet-stream", "text/event-stream", "text/html", "text/plain"
PATH_HELP = {
    "rid": "Id of a rollout.",
    "aid": "Id of an attempt of the rollout.",
    "wid": "Name of a worker.",
    "resource": "Name of a resource.",
    "release": "Name of a release.",
    "run": "Id of a training run.",
    "server": "Name of a server of tools.",
    "upstream": "Name of an upstream of the configuration.",
    "webhook": "Name of a webhook of the configuration.",
    "question": "Id of a tool call that waits for a person.",
    "sequence": "Number of a span within its attempt, from 1.",
}


_SEQUENCE = {"type": "integer", "minimum": 1, "maximum": 999_999_999}
_ID = {"type": "string", "pattern": ID_PATTERN}


@dataclass(frozen=True)
class ApiRoute:
    """One endpoint of the control API: its address, its handler, its schemas, and the role that it needs."""

    method: str
    path: str
    name: str
    """Operation id."""
    summary: str
    answer: type[BaseModel] | str
    """Model of the answer, or its media type when it is not JSON."""
    handler: Callable[..., Any]
    """Its docstring is the endpoint's description. It is an operation, or a handler of aiohttp's (`operation`)."""
    query: type[BaseModel] | None = None
    """Model whose fields are the query parameters."""
    body: type[BaseModel] | None = None
    """Model of the request body."""
    also: type[BaseModel] | None = None
    """Model of the JSON that it may answer with instead of `answer`."""
    errors: tuple[int, ...] = ()
    """Statuses of its errors, besides those that every endpoint has."""
    public: bool = False
    """True when no key is needed."""
    reads: bool = False
    """True for a POST that changes nothing: the read key opens it, as it opens every GET."""
    least: Role | None = None
    """The least role of a key that opens it, if it does not follow from its path."""
    often: bool = False
    """True for a GET that runners send with every rollout."""
    waits: bool = False
    """True for a POST that waits for something to be there, which its client may give up."""

    @cached_property
    def operation(self) -> bool:
        """True if it is answered where it was parsed (`gateway.api.operations`)."""
        return self.often or self.body is not None

    @cached_property
    def changes(self) -> bool:
        """True if it is an operation that is finished even if its client leaves."""
        return self.body is not None and not (self.reads or self.waits)

    @cached_property
    def required_role(self) -> Role:
        """The least role of a key that opens it. Claiming runs of a rehearsal needs the same as claiming work."""
        if self.reads or self.method in ("GET", "HEAD"):
            return "read"
        if self.least is not None:
            return self.least
        released = self.path.startswith(("/api/resources/", "/api/releases/")) and self.name != "rehearse"
        return "release" if released else "operate"

    @property
    def description(self) -> str:
        """The handler's docstring, as one paragraph."""
        return " ".join((inspect.getdoc(self.handler) or "").split())

    @property
    def path_parameters(self) -> list[str]:
        """Names in braces in the path."""
        return re.findall(r"\{(\w+)", self.path)


def document(routes: Sequence[ApiRoute], version: str) -> dict[str, Any]:
    """The OpenAPI document of these routes."""
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    key = {"description": "The admin key, when one is configured; the read key opens what changes nothing."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock control API", "version": version, "description": _introduction()},
        "paths": paths,
        "components": {
            "schemas": _schemas(routes),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", **key},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key", **key},
            },
        },
        "security": [{"bearer": []}, {"header": []}, {}],
    }


def _introduction() -> str:
    fields = ", ".join(f"`{name}` ({field.help})" for name, field in FIELDS["spans"].items())
    return (
        "Reads the tape of a Penstock gateway. Lists are paged: hand a page's `next` back as `cursor`; a page may be "
        "short, even empty, and still have a `next`, because a selective filter stops after a bounded number of spans."
        '\n\nA `filter` is a list of terms such as `status:failed model:qwen* latency>2s text~"timeout"`, all of which '
        "must hold. `:` compares with `*` and `?` as wildcards (anywhere in `text`, `raw` and `input`), `=` "
        "and `!=` exactly, `~` asks for a part of the text, "
        "`>`, `>=`, `<` and `<=` compare numbers, latencies (us ms s m h d) and times. A leading `-` or `not` negates, "
        f"commas list alternatives. Fields: {fields}, `metadata.KEY` (a key of the rollout's metadata)."
    )


def _operation(route: ApiRoute) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "description": route.description,
        "parameters": [*_path_parameters(route), *_query_parameters(route)],
        "responses": {"200": _answer(route), **{str(status): _error(status) for status in error_statuses(route)}},
    }
    if route.body is not None:
        # A body that can only give a reason may be left out.
        operation["requestBody"] = {"required": route.body is not ActionRequest, "content": _json(route.body)}
    if route.public:
        operation["security"] = [{}]
    return operation


def error_statuses(route: ApiRoute) -> list[int]:
    """Every status of 400 and above that an endpoint may answer with."""
    checked = (400,) if route.query or route.body or route.path_parameters else ()
    found = (404,) if route.path_parameters else ()
    keyed = () if route.public else (401,)
    typed = (413, 415) if route.body else ()
    return sorted({*checked, *found, *keyed, 403, *typed, 431, *route.errors})


def _path_parameters(route: ApiRoute) -> Iterator[dict[str, Any]]:
    for name in route.path_parameters:
        schema = _SEQUENCE if name == "sequence" else _ID
        yield {"name": name, "in": "path", "required": True, "description": PATH_HELP[name], "schema": schema}


def _query_parameters(route: ApiRoute) -> Iterator[dict[str, Any]]:
    if route.query is None:
        return
    schema = route.query.model_json_schema(ref_template=REF)
    docs = field_docs(route.query)
    for name, about in schema.get("properties", {}).items():
        about.pop("title", None)
        required = name in schema.get("required", ())
        yield {"name": name, "in": "query", "required": required, "description": docs.get(name, ""), "schema": about}


def _answer(route: ApiRoute) -> dict[str, Any]:
    text = {"schema": {"type": "string"}}
    content = {route.answer: text} if isinstance(route.answer, str) else _json(route.answer)
    return {"description": route.summary, "content": content | (_json(route.also) if route.also else {})}


def _error(status: int) -> dict[str, Any]:
    return {"description": HTTPStatus(status).phrase, "content": _json(ErrorAnswer)}


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REF.format(model=model.__name__)}}}


def _schemas(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    """Schemas of all models that occur, with the docstrings of their fields as descriptions."""
    answers = [m for route in routes for m in (route.answer, route.also) if isinstance(m, type)]
    bodies = [route.body for route in routes if route.body is not None]
    wanted = [(m, "serialization") for m in (*answers, ErrorAnswer)] + [(m, "validation") for m in bodies]
    _, top = models_json_schema(list(dict.fromkeys(wanted)), ref_template=REF)  # pyright: ignore[reportArgumentType]
    schemas: dict[str, Any] = top["$defs"]
    _close(schemas)
    for model in models_within([m for m, _ in wanted]):
        _describe(schemas.get(model.__name__, {}), field_docs(model))
    return schemas


def _close(schema: Any) -> None:
    """Forbid other names where names have a pattern; pydantic's schema does not."""
    if isinstance(schema, dict):
        found = cast(dict[str, Any], schema)
        if "patternProperties" in found:
            found["additionalProperties"] = False
        for inner in found.values():
            _close(inner)
    elif isinstance(schema, list):
        for inner in cast(list[Any], schema):
            _close(inner)


def _describe(schema: dict[str, Any], docs: dict[str, str]) -> None:
    for name, about in schema.get("properties", {}).items():
        about.pop("title", None)
        if name in docs:
            about["description"] = docs[name]


def models_within(models: Sequence[type[BaseModel]]) -> set[type[BaseModel]]:
    """These models and all models in their fields."""
    found: set[type[BaseModel]] = set()
    waiting: list[Any] = list(models)
    while waiting:
        annotation = waiting.pop()
        if not (inspect.isclass(annotation) and issubclass(annotation, BaseModel)):
            waiting.extend(get_args(annotation))
        elif annotation not in found:
            found.add(annotation)
            waiting.extend(field.annotation for field in annotation.model_fields.values())
    return found


def field_docs(model: type[BaseModel]) -> dict[str, str]:
    """The docstrings below each field of a model and of the models it extends, by field."""
    docs: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel) and cls is not BaseModel:
            docs.update(_own_field_docs(cls))
    return docs


def _own_field_docs(cls: type[BaseModel]) -> Iterator[tuple[str, str]]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                yield name, " ".join(doc.split())
            case _:
                pass


# The control API as one HTML page for people: made from its OpenAPI document, without scripts, nothing fetched. Pages
# by Scalar, Redoc or Swagger UI are scripts: fetched from elsewhere, or megabytes in each installation.

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
