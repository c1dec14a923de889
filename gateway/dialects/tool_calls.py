"""Tool calls of a chat stream, put together from what servers send: by (index, id), and by what there is of these.

    OpenAI                   an index, with the first piece an id and a name, then pieces of the arguments
    Gemini's OpenAI endpoint index 0 for all of them, each with an id of its own, whole
    several                  no index, no id or an empty one
    Hermes, MiniMax          the name with every piece; others send it in pieces, or again as a whole
    proxies                  the whole arguments once more behind their pieces, or `{}` in front of them
    Ollama and its like      arguments as an object, or before the name

A piece is looked up (`_LOOKUPS`); `_begins` then says whether it begins another call. The next shape is a row of one of
the two. A summary counts what a Turn shows, since both ask here, and a piece that only goes on costs no function call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from penstock.gateway.dialects.loose_json import Json, count, dumps, loads, obj, objs, text

BODIES: Final = ("function", "custom")
"""Where name and arguments stand; some leave the envelope out."""
ARGUMENTS: Final = ("arguments", "input", "parameters", "args")
"""What servers call them."""
_OPEN: Final = "{"
_SLOW: Final = "{ \t\r\n"
"""How a piece begins that may begin an object, after white space; so does the empty one."""
_OWN: Final = frozenset({"index", "id", *BODIES, "name", *ARGUMENTS})


class CallPieces:
    """One call, as far as it has come."""

    __slots__ = ("body", "id", "index", "more", "name", "pieces", "replaced")

    def __init__(self, index: int | None = None) -> None:
        self.index = index
        self.id: str | None = None
        self.name: str | None = None
        self.body: str = "function"
        self.pieces: list[str] = []
        self.replaced: str | None = None
        """Arguments whose place others have taken."""
        self.more: Json = {}
        """What else its pieces say."""

    @property
    def whole(self) -> bool:
        """Whether its arguments are all there: they are an object, as far as can be told."""
        return is_whole("".join(self.pieces))

    def add(self, piece: Json) -> None:
        """One more piece."""
        body, kind = body_of(piece)
        self.body = kind or self.body
        self.id = self.id or text(piece.get("id"))
        self.more |= {key: value for key, value in piece.items() if key not in _OWN and value is not None}
        self._add_name(text(body.get("name")))
        self._add_arguments(argument_of(body))

    def _add_name(self, name: str | None) -> None:
        """Names come in pieces until arguments begin. One that repeats what there is, and maybe adds to it, is no
        piece."""
        if name and (not self.name or name.startswith(self.name)):
            self.name = name
        elif name and self.name and not any(self.pieces):
            self.name += name

    def _add_arguments(self, given: Any) -> None:
        """What comes behind whole arguments and begins anew takes their place, unless it is empty."""
        if given is None or given == "":
            return
        piece = given if isinstance(given, str) else dumps(given)
        anew = not isinstance(given, str) or (self.body != "custom" and piece.lstrip().startswith(_OPEN))
        if anew and self.pieces and (self.whole or not isinstance(given, str)):
            if loads(piece) in ({}, []):
                return
            self.replaced = "".join(self.pieces)
            self.pieces.clear()
        self.pieces.append(piece)

    def made(self) -> Json:
        """As a plain answer has it."""
        said = "".join(self.pieces)
        if self.body != "custom" and len(self.pieces) > 1 and not is_whole(said) and is_whole(self.pieces[-1]):
            said = self.pieces[-1]
        fields = {"name": self.name, "input" if self.body == "custom" else "arguments": said}
        return {"id": self.id, **self.more, self.body: fields}


def is_whole(arguments: str) -> bool:
    """Whether arguments are a JSON object."""
    edges = arguments.strip()
    return edges[:1] == _OPEN and edges[-1:] == "}" and isinstance(loads(edges), dict)


def body_of(piece: Json) -> tuple[Json, str | None]:
    """What holds the name and the arguments of a call or a piece of one, and its name."""
    kind = next((name for name in BODIES if obj(piece.get(name))), None)
    return (piece, None) if kind is None else (obj(piece[kind]), kind)


def argument_of(body: Json) -> Any:
    """The arguments in it, of any type."""
    return next((body[name] for name in ARGUMENTS if body.get(name) is not None), None)


def argument_text(body: Json) -> str:
    """The same as text."""
    given = argument_of(body)
    return given if isinstance(given, str) else "" if given is None else dumps(given)


def folded_arguments(pieces: Iterable[Any]) -> str:
    """The arguments of one call whose pieces are known."""
    call = CallPieces()
    for piece in pieces:
        call.add({"function": {"arguments": piece}})
    return call.made()["function"]["arguments"]


def listed(calls: Any) -> list[Json]:
    """The calls of an answer, or those of one delta; one object stands for a list of it."""
    return objs([calls] if isinstance(calls, dict) else calls)


def folded_calls(deltas: Iterable[Any]) -> list[CallPieces]:
    """The calls that the `tool_calls` of some deltas make, in the order in which they began."""
    calls: list[CallPieces] = []
    newest = CallPieces()
    for pieces in deltas:
        touched: set[int] = set()
        given: list[Any] = pieces if pieces.__class__ is list else [pieces]
        for piece in given:
            if piece.__class__ is not dict:
                continue
            # Most only go on.
            body: Any = piece.get("function")
            if calls and body.__class__ is dict and not body.get("name") and not piece.get("id"):
                said: Any = body.get("arguments")
                if isinstance(said, str) and said[:1] not in _SLOW and piece.get("index") == newest.index:
                    newest.pieces.append(said)
                    continue
            newest = placed(calls, piece, touched)
            newest.add(piece)
            touched.add(id(newest))
    return calls


def placed(calls: list[CallPieces], piece: Json, touched: set[int]) -> CallPieces:
    """The call that a piece belongs to; a new one where it begins one. `touched`: ids of the objects of those that have
    had a piece of the same delta."""
    index, known_as = count(piece.get("index")), text(piece.get("id")) or None
    looked = (look(calls, index, known_as) for look in _LOOKUPS[index is not None, known_as is not None])
    call = next((found for found in looked if found is not None), None)
    if call is None or _begins(call, piece, index, known_as, id(call) in touched):
        call = CallPieces(index)
        calls.append(call)
    return call


def _begins(call: CallPieces, piece: Json, index: int | None, known_as: str | None, touched: bool) -> bool:
    """Whether a piece begins another call than the one that was looked up. `touched`: that has had a piece of the same
    delta."""
    body, _ = body_of(piece)
    name, given = text(body.get("name")), argument_text(body)
    other_id = bool(known_as and call.id and known_as != call.id)
    if not name or not call.name:
        # Without a name of its own it goes on, unless there is nothing to go on with.
        return other_id and (bool(name) or call.whole)
    if other_id or (index is not None and call.index is not None and index != call.index):
        # Ids that are made anew for every piece do not begin calls.
        goes_on = any(call.pieces) and name == call.name and not call.whole and not given.lstrip().startswith(_OPEN)
        return not goes_on
    if touched and (name != call.name or (index is None and known_as is None)):
        return True
    if not any(call.pieces):
        return False
    if known_as and call.id:
        return name != call.name and call.whole
    if name != call.name:
        return True
    known: Any = loads("".join(call.pieces)) if given.startswith(_OPEN) and call.whole else {}
    return bool(known) and loads(given) not in (known, {})


def _by_both(calls: Sequence[CallPieces], index: int | None, known_as: str | None) -> CallPieces | None:
    return next((one for one in reversed(calls) if one.index == index and one.id == known_as), None)


def _by_index(calls: Sequence[CallPieces], index: int | None, known_as: str | None) -> CallPieces | None:
    return next((one for one in reversed(calls) if one.index == index), None)


def _by_id(calls: Sequence[CallPieces], index: int | None, known_as: str | None) -> CallPieces | None:
    return next((one for one in reversed(calls) if one.id == known_as), None)


def _newest(calls: Sequence[CallPieces], index: int | None, known_as: str | None) -> CallPieces | None:
    return calls[-1] if calls else None


def _unindexed(calls: Sequence[CallPieces], index: int | None, known_as: str | None) -> CallPieces | None:
    """The newest, where it has no index: some give it only with the pieces that go on."""
    return calls[-1] if calls and calls[-1].index is None else None


def _nameless(calls: Sequence[CallPieces], index: int | None, known_as: str | None) -> CallPieces | None:
    """The newest, where neither id nor name of it have come."""
    return calls[-1] if calls and calls[-1].id is None and calls[-1].name is None else None


_Lookup = Callable[[Sequence[CallPieces], int | None, str | None], CallPieces | None]
_LOOKUPS: Final[dict[tuple[bool, bool], tuple[_Lookup, ...]]] = {
    (True, True): (_by_both, _by_index, _by_id),
    (True, False): (_by_index, _unindexed),
    (False, True): (_by_id, _nameless),
    (False, False): (_newest,),
}
"""Where the call of a piece is looked for, by whether the piece has an index and an id."""
