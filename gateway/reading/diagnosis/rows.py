"""Groups the calls of an attempt into rows of training data, with the reason why each row begins. Pure.

`penstock doctor` and `penstock samples` both use it, so they cannot disagree. Calls are merged by the engine's own
tokens: a call whose prompt begins with the exact tokens of an earlier call's prompt and answer extends that row
(`TurnTree`), among the calls of one agent. Tokens decide what is merged; messages explain why a call was not. A call
that begins a row is compared with the earlier call of its agent whose conversation shares the most messages with it:

* `first`: it shares nothing but system messages with anything: a new conversation, a sub-agent.
* `forked`: the conversation was continued before, or is asked again from an earlier point, or has several answers.
* `retokenised`: the messages go on but the tokens differ, from within the earlier answer on.
* `template`: the messages go on but the tokens differ within the earlier prompt, or because the answer's reasoning was
  taken out: the chat template writes the past in another way.
* `compacted`: it keeps a part of the conversation and replaces what was said after it.

Only digests are kept, so a diagnosis does not grow with the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from penstock.gateway.model.codes import SequenceStart
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Message, Part, Turn
from penstock.gateway.wire.dialects.parts import fingerprint
from penstock.gateway.wire.dialects.tokens import common_prefix, length

# The turn tree: it records which call continues which, with branches, sub-agents, parallel calls and choices. Pure.
#
# A node is one choice of one call. It continues the choice whose prompt-and-answer is the longest prefix of its own
# prompt. Prefixes are found by their digests, so a long attempt costs one pass over its prompts and no comparison of
# pairs, and nothing of its tokens or messages is kept. The caller defines the prefixes: exact tokens (`rows`), or
# messages where there are no tokens (`adapters.chat`).
#
# Each node has at most one child that continues it: the one with the most calls below it, the earliest of equals.
# Parents and such children make chains, every node is in exactly one, and all other children begin a chain of their
# own. Where equal answers were given twice (parallel calls), their continuations are spread over them.
#
# Nodes refer to their parents and not to their children: cycles of nodes would keep the bytes of calls in memory
# until the garbage collector looks for cycles, which many megabytes in a few objects do not trigger.

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


Lack: TypeAlias = Literal["no_token_ids", "empty", "no_logprobs"]
Ids: TypeAlias = bytes | memoryview
"""Token ids as bytes of 32-bit integers."""
SYSTEM: Final = (b'["system"', b'["developer"')
"""Beginnings of the fingerprints of messages that several conversations may share."""
_ASSISTANT: Final = b'["assistant"'


class TrainableTokens(NamedTuple):
    """The tokens of a choice that can be trained on."""

    choice: int
    prompt: Ids
    ids: Ids


class CallMessages(NamedTuple):
    """The fingerprints of a call's messages and answers."""

    story: tuple[bytes, ...]
    """Fingerprints of the request's messages, without the empty ones of messages that clients drop."""
    replies: dict[int, bytes]
    """Fingerprints of the answers by the index of their choice; empty for an answer without content."""
    thought: frozenset[int]
    """Indices of choices with hidden reasoning, which most templates remove from earlier turns."""


@dataclass(frozen=True, slots=True)
class TrainingRow(Generic[C]):
    """Choices that form one sequence of tokens."""

    nodes: list[TurnNode[C]]
    begins: SequenceStart
    near: C | None
    """The call that the row's messages continue, if the tokens differ."""


def call_messages(turn: Turn | None) -> CallMessages:
    """The fingerprints of a call; empty ones where it cannot be read."""
    if turn is None:
        return CallMessages((), {}, frozenset())
    story = tuple(said for said in map(fingerprint, turn.messages) if said)
    thought = frozenset(one.index for one in turn.choices if reasoning_parts(one.message))
    return CallMessages(story, {one.index: fingerprint(one.message) for one in turn.choices}, thought)


def reasoning_parts(message: Message) -> list[Part]:
    """The parts of an answer that are hidden reasoning."""
    return [part for part in message.parts if part.type == "reasoning"]


def lacks(given: bool, ids: int, scored: bool) -> Lack | None:
    """The first thing that a choice lacks to be trained on; None for nothing. `given`: whether the engine gave ids of
    prompt and answer; `scored`: whether each id has a log-probability."""
    if not given:
        return "no_token_ids"
    return None if ids and scored else "no_logprobs" if ids else "empty"


def superseded(good: Iterable[Span]) -> set[int]:
    """Sequences of good calls that their client repeated: of a call and its retries only the newest good one counts,
    because the client waited for that answer."""
    every = [(span.retry_of or span.sequence, span.sequence) for span in good]
    newest = dict(every)
    return {sequence for first, sequence in every if newest[first] != sequence}


