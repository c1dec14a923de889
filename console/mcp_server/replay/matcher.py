"""Finds the recorded call that a request asks for. Pure.

Two requests are the same if their methods and their params, as canonical JSON, are. Ignored are `_meta`, which holds
the client, the protocol and the trace (progressToken, traceparent, protocol version, capabilities, a client's own ids)
but nothing of the request's content; params that are null; empty arguments; and the difference between 1.0 and 1. Of
requests that open a session only the method counts.

A round of a multi-round request is identified by the `requestState` from the round before it. The client's
`inputResponses` may differ: a recorded round with the same ones comes first, then the others in their order.

Equal requests are answered in recorded order. After the last one, a call of a tool is refused, because its next result
is unknown. Every other request gets the last answer once more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

from penstock.console.mcp_server.replay.replay_calls import ReplayCall, target_of
from penstock.gateway.wire.dialects.loose_json import obj
from penstock.gateway.wire.dialects.mcp import CALL

OPENING: Final = ("initialize", "server/discover")
"""Methods whose params describe only the client."""
NO_METHOD, NO_PARAMS = -32601, -32602
"""JSON-RPC's codes for an unknown method and for wrong params."""
_META: Final = "_meta"
_RESPONSES: Final = "inputResponses"
_SHOWN, _LONGEST = 3, 80
_EXACT: Final = 1 << 53
"""Largest whole number up to which floats are exact."""
_NOTHING: Final = "nothing"


class ParamDifference(NamedTuple):
    """A place where two params differ."""

    pointer: str
    recorded: str
    asked: str

    def __str__(self) -> str:
        return f"{self.pointer or 'the params'} is {self.recorded} there and {self.asked} here"


@dataclass(frozen=True, slots=True)
class ReplayMiss:
    """The error for a request that was not recorded."""

    code: int
    message: str
    data: dict[str, Any]


@dataclass(slots=True)
class _EqualCalls:
    """Equal calls; `left`: those that have not been played."""

    calls: list[ReplayCall] = field(default_factory=list[ReplayCall])
    left: list[ReplayCall] = field(default_factory=list[ReplayCall])


class CallMatcher:
    """The calls of a recording, and those that have been played."""

    def __init__(self, calls: Sequence[ReplayCall]) -> None:
        self._calls = calls
        self._groups: dict[str, _EqualCalls] = {}
        for call in calls:
            group = self._groups.setdefault(key(call.method, call.params), _EqualCalls())
            group.calls.append(call)
            group.left.append(call)

    def take(self, method: str, params: Any) -> ReplayCall | ReplayMiss:
        """Returns the recorded call of a request and marks it as played."""
        group = self._groups.get(key(method, params))
        if group is None:
            return self._nothing_like_it(method, params)
        servers = sorted({call.server for call in group.calls})
        if len(servers) > 1:
            return _miss(
                NO_PARAMS,
                f"{_named(group.calls[0])} is recorded for several servers ({', '.join(servers)}): start the replay "
                "with --server NAME",
                group.calls[0],
            )
        if not group.left:
            last = group.calls[-1]
            return _played(group.calls) if method == CALL else last
        given = canonical(obj(params).get(_RESPONSES))
        found = next((one for one in group.left if canonical(obj(one.params).get(_RESPONSES)) == given), group.left[0])
        group.left.remove(found)
        return found

    def _nothing_like_it(self, method: str, params: Any) -> ReplayMiss:
        same = [call for call in self._calls if call.method == method]
        if not same:
            known = ", ".join(dict.fromkeys(call.method for call in self._calls)) or "nothing"
            return ReplayMiss(
                NO_METHOD, f"the recording has no {method[:128]}; it has: {known}", {"reason": "not_recorded"}
            )
        call, found = nearest(same, params)
        shown = "; ".join(map(str, found[:_SHOWN])) + (f"; and {len(found) - _SHOWN} more" if found[_SHOWN:] else "")
        place = "place differs" if len(found) == 1 else "places differ"
        said = f"this call is not recorded. The nearest is {_named(call)} ({call.place}), and {len(found)} {place}: "
        return _miss(NO_PARAMS, said + shown, call, differs=[one.pointer for one in found])


