"""Compares the newest SDKs with what Penstock knows of their wire formats: `make wire`.

    .venv/bin/python .ci/wire.py SITE_PACKAGES...

Each argument is a folder with installed SDKs (openai, anthropic, google-genai, botocore); what is not there is left
out. Their sources are read, not run. Three kinds of names are taken from them:

    path     of a request: must have an owner in `gateway.wire.dialects.family.OWNERS`
    event    the `type` of an event of a stream, or of a piece in one: must stand in a table of `gateway.wire.dialects`
    usage    a field of a count of tokens: the same

A name that stands nowhere is printed, and the exit status is 1. A name that is known and not read stands in
`.ci/wire.toml`, one row a name, with the reason. A row that no name needs any more is printed, too.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

from penstock.gateway.wire.dialects import unread_content
from penstock.gateway.wire.dialects.family import owners

HERE: Final = Path(__file__).parent
KNOWN: Final = HERE / "wire.toml"
DIALECTS: Final = Path(unread_content.__file__).parent
Kind = Literal["path", "event", "usage"]
Names = dict[Kind, dict[str, str]]
"""By kind, the names of SDKs, each with the file that has it."""

_CALL: Final = re.compile(
    r"(?:path_template\(|(?:\._(?:get|post|put|patch|delete|get_api_list)|\.websocket_connect)\()\s*[fr]*\"(/[^\"?]*)"
)
_GOOGLE: Final = re.compile(r"\bpath=\s*\"(/[^\"?]+)\"|\bpath = '([^'?]+)[?']")
_TYPE: Final = re.compile(r"^    type: (?:Optional\[)?Literal\[\s*([^\]]+)\]", re.MULTILINE)
_EVENT_TYPE: Final = re.compile(r"event_type: .*?Literal\[\s*([^\]]+)\]")
_QUOTED: Final = re.compile(r"[\"']([^\"']+)[\"']")
_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _parsed(source: str) -> ast.Module:
    """The tree of a module. Python 3.11 may fail where another thread parses meanwhile (cpython#106905)."""
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)


def _fields(source: str, wanted: Callable[[str], bool]) -> Iterator[str]:
    """The fields of the classes whose names are wanted."""
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.ClassDef) and wanted(node.name):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id


def _stainless(sdk: Path, events: Mapping[str, str], usage: Iterable[str]) -> Iterator[tuple[Kind, str, Path]]:
    """Names of an SDK of OpenAI's or Anthropic's: they are laid out alike. `events`: modules (patterns) whose classes
    are events; `usage`: modules (patterns) with counts."""
    for file in sorted((sdk / "resources").rglob("*.py")):
        for found in _CALL.finditer(_text(file)):
            yield "path", found[1], file
    for pattern, only in events.items():
        for file in sorted((sdk / "types").glob(pattern)):
            for found in _TYPE.finditer(_text(file)):
                for name in _QUOTED.findall(found[1]):
                    if re.match(only, name):
                        yield "event", name, file
    for pattern in usage:
        for file in sorted((sdk / "types").glob(pattern)):
            for name in _fields(_text(file), lambda it: True):
                yield "usage", name, file


def openai(site: Path) -> Iterator[tuple[Kind, str, Path]]:
    events = {"responses/response_*event.py": r"response\.", "image_*_event.py": r"", "audio/*_event.py": r""}
    return _stainless(site / "openai", events, ("completion_usage.py", "responses/response_usage.py"))


def anthropic(site: Path) -> Iterator[tuple[Kind, str, Path]]:
    events = {
        "raw_*_event.py": r"", "*_delta.py": r"", "beta/beta_raw_*_event.py": r"",
        "beta/beta_*_delta.py": r"(?!.*agent)",
    }  # fmt: skip
    usage = (
        "usage.py", "message_delta_usage.py", "server_tool_usage.py", "cache_creation.py", "output_tokens_details.py",
        "beta/beta_usage.py", "beta/beta_message_delta_usage.py", "beta/beta_server_tool_usage.py",
        "beta/beta_cache_creation.py", "beta/beta_*_iteration_usage.py",
    )  # fmt: skip
    return _stainless(site / "anthropic", events, usage)


