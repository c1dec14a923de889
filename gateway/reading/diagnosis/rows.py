"""Groups the calls of an attempt into rows of training data, with the reason why each row begins. Pure.

`penstock doctor` and `penstock samples` both use it, so they cannot disagree. Calls are merged by the engine's own
tokens: a call whose prompt begins with the exact tokens of an earlier call's prompt and answer extends that row
(`turn_tree`), among the calls of one agent. Tokens decide what is merged; messages explain why a call was not. A call
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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Generic, Literal, NamedTuple, TypeAlias

from penstock.gateway.model.finding_codes import SequenceStart
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Message, Part, Turn
from penstock.gateway.reading.diagnosis.turn_tree import C, TurnChoice, TurnNode, TurnTree, digests, message_digests
from penstock.gateway.wire.dialects.parts import fingerprint
from penstock.gateway.wire.dialects.token_ids import common_prefix, length

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
