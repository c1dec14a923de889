"""The turn tree: which call continues which, in branches, sub-agents, parallel calls and several choices.

A node is one choice of one call. It continues the choice whose prompt-and-answer is the longest prefix of its own
prompt. A `Trace` says what a prefix is: the exact tokens (`Tokens`), or messages where there are no tokens (`Story`).
Prefixes are found by hash, so a long attempt costs one pass over its prompts and no comparison of pairs.

Each node has at most one child that continues it (`chosen`): the one with the most calls below it, the earliest of
equals. Parents and chosen children make chains, every node is in exactly one, and all other children begin a chain of
their own. Where equal answers were given twice (parallel calls), their continuations are spread over them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from penstock.adapters.turns import Call
from penstock.gateway.model.turn import Message, Part

if TYPE_CHECKING:
    from penstock.adapters.tokens import Output


@dataclass(eq=False, slots=True)
class Node:
    """One choice of one call."""

    call: Call
    choice: int
    """Index of the choice."""
    parent: Node | None = None
    """The choice it goes on from."""
    children: list[Node] = field(default_factory=list["Node"], repr=False)
    """The choices that go on from it."""
    depth: int = 1
    """Nodes on the longest way down from it, itself included."""

    @property
    def chosen(self) -> Node | None:
        """The child that continues it."""
        return max(self.children, key=lambda child: child.depth, default=None)

    @property
    def continues(self) -> bool:
        """True when it is its parent's chosen child."""
        return self.parent is not None and self.parent.chosen is self


class Trace(Protocol):
    """How calls are compared. A digest stands for a sequence of tokens or of messages from the very beginning."""

    def before(self, call: Call, choice: int) -> Sequence[bytes]:
        """Digests of the prefixes of the prompt that may have been seen, shortest first."""
        ...

    def after(self, call: Call, choice: int) -> bytes | None:
        """Digest of prompt and answer; None when nothing can continue it."""
        ...


def grow(choices: Iterable[tuple[Call, Sequence[int]]], trace: Trace) -> list[Node]:
    """Nodes for these choices of these calls, in the given order, which must be that of the calls' sequences."""
    nodes: list[Node] = []
    seen: dict[bytes, list[Node]] = {}
    for call, indices in choices:
        made = [Node(call, index, _parent(seen, trace.before(call, index))) for index in indices]
        for node in made:
            if node.parent is not None:
                node.parent.children.append(node)
            if (digest := trace.after(call, node.choice)) is not None:
                seen.setdefault(digest, []).append(node)
        nodes += made
    for node in reversed(nodes):
        if node.parent is not None:
            node.parent.depth = max(node.parent.depth, node.depth + 1)
    return nodes


def _parent(seen: dict[bytes, list[Node]], prefixes: Sequence[bytes]) -> Node | None:
    """The longest known prefix; of equals the newest of those with the fewest children."""
    found = next((seen[digest] for digest in reversed(prefixes) if digest in seen), ())
    return min(reversed(found), key=lambda node: len(node.children), default=None)


def chains(nodes: Iterable[Node]) -> Iterator[list[Node]]:
    """The nodes as chains, each from its beginning, in the order of the beginnings."""
    for node in nodes:
        if not node.continues:
            yield list(_down(node))


def _down(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.chosen


class Tokens:
    """Exact tokens, of choices that the engine gave ids for."""

    def __init__(self) -> None:
        self._lengths: set[int] = set()

    def before(self, call: Call, choice: int) -> list[bytes]:
        """Prefixes of the lengths that were seen so far; tokens."""
        prompt = output_of(call, choice).prompt
        cuts = [size for size in sorted(self._lengths) if size <= len(prompt)]
        return _digests(prompt[a:b].data for a, b in pairwise([0, *cuts]))

    def after(self, call: Call, choice: int) -> bytes:
        """Of prompt and answer, whose length is remembered."""
        output = output_of(call, choice)
        self._lengths.add(len(output.prompt) + len(output.ids))
        return _digests((output.prompt.data, output.ids.data))[-1]


class Story:
    """Messages, by their fingerprints: only role, text, tool calls and results count, not how they are written."""

    def before(self, call: Call, choice: int) -> list[bytes]:
        """A prefix for each message."""
        return _digests(map(_framed, call.story))

    def after(self, call: Call, choice: int) -> bytes | None:
        """None for an answer without content."""
        said = call.replies.get(choice)
        return _digests(map(_framed, [*call.story, said]))[-1] if said else None


def message_of(call: Call, choice: int) -> Message | None:
    """An answer as a message; None when there is none of this index."""
    return next((it.message for it in (call.turn.choices if call.turn else ()) if it.index == choice), None)


def output_of(call: Call, choice: int) -> Output:
    """An answer as tokens; raises StopIteration when there is none of this index."""
    return next(output for output in call.outputs or () if output.choice == choice)


def reasons_aloud(message: Message | None) -> list[Part]:
    """The parts of an answer that are hidden reasoning, which most templates take out of earlier turns."""
    return [part for part in (message.parts if message else ()) if part.type == "reasoning"]


def _framed(message: bytes) -> bytes:
    return b"%d:%s" % (len(message), message)


def _digests(pieces: Iterable[bytes | memoryview]) -> list[bytes]:
    """The digest of what there is after each piece."""
    whole, found = blake2b(digest_size=16), list[bytes]()
    for piece in pieces:
        whole.update(piece)
        found.append(whole.digest())
    return found