def key(method: str, params: Any) -> str:
    """A text that is the same for equal requests."""
    return method if method in OPENING else canonical([method, _asked(method, params), _RESPONSES in obj(params)])


def _asked(method: str, params: Any) -> Any:
    """The part of params that counts."""
    if params is not None and not isinstance(params, dict):
        return params
    kept = {name: one for name, one in obj(params).items() if name not in (_META, _RESPONSES) and one is not None}
    if method == CALL and kept.get("arguments") == {}:
        del kept["arguments"]
    return kept


def canonical(value: Any) -> str:
    """JSON that is the same for equal values."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _EXACT else value
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in cast("dict[str, Any]", value).items()}
    return [_plain(one) for one in cast("list[Any]", value)] if isinstance(value, list) else value


def nearest(calls: Iterable[ReplayCall], params: Any) -> tuple[ReplayCall, list[ParamDifference]]:
    """The call with the fewest differences, the first of several, and these. A call of the same tool is nearer than any
    other."""
    compared = [(call, _compared(call, params)) for call in calls]
    return min(compared, key=lambda one: (any(d.pointer in ("/name", "/uri") for d in one[1]), len(one[1])))


def _compared(call: ReplayCall, params: Any) -> list[ParamDifference]:
    found = list(differences(_asked(call.method, call.params), _asked(call.method, params)))
    recorded, asked = ("something" if _RESPONSES in obj(one) else _NOTHING for one in (call.params, params))
    return found if recorded == asked else [*found, ParamDifference(f"/{_RESPONSES}", recorded, asked)]


def differences(recorded: Any, asked: Any, at: str = "") -> Iterator[ParamDifference]:
    """The places where two values differ, as deep as they can be compared, as JSON pointers."""
    if isinstance(recorded, dict) and isinstance(asked, dict):
        one, other = cast("dict[str, Any]", recorded), cast("dict[str, Any]", asked)
        for name in dict.fromkeys([*one, *other]):
            place = f"{at}/{name.replace('~', '~0').replace('/', '~1')}"
            if name in one and name in other:
                yield from differences(one[name], other[name], place)
            else:
                yield ParamDifference(place, _shown(one, name), _shown(other, name))
    elif isinstance(recorded, list) and isinstance(asked, list):
        first, second = cast("list[Any]", recorded), cast("list[Any]", asked)
        for number in range(max(len(first), len(second))):
            if number < len(first) and number < len(second):
                yield from differences(first[number], second[number], f"{at}/{number}")
            else:
                pair = [_short(values[number]) if number < len(values) else _NOTHING for values in (first, second)]
                yield ParamDifference(f"{at}/{number}", *pair)
    elif canonical(recorded) != canonical(asked):
        yield ParamDifference(at, _short(recorded), _short(asked))


def _shown(values: dict[str, Any], name: str) -> str:
    return _short(values[name]) if name in values else _NOTHING


def _short(value: Any) -> str:
    said = json.dumps(value, ensure_ascii=False)
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}…"


def _played(calls: Sequence[ReplayCall]) -> ReplayMiss:
    times = "once" if len(calls) == 1 else f"{len(calls)} times"
    said = (
        f"{_named(calls[-1])} was called {times} with these arguments ({calls[-1].place} was the last), and that has "
        "been played: what it would have answered now is not known"
    )
    return _miss(NO_PARAMS, said, calls[-1])


def _named(call: ReplayCall) -> str:
    return " ".join(filter(None, (call.method, target_of(call))))


def _miss(code: int, said: str, call: ReplayCall, **more: Any) -> ReplayMiss:
    near = {"span": call.place, "server": call.server, "method": call.method}
    return ReplayMiss(code, said, {"reason": "not_recorded", "nearest": near, **more})
