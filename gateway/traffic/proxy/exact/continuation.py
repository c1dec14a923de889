"""Finds the tokens that a chat template writes after a model's turn, to continue a session. Pure.

A session is what the engine has read and generated, turn by turn: tokens before an answer, the answer, tokens before
the next one. The template writes the same conversation anew (`whole`), with the past answers as it would write them.
These may differ from the very tokens: text is tokenised another way, white space is stripped, JSON is written anew,
reasoning is left out. The tokens to send after the last answer stand in `whole` behind the end of that answer's turn.

Nothing is guessed. All tokens between two answers must stand in `whole` as they were, in their order, so that only
answers were written anew. The last token of the answer must be the one with which the template ends a turn, whatever
the turn says: with another text in its place the same token stands there (`turn_tail`). And that token must stand in
the turn once, so the model did not write it as text. Otherwise the session cannot be continued.

Ids are bytes of 32-bit integers, as in `gateway.wire.dialects.token_ids`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.gateway.wire.dialects.token_ids import WIDTH


class TurnTokens(NamedTuple):
    """One turn of a session."""

    before: bytes
    """Ids between the answer before and this one, the opening of this turn included; at first, the whole prompt."""
    answer: bytes
    """Ids that the model made."""
    ended: bool
    """True when the model ended its turn itself: its last id says so, and is no text."""


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A conversation as the template renders it now; token ids."""

    whole: bytes
    """All of it, with the opening of the next turn."""
    upto: bytes
    """Up to the end of the last answer's turn, without an opening."""
    opening: bytes
    """The ids at the end that make the model speak."""
    tail: bytes
    """The ids after the token that ends a turn of the model, whatever its text; see `turn_tail`."""


def continuation_ids(pieces: Sequence[TurnTokens], written: RenderedConversation) -> bytes | None:
    """The ids to send after the last answer; None if the session cannot be continued."""
    last, opening = pieces[-1], written.opening
    if not last.ended or not written.whole.endswith(opening):
        return None
    rest, end = _rest(pieces, written.whole, opening), last.answer[-WIDTH:]
    if rest is None or turn_tail(pieces, written.upto, opening) != written.tail:
        return None
    at = find_ids(rest, end)
    found = rest[at + WIDTH :] if at >= 0 else b""
    # There must be something new after the answer: otherwise the model would be asked to speak twice.
    return found if found.startswith(written.tail) and len(found) > len(written.tail) + len(opening) else None


def turn_tail(pieces: Sequence[TurnTokens], ids: bytes, opening: bytes) -> bytes | None:
    """The ids that the template puts after the token that ends the last answer. `ids`: the conversation up to the end
    of the turn of that answer or of another one in its place. None unless that token stands in the turn exactly
    once."""
    rest = _rest(pieces, ids, opening)
    return None if rest is None else _only(rest, pieces[-1].answer[-WIDTH:])


def _rest(pieces: Sequence[TurnTokens], ids: bytes, opening: bytes) -> bytes | None:
    """The ids from the beginning of the last answer; None unless all ids between answers stand in `ids`."""
    at, end = 0, b""
    for number, piece in enumerate(pieces):
        between = end + piece.before[: len(piece.before) - len(opening)]
        # A turn ends where its end token first stands; of a turn that was cut off only the tokens after it are known.
        found = find_ids(ids, end or between, at) if number else 0
        if found < 0 or not piece.before.endswith(opening) or not ids.startswith(between, found):
            return None
        at, end = found + len(between), piece.answer[-WIDTH:] if piece.ended else b""
    return ids[at:]


def _only(ids: bytes, end: bytes) -> bytes | None:
    """The ids after the id `end`; None unless it stands there exactly once."""
    at = find_ids(ids, end)
    return None if at < 0 or find_ids(ids, end, at + WIDTH) >= 0 else ids[at + WIDTH :]


def find_ids(ids: bytes, some: bytes, start: int = 0) -> int:
    """The byte offset of `some` in `ids`, at a whole id; -1 if it is not there."""
    at = ids.find(some, start)
    while at >= 0 and at % WIDTH:
        at = ids.find(some, at + 1)
    return at
