"""The offer of a recording: the beginning of a session, and the lists of tools, prompts and resources. Pure.

For one server the recorded answers are played. Answers that were not recorded, and answers for several servers
together, are made here from the tape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

from penstock.console.mcp_server.replay.replay_calls import ReplayCall, fields, result_of, target_of
from penstock.gateway.wire.dialects.loose_json import arr, obj, objs, text
from penstock.gateway.wire.dialects.mcp import CALL

DISCOVER: Final = "server/discover"
INITIALIZE: Final = "initialize"
LISTS: Final = {
    "tools/list": ("tools", "name"),
    "prompts/list": ("prompts", "name"),
    "resources/list": ("resources", "uri"),
    "resources/templates/list": ("resourceTemplates", "uriTemplate"),
}
"""Method -> the member of its result that holds the list, and the unique member of an element."""
_USES: Final = {CALL: "tools/list", "prompts/get": "prompts/list", "resources/read": "resources/list"}
_CAPABILITIES: Final = {"tools": "tools", "prompts": "prompts", "resources": "resources", "completion": "completions",
                        "logging": "logging"}  # fmt: skip
"""First part of a method -> the capability that declares it."""
_VERSION: Final = "io.modelcontextprotocol/protocolVersion"
_INFO: Final = "io.modelcontextprotocol/serverInfo"
_LAST_WITH_SESSIONS: Final = "2025-11-25"
NAME: Final = "penstock-replay"


class ReplayCatalog:
    """The tools, prompts, resources and capabilities of the recorded servers, one or several."""

    def __init__(self, calls: Sequence[ReplayCall]) -> None:
        self._calls = calls
        self.servers = list(dict.fromkeys(call.server for call in calls))
        self._recorded = {call.method for call in calls if "result" in fields(call.answer or b"")}

    def collisions(self) -> Iterator[tuple[str, str, list[str]]]:
        """(kind, name, servers) of every name that several servers have."""
        for method, (what, _) in LISTS.items():
            owners: dict[str, list[str]] = {}
            for server in self.servers:
                for name in dict.fromkeys(self._names(server, method)):
                    owners.setdefault(name, []).append(server)
            yield from ((what, name, who) for name, who in owners.items() if len(who) > 1)

    def make_result(self, method: str, params: Any) -> dict[str, Any] | None:
        """A result for a request whose recorded answer cannot be played; None if there is none."""
        if len(self.servers) == 1 and method in self._recorded:
            return None
        if method == INITIALIZE:
            return self._initialize(params)
        if method == DISCOVER:
            return self._discover() if self.modern else None
        if method in LISTS and obj(params).get("cursor") is None:
            return self._list(method)
        return {} if method == "ping" else None

    @property
    def modern(self) -> bool:
        """True if all servers were used in a revision without sessions."""
        return all(self._versions(server) for server in self.servers)

    def _versions(self, server: str) -> list[str]:
        """The revisions without sessions that a server knows."""
        found = list[str]()
        for call in self._of(server):
            if call.method == DISCOVER:
                found += [one for one in arr(obj(result_of(call)).get("supportedVersions")) if isinstance(one, str)]
            elif (version := text(obj(obj(call.params).get("_meta")).get(_VERSION))) is not None:
                found.append(version)
        return [one for one in dict.fromkeys(found) if one > _LAST_WITH_SESSIONS]

    def _initialize(self, params: Any) -> dict[str, Any]:
        asked = text(obj(params).get("protocolVersion")) or _LAST_WITH_SESSIONS
        recorded = [one for said in self._said(INITIALIZE) if (one := text(said.get("protocolVersion"))) is not None]
        version = min(recorded) if recorded else min(asked, _LAST_WITH_SESSIONS)
        return {"protocolVersion": version, "serverInfo": self._info(), **self._abilities()}

    def _discover(self) -> dict[str, Any]:
        versions = [self._versions(server) for server in self.servers]
        common = [one for one in versions[0] if all(one in others for others in versions)]
        return {
            "supportedVersions": common or versions[0],
            "_meta": {_INFO: self._info()},
            **self._abilities(),
            **_FRESH,
        }

    def _abilities(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        said = list[str]()
        for server in self.servers:
            opened = [*self._said(INITIALIZE, server), *self._said(DISCOVER, server)]
            declared = [obj(one.get("capabilities")) for one in opened] or [self._used(server)]
            for one in declared:
                _merge(found, one)
            words = next(filter(None, (text(one.get("instructions")) for one in opened)), None)
            if words:
                said.append(words if len(self.servers) == 1 else f"{server}: {words}")
        return {"capabilities": found, **({"instructions": "\n\n".join(said)} if said else {})}

    def _used(self, server: str) -> dict[str, Any]:
        parts = (call.method.partition("/")[0] for call in self._of(server))
        return {_CAPABILITIES[part]: {} for part in parts if part in _CAPABILITIES}

    def _info(self) -> dict[str, Any]:
        if len(self.servers) == 1:
            for said in (*self._said(INITIALIZE), *self._said(DISCOVER)):
                info = obj(said.get("serverInfo")) or obj(obj(said.get("_meta")).get(_INFO))
                if info:
                    return info
        return {"name": NAME, "version": "1"}

    def _list(self, method: str) -> dict[str, Any] | None:
        what, unique = LISTS[method]
        found = list[Any]()
        for server in self.servers:
            listed = self._listed(server, method)
            # Of a tool that was called without being listed only the name is known.
            found += listed or [_unlisted(what, unique, name) for name in dict.fromkeys(self._names(server, method))]
        known = found or any(call.method == method for call in self._calls)
        return {what: found, **(_FRESH if self.modern else {})} if known else None

    def _names(self, server: str, method: str) -> Iterator[str]:
        """The names that a server has listed, and those that were used."""
        for one in objs(self._listed(server, method)):
            if (name := text(one.get(LISTS[method][1]))) is not None:
                yield name
        for call in self._of(server):
            if _USES.get(call.method) == method and (name := target_of(call)) is not None:
                yield name

    def _listed(self, server: str, method: str) -> list[Any]:
        """The pages of the list when it was last read."""
        pages = list[Any]()
        for call in self._of(server):
            result = result_of(call) if call.method == method else None
            if result is not None:
                pages = pages if obj(call.params).get("cursor") is not None else []
                pages = pages + arr(result.get(LISTS[method][0]))
        return pages

    def _said(self, method: str, server: str | None = None) -> list[dict[str, Any]]:
        calls = [call for call in self._calls if call.method == method and server in (None, call.server)]
        return [result for call in calls if (result := result_of(call)) is not None]

    def _of(self, server: str) -> Iterator[ReplayCall]:
        return (call for call in self._calls if call.server == server)


_FRESH: Final = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
"""Additional members of a result in a revision without sessions."""


def _unlisted(what: str, unique: str, name: str) -> dict[str, Any]:
    one = {"name": name} | {unique: name}
    return one | {"inputSchema": {"type": "object"}} if what == "tools" else one


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], cast("dict[str, Any]", value))
        else:
            into[name] = into.get(name) or value
