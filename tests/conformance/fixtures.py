"""What the suite expects an MCP server to offer: tools, prompts and resources of given names and contents.

Written after the suite's own requirements, which every scenario prints when it fails. Tools that ask the client for
more before they answer are in `rounds`, those that do something to the connection in `server`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import struct
import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.shared.exceptions import MCPError

Json = dict[str, Any]
Context = ServerRequestContext[Any, Any]
Arguments = Mapping[str, Any]
Tool = Callable[[Context, Arguments], Awaitable[types.CallToolResult]]

NOTHING: Json = {"type": "object", "properties": {}}
PAUSE_S = 0.05
"""Between the messages of one tool: they must be seen to come one by one."""


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _red_pixel() -> str:
    head = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\x00\xff\x00\x00")
    chunks = _chunk(b"IHDR", head) + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunks).decode()


def _silence() -> str:
    samples = bytes(16)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, 8000, 16000, 2, 16)
    data = b"WAVE" + form + struct.pack("<4sI", b"data", len(samples)) + samples
    return base64.b64encode(struct.pack("<4sI", b"RIFF", len(data)) + data).decode()


PNG, WAV = _red_pixel(), _silence()


def text(words: str) -> types.TextContent:
    return types.TextContent(text=words)


def said(words: str) -> types.CallToolResult:
    return types.CallToolResult(content=[text(words)])


def embedded(uri: str, mime_type: str, words: str) -> types.EmbeddedResource:
    return types.EmbeddedResource(resource=types.TextResourceContents(uri=uri, mime_type=mime_type, text=words))


def capable(ctx: Context, capability: str) -> bool:
    """Whether the client has declared the capability."""
    declared = ctx.session.client_capabilities
    return declared is not None and getattr(declared, capability) is not None


# Tools that only answer.


async def simple_text(ctx: Context, arguments: Arguments) -> types.CallToolResult:
    return said("This is a simple text response for testing.")


async def image(ctx: Context, arguments: Arguments) -> types.CallToolResult:
    return types.CallToolResult(content=[types.ImageContent(data=PNG, mime_type="image/png")])


async def audio(ctx: Context, arguments: Arguments) -> types.CallToolResult:
    return types.CallToolResult(content=[types.AudioContent(data=WAV, mime_type="audio/wav")])


async def resource(ctx: Context, arguments: Arguments) -> types.CallToolResult:
    content = embedded("test://embedded-resource", "text/plain", "This is an embedded resource content.")
    return types.CallToolResult(content=[content])


async def mixed(ctx: Context, arguments: Arguments) -> types.CallToolResult:
    data = json.dumps({"test": "data", "value": 123}, separators=(",", ":"))
    return types.CallToolResult(
        content=[
            text("Multiple content types test:"),
            types.ImageContent(data=PNG, mime_type="image/png"),
            embedded("test://mixed-content-resource", "application/json", data),
        ]
    )


async def failing(ctx: Context, arguments: Arguments) -> types.CallToolResult:
    return types.CallToolResult(content=[text("This tool intentionally returns an error for testing")], is_error=True)


async def with_header(ctx: Context, arguments: Arguments) -> types.CallToolResult:
    return said(f"Region: {arguments['region']}")


async def any_arguments(ctx: Context, arguments: Arguments) -> types.CallToolResult:
    return said(json.dumps(dict(arguments)))


# Tools that tell the client something while they run.


async def logging(ctx: Context, arguments: Arguments) -> types.CallToolResult:
    for words in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        # Deprecated since 2026-07-28, as sampling is; what the revision before asks for.
        send = ctx.session.send_log_message  # pyright: ignore[reportDeprecated]
        await send("info", words, related_request_id=ctx.request_id)
        await asyncio.sleep(PAUSE_S)
    return said("Three messages were logged.")


async def progress(ctx: Context, arguments: Arguments) -> types.CallToolResult:
    for done in (0, 50, 100):
        await ctx.session.report_progress(done, 100)
        await asyncio.sleep(PAUSE_S)
    return said("Progress was reported three times.")


async def needs_sampling(ctx: Context, arguments: Arguments) -> types.CallToolResult:
    if capable(ctx, "sampling"):
        return said("The client can sample.")
    missing: Json = {"requiredCapabilities": {"sampling": {}}}
    raise MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, "This tool needs a client that samples", missing)


# Tools that ask the client back on the same connection: 2025-11-25 and before.


async def sampling(ctx: Context, arguments: Arguments) -> types.CallToolResult:
    if not capable(ctx, "sampling"):
        return types.CallToolResult(content=[text("The client does not sample.")], is_error=True)
    question = types.SamplingMessage(role="user", content=text(arguments["prompt"]))
    ask = ctx.session.create_message  # pyright: ignore[reportDeprecated]
    answer = await ask([question], max_tokens=100, related_request_id=ctx.request_id)
    content = answer.content
    return said(f"LLM response: {content.text if isinstance(content, types.TextContent) else content}")


async def _elicited(ctx: Context, message: str, properties: Json, required: list[str]) -> types.ElicitResult:
    schema = {"type": "object", "properties": properties, "required": required}
    return await ctx.session.elicit_form(message, schema, related_request_id=ctx.request_id)


async def elicitation(ctx: Context, arguments: Arguments) -> types.CallToolResult:
    fields = {
        "username": {"type": "string", "description": "User's response"},
        "email": {"type": "string", "description": "User's email address"},
    }
    answer = await _elicited(ctx, arguments["message"], fields, ["username", "email"])
    return said(f"User response: action={answer.action}, content={json.dumps(answer.content)}")


async def elicitation_defaults(ctx: Context, arguments: Arguments) -> types.CallToolResult:
    fields = {
        "name": {"type": "string", "default": "John Doe"},
        "age": {"type": "integer", "default": 30},
        "score": {"type": "number", "default": 95.5},
        "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
        "verified": {"type": "boolean", "default": True},
    }
    answer = await _elicited(ctx, "Please look through these values", fields, [])
    return said(f"Elicitation completed: action={answer.action}, content={json.dumps(answer.content)}")


def _titled(*titles: str) -> list[Json]:
    return [{"const": f"value{number}", "title": title} for number, title in enumerate(titles, 1)]


async def elicitation_enums(ctx: Context, arguments: Arguments) -> types.CallToolResult:
    options, old = ["option1", "option2", "option3"], ["opt1", "opt2", "opt3"]
    fields = {
        "untitledSingle": {"type": "string", "enum": options},
        "titledSingle": {"type": "string", "oneOf": _titled("First Option", "Second Option", "Third Option")},
        "legacyEnum": {"type": "string", "enum": old, "enumNames": ["Option One", "Option Two", "Option Three"]},
        "untitledMulti": {"type": "array", "items": {"type": "string", "enum": options}},
        "titledMulti": {"type": "array", "items": {"anyOf": _titled("First Choice", "Second Choice", "Third Choice")}},
    }
    answer = await _elicited(ctx, "Please choose", fields, [])
    return said(f"Elicitation completed: action={answer.action}, content={json.dumps(answer.content)}")


def _strings(*names: str) -> Json:
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": list(names)}


REGION: Json = {
    "type": "object",
    "properties": {"region": {"type": "string", "x-mcp-header": "Region"}},
    "required": ["region"],
}
RICH: Json = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}
"""A schema with the words of JSON Schema that a server which rebuilds schemas loses."""

TOOLS: dict[str, tuple[Tool, Json]] = {
    # The first takes no arguments: the suite calls it to see which headers are accepted.
    "test_simple_text": (simple_text, NOTHING),
    "test_image_content": (image, NOTHING),
    "test_audio_content": (audio, NOTHING),
    "test_embedded_resource": (resource, NOTHING),
    "test_multiple_content_types": (mixed, NOTHING),
    "test_error_handling": (failing, NOTHING),
    "test_tool_with_logging": (logging, NOTHING),
    "test_logging_tool": (logging, NOTHING),
    "test_tool_with_progress": (progress, NOTHING),
    "test_missing_capability": (needs_sampling, NOTHING),
    "test_sampling": (sampling, _strings("prompt")),
    "test_elicitation": (elicitation, _strings("message")),
    "test_elicitation_sep1034_defaults": (elicitation_defaults, NOTHING),
    "test_elicitation_sep1330_enums": (elicitation_enums, NOTHING),
    "test_header_parameter": (with_header, REGION),
    "json_schema_2020_12_tool": (any_arguments, RICH),
}


# Prompts.


def named(name: str, *arguments: str) -> types.Prompt:
    wanted = [types.PromptArgument(name=given, description=given, required=True) for given in arguments]
    return types.Prompt(name=name, description=name.replace("_", " "), arguments=wanted)


PROMPTS = [
    named("test_simple_prompt"),
    named("test_prompt_with_arguments", "arg1", "arg2"),
    named("test_prompt_with_embedded_resource", "resourceUri"),
    named("test_prompt_with_image"),
]


def prompt(name: str, arguments: Mapping[str, str]) -> types.GetPromptResult:
    """The messages of a prompt."""
    content: list[types.ContentBlock]
    match name:
        case "test_simple_prompt":
            content = [text("This is a simple prompt for testing.")]
        case "test_prompt_with_arguments":
            content = [text(f"Prompt with arguments: arg1='{arguments['arg1']}', arg2='{arguments['arg2']}'")]
        case "test_prompt_with_embedded_resource":
            attached = embedded(arguments["resourceUri"], "text/plain", "Embedded resource content for testing.")
            content = [attached, text("Please process the embedded resource above.")]
        case "test_prompt_with_image":
            picture = types.ImageContent(data=PNG, mime_type="image/png")
            content = [picture, text("Please analyze the image above.")]
        case _:
            raise MCPError(types.INVALID_PARAMS, f"There is no prompt called {name}")
    return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=part) for part in content])


# Resources.

RESOURCES = [
    types.Resource(name="static text", uri="test://static-text", mime_type="text/plain"),
    types.Resource(name="static binary", uri="test://static-binary", mime_type="image/png"),
    types.Resource(name="watched", uri="test://watched-resource", mime_type="text/plain"),
]
TEMPLATES = [
    types.ResourceTemplate(
        name="data of an id", uri_template="test://template/{id}/data", mime_type="application/json"
    ),
]


def read(uri: str) -> types.ReadResourceResult:
    """The contents of a resource."""
    if uri == "test://static-binary":
        return types.ReadResourceResult(contents=[types.BlobResourceContents(uri=uri, mime_type="image/png", blob=PNG)])
    if filled := re.fullmatch(r"test://template/([^/]+)/data", uri):
        found = filled[1]
        words = json.dumps({"id": found, "templateTest": True, "data": f"Data for ID: {found}"})
        mime_type = "application/json"
    elif uri == "test://static-text":
        words, mime_type = "This is the content of the static text resource.", "text/plain"
    elif uri == "test://watched-resource":
        words, mime_type = "This resource can be watched.", "text/plain"
    else:
        raise MCPError(types.INVALID_PARAMS, "Resource not found", {"uri": uri})
    contents = types.TextResourceContents(uri=uri, mime_type=mime_type, text=words)
    return types.ReadResourceResult(contents=[contents])
