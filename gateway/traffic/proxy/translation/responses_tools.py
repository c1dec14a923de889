"""Tools of responses that chat completions cannot express. Pure.

A `namespace` holds functions: Codex offers the functions of sub-agents and of MCP servers so. They become functions
called `namespace__name`, in the tools, in past calls and in the choice of a tool; `namespaced_tools` maps these names
back to the agent's. A namespace's own description is dropped.

A search that the provider runs (`web_search`) is left out if other tools are on offer: its model cannot search, and
nothing else changes. Alone, or chosen, it is refused, because then it is the question.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from penstock.gateway.traffic.proxy.translation.checks import items, non_empty_text, object_field, one_of, only, refuse
from penstock.gateway.wire.dialects.loose_json import Json, obj, objs, text

TOOL: Final = frozenset({"type", "name", "description", "parameters", "strict"})
NAMESPACE: Final = frozenset({"type", "name", "description", "tools"})
SEARCHES: Final = ("web_search", "web_search_preview")
"""Prefixes of the types of a provider's search."""
_ALONE: Final = (
    "a search that the provider runs, and this model's engine has none: offer other tools, or none "
    '(Codex: web_search = "disabled" in its config.toml, or -c \'web_search="disabled"\')'
)


class NamespacedTool(NamedTuple):
    """An agent's name of a function in a namespace."""

    namespace: str
    name: str


def is_search(tool: Json) -> bool:
    """True for a search that the provider runs."""
    return (text(tool.get("type")) or "").startswith(SEARCHES)


def left_out(asked: Json) -> list[str]:
    """The types of the tools that are not passed on."""
    return [text(tool.get("type")) or "" for tool in objs(asked.get("tools")) if is_search(tool)]


def check(asked: Json) -> None:
    """Raise `ClientFault` for tools that cannot be functions."""
    names = set[str]()
    for tool, where in items(asked.get("tools") or [], "tools"):
        if is_search(tool):
            if len(objs(asked["tools"])) == len(left_out(asked)):
                refuse(f"{where}.type", f"{tool['type']!r} is {_ALONE}")
            continue
        one_of(tool.get("type"), ("function", "namespace"), f"{where}.type")
        for function, place, name in _functions(tool, where):
            _check_function(function, place)
            if name in names:
                refuse(f"{place}.name", f"there are two tools that would be called {name!r}")
            names.add(name)
    choice = obj(asked.get("tool_choice"))
    if is_search(choice):
        refuse("tool_choice.type", f"{choice['type']!r} is {_ALONE}")


def _functions(tool: Json, where: str) -> Iterator[tuple[Json, str, str]]:
    """Yield functions, each with its place and its name in chat completions."""
    if tool.get("type") != "namespace":
        yield tool, where, text(tool.get("name")) or ""
        return
    only(tool, NAMESPACE, (), f"{where}.")
    space = non_empty_text(tool.get("name"), f"{where}.name")
    for function, place in items(tool.get("tools"), f"{where}.tools"):
        yield function, place, qualified_name(space, text(function.get("name")) or "")


def _check_function(tool: Json, where: str) -> None:
    one_of(tool.get("type"), ("function",), f"{where}.type")
    only(tool, TOOL, (), f"{where}.")
    non_empty_text(tool.get("name"), f"{where}.name")
    object_field(tool, "parameters", f"{where}.")


def qualified_name(space: str, name: str) -> str:
    """The name of a namespace's function in chat completions."""
    return f"{space}{'' if space.endswith('__') else '__'}{name}"


def namespaced_tools(asked: Json) -> Mapping[str, NamespacedTool]:
    """Functions of namespaces, by their names in chat completions. Past calls may name functions that are not on offer
    now."""
    tools = [(tool, one) for tool in objs(asked.get("tools")) for one in objs(tool.get("tools"))]
    return {
        qualified_name(space["name"], one["name"]): NamespacedTool(space["name"], one["name"]) for space, one in tools
    }


def flatten_namespaces(asked: Json) -> Json:
    """A copy of the request with functions only."""
    made = dict(asked)
    if objs(asked.get("tools")):
        made["tools"] = [
            one | {"name": name}
            for tool in objs(asked["tools"])
            if not is_search(tool)
            for one, _, name in _functions(tool, "")
        ]
    if isinstance(asked.get("input"), list):
        made["input"] = [_named(item) for item in asked["input"]]
    if isinstance(asked.get("tool_choice"), dict):
        made["tool_choice"] = _named(asked["tool_choice"])
    return made


def _named(item: Json) -> Json:
    """A call, or a choice, with its function's name in chat completions."""
    space, name = text(obj(item).get("namespace")), text(obj(item).get("name"))
    if not space or not name:
        return item
    return {key: value for key, value in item.items() if key != "namespace"} | {"name": qualified_name(space, name)}
