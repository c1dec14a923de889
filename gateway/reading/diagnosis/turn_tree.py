"""The turn tree: it records which call continues which, with branches, sub-agents, parallel calls and choices. Pure.

A node is one choice of one call. It continues the choice whose prompt-and-answer is the longest prefix of its own
prompt. Prefixes are found by their digests, so a long attempt costs one pass over its prompts and no comparison of
pairs, and nothing of its tokens or messages is kept. The caller defines the prefixes: exact tokens (`rows`), or
messages where there are no tokens (`adapters.chat`).

Each node has at most one child that continues it: the one with the most calls below it, the earliest of equals. Parents
and such children make chains, every node is in exactly one, and all other children begin a chain of their own. Where
equal answers were given twice (parallel calls), their continuations are spread over them.

Nodes refer to their parents and not to their children: cycles of nodes would keep the bytes of calls in memory until
the garbage collector looks for cycles, which many megabytes in a few objects do not trigger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar

C = TypeVar("C")
"""The caller's data of a call."""


class TurnChoice(NamedTuple):
    """One choice of a call, as digests of the conversation from the very beginning."""

    choice: int
    before: Sequence[bytes]
    """Digests of the prefixes of the prompt that may have been seen, shortest first."""
    after: bytes | None
    """Digest of prompt and answer; None when nothing can continue it."""


@dataclass(eq=False, slots=True)
class TurnNode(Generic[C]):
    """One choice of one call."""

    call: C
    choice: int
    """Index of the choice."""
    parent: TurnNode[C] | None = None
    """The choice that it continues; None for a beginning."""
    children: int = 0
    """Number of choices that continue it."""
    depth: int = 1
    """Number of nodes on the longest way down from it, itself included."""


class TurnTree(Generic[C]):
    """The turn tree of an attempt. It grows call by call, in the order of the calls' sequences."""

    def __init__(self) -> None:
        self.nodes: list[TurnNode[C]] = []
        self._seen: dict[bytes, list[TurnNode[C]]] = {}

    def add(self, call: C, choices: Sequence[TurnChoice]) -> list[TurnNode[C]]:
        """Adds a call; returns the nodes of its choices."""
        made = [TurnNode(call, one.choice, self._parent(one.before)) for one in choices]
        for node, one in zip(made, choices, strict=True):
            if node.parent is not None:
                node.parent.children += 1
            if one.after is not None:
                self._seen.setdefault(one.after, []).append(node)
        self.nodes += made
        return made

    def _parent(self, prefixes: Sequence[bytes]) -> TurnNode[C] | None:
        """The node with the longest known prefix; of equal ones the newest of those with the fewest children."""
        found = next((self._seen[digest] for digest in reversed(prefixes) if digest in self._seen), ())
        return min(reversed(found), key=lambda node: node.children, default=None)

    def chains(self) -> Iterator[list[TurnNode[C]]]:
        """The nodes as chains, each from its beginning, in the order of the beginnings. No call may be added
        afterwards."""
        for node in reversed(self.nodes):
            if node.parent is not None:
                node.parent.depth = max(node.parent.depth, node.depth + 1)
        chosen: dict[TurnNode[C], TurnNode[C]] = {}
        for node in self.nodes:
            if node.parent is not None and node.depth > (chosen[node.parent].depth if node.parent in chosen else 0):
                chosen[node.parent] = node
        for node in self.nodes:
            if node.parent is None or chosen[node.parent] is not node:
                yield list(_down(node, chosen))


def _down(node: TurnNode[C] | None, chosen: Mapping[TurnNode[C], TurnNode[C]]) -> Iterator[TurnNode[C]]:
    while node is not None:
        yield node
        node = chosen.get(node)


def digests(pieces: Iterable[bytes | memoryview]) -> list[bytes]:
    """The digests of the content up to the end of each piece."""
    whole, found = blake2b(digest_size=16), list[bytes]()
    for piece in pieces:
        whole.update(piece)
        found.append(whole.digest())
    return found


def message_digests(messages: Iterable[bytes]) -> list[bytes]:
    """The digests of the conversation up to each message, from the fingerprints of messages."""
    return digests(b"%d:%s" % (len(message), message) for message in messages)