class RowBuilder(Generic[C]):
    """The rows of an attempt. Calls that may be trained on are added in the order of their sequences."""

    def __init__(self, prompt_of: Callable[[C, int], Ids]) -> None:
        """`prompt_of`: returns the ids of the prompt of an earlier call and choice once more."""
        self._prompt_of = prompt_of
        self._agents: dict[str | None, _AgentRows[C]] = {}

    def add(self, call: C, agent: str | None, said: CallMessages, spelt: Sequence[TrainableTokens]) -> None:
        """Adds a call with its choices that can be trained on."""
        self._agents.setdefault(agent, _AgentRows(self._prompt_of)).add(call, said, spelt)

    def build(self) -> list[TrainingRow[C]]:
        """All rows, agent by agent in the order of their first calls."""
        return [row for agent in self._agents.values() for row in agent.rows()]


class _AgentRows(Generic[C]):
    def __init__(self, prompt_of: Callable[[C, int], Ids]) -> None:
        self._prompt_of = prompt_of
        self._tree: TurnTree[C] = TurnTree()
        self._lengths: set[int] = set()
        """Lengths in bytes of all prompts, and of all sequences that can be continued."""
        self._asked: set[bytes] = set()
        """Digests of prompts."""
        self._told: dict[bytes, tuple[TurnNode[C], int, bool]] = {}
        """By digest of the beginning of a conversation: the first node with it, the number of that one's messages with
        its answer, and whether it has hidden reasoning."""
        self._answers: set[bytes] = set()
        self._begins: dict[TurnNode[C], tuple[SequenceStart, C | None]] = {}

    def add(self, call: C, said: CallMessages, spelt: Sequence[TrainableTokens]) -> None:
        before = [self._prefixes(one.prompt) for one in spelt]
        after = [digests((one.prompt, one.ids)) for one in spelt]
        first, repeats = not self._tree.nodes, [any(one in self._asked for one in prefixes) for prefixes in before]
        choices = [TurnChoice(one.choice, a, b[-1]) for one, a, b in zip(spelt, before, after, strict=True)]
        nodes = self._tree.add(call, choices)
        for at, (node, one) in enumerate(zip(nodes, spelt, strict=True)):
            alone = at == 0 and node.parent is None
            self._begins[node] = self._why(said.story, one, first, repeats[at]) if alone else ("forked", None)
        for node, one, (asked, _) in zip(nodes, spelt, after, strict=True):
            self._asked.add(asked)
            self._lengths |= {len(one.prompt), len(one.prompt) + len(one.ids)}
            self._remember(node, said)

    def rows(self) -> Iterable[TrainingRow[C]]:
        for chain in self._tree.chains():
            yield TrainingRow(chain, *self._begins[chain[0]])

    def _prefixes(self, prompt: Ids) -> list[bytes]:
        cuts = [size for size in sorted(self._lengths) if size <= len(prompt)]
        return digests(prompt[a:b] for a, b in pairwise([0, *cuts]))

    def _remember(self, node: TurnNode[C], said: CallMessages) -> None:
        reply = said.replies.get(node.choice)
        whole = [*said.story, *([reply] if reply else [])]
        for digest in message_digests(whole):
            self._told.setdefault(digest, (node, len(whole), node.choice in said.thought))
        self._answers |= {reply} if reply else set()

    def _why(
        self, story: Sequence[bytes], spelt: TrainableTokens, first: bool, repeats: bool
    ) -> tuple[SequenceStart, C | None]:
        """The reason why a row begins with a choice that continues no tokens. `repeats`: whether its prompt begins with
        an earlier prompt."""
        if first:
            return "first", None
        if not story:
            return ("forked" if repeats else "first"), None
        shared = [digest for digest in message_digests(story) if digest in self._told]
        count = len(shared)
        if all(message.startswith(SYSTEM) for message in story[:count]):
            return ("compacted" if any(one in self._answers for one in story) else "first"), None
        node, messages, thought = self._told[shared[-1]]
        if count == messages:
            return ("template" if thought or self._rewritten(node, spelt) else "retokenised"), node.call
        asked_again = count == len(story) or story[count - 1].startswith(_ASSISTANT)
        return ("forked" if asked_again else "compacted"), None

    def _rewritten(self, node: TurnNode[C], spelt: TrainableTokens) -> bool:
        """True if the tokens differ within the earlier prompt."""
        old = bytes(self._prompt_of(node.call, node.choice))
        return common_prefix(old, bytes(spelt.prompt)) < length(old)