def google(site: Path) -> Iterator[tuple[Kind, str, Path]]:
    sdk = site / "google" / "genai"
    for file in sorted([*sdk.glob("*.py"), *(sdk / "_gaos").glob("*.py")]):
        for found in _GOOGLE.finditer(_text(file)):
            path = (found[1] or found[2]).replace("{api_version}", "v1beta")
            path = re.sub(r"^\{(model|name)\}", "models/m" if ":" in path else "files/f", path)
            if path == "/":
                continue  # of a socket, which is named elsewhere
            yield "path", path if path.startswith("/") else f"/v1beta/{path}", file
    for file in sorted((sdk / "_gaos" / "types" / "interactions").glob("*.py")):
        for found in _EVENT_TYPE.finditer(_text(file)):
            for name in _QUOTED.findall(found[1]):
                if name != "UNKNOWN":
                    yield "event", name, file
    if (sdk / "types.py").exists():
        wanted = {"GenerateContentResponseUsageMetadata", "ModalityTokenCount"}
        for name in _fields(_text(sdk / "types.py"), wanted.__contains__):
            if name.startswith("_"):
                continue
            head, *rest = name.split("_")
            yield "usage", head + "".join(word.title() for word in rest), sdk / "types.py"
    for file in sorted((sdk / "_gaos" / "types" / "interactions").glob("usage.py")):
        for name in _fields(_text(file), "Usage".__eq__):
            yield "usage", name, file


def botocore(site: Path) -> Iterator[tuple[Kind, str, Path]]:
    for file in sorted((site / "botocore" / "data" / "bedrock-runtime").glob("*/service-2.json.gz")):
        service = json.loads(gzip.decompress(file.read_bytes()))
        for operation in service["operations"].values():
            yield "path", operation["http"]["requestUri"], file
        for shape in ("ConverseStreamOutput", "ContentBlockDelta"):
            names = service["shapes"][shape]["members"]
            yield from (("event", name, file) for name in names if not name.endswith("Exception"))
        yield from (("usage", name, file) for name in service["shapes"]["TokenUsage"]["members"])


SDKS: Final = (openai, anthropic, google, botocore)


def names_of(sites: Iterable[Path]) -> Names:
    """The names that the SDKs in these folders have."""
    found: Names = {"path": {}, "event": {}, "usage": {}}
    for site in sites:
        for sdk in SDKS:
            for kind, name, file in sdk(site):
                found[kind].setdefault(name, str(file.relative_to(site)))
    return found


def words(folder: Path = DIALECTS) -> frozenset[str]:
    """The words of the texts in the modules of the dialects: names in tables stand there, alone or in rows."""
    found = set[str]()
    for file in folder.glob("*.py"):
        for node in ast.walk(_parsed(_text(file))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(_WORD.findall(node.value))
    return frozenset(found)


def is_known(kind: Kind, name: str, tables: frozenset[str]) -> bool:
    """True if a table has the name."""
    if kind == "path":
        return bool(owners(re.sub(r"\{\+?([A-Za-z_]+)\}", r"\1", name)))
    return name in tables or any(name in kinds for kinds in unread_content.KINDS.values())


def covers(row: str, name: str) -> bool:
    """True if a row is about a name. One that ends with `/...` is about all paths below."""
    return row == name or (row.endswith("/...") and f"{name}/".startswith(row[:-3]))


def unknown(found: Names, allowed: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Lines about the names that neither a table nor the list has."""
    tables = words()
    return [
        f"{kind} {name!r} ({file}) is in no table: read it, or give a reason in .ci/wire.toml"
        for kind, names in found.items()
        for name, file in sorted(names.items())
        if not is_known(kind, name, tables) and not any(covers(row, name) for row in allowed.get(kind, ()))
    ]


def superfluous(found: Names, allowed: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Lines about the rows of the list that no name of these SDKs needs any more."""
    tables = words()
    missing = {kind: [name for name in names if not is_known(kind, name, tables)] for kind, names in found.items()}
    return [
        f".ci/wire.toml: {kind} {row!r} can go: a table has it, or no SDK has"
        for kind, names in missing.items()
        for row in allowed.get(kind, ())
        if not any(covers(row, name) for name in names)
    ]


def main(sites: list[Path]) -> int:
    found = names_of(sites)
    if not all(found.values()):
        print(f"nothing to compare: {', '.join(map(str, sites))} has no SDK whose sources are laid out as expected")
        return 2
    allowed = tomllib.loads(_text(KNOWN))
    lines = unknown(found, allowed)
    print(*lines, *superfluous(found, allowed), sep="\n")
    print(", ".join(f"{len(names)} names of kind {kind}" for kind, names in found.items()), "compared")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main([Path(one) for one in sys.argv[1:]]))
