"""Why a chain of calls begins, and does not continue an earlier call.

Tokens decide what is merged; messages explain why a call was not. A call that begins a chain is compared with the
earlier call of its agent whose conversation shares the most messages with it:

* `first`: it shares nothing but system messages with anything: a new conversation, a sub-agent.
* `forked`: the conversation was continued before, or is asked again from an earlier point, or has several answers.
* `retokenised`: the messages go on but the tokens differ, from within the earlier answer on.
* `template`: the messages go on but the tokens differ within the earlier prompt, or because the answer's reasoning was
  taken out: the chat template writes the past in another way.
* `compacted`: it keeps a part of the conversation and replaces what was said after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from penstock.adapters.report import Start
from penstock.adapters.tokens import Ids
from penstock.adapters.tree import Node, message_of, output_of, reasons_aloud

SYSTEM: Final = (b'["system"', b'["developer"')
"""How fingerprints of messages begin that several conversations may share."""


class _Shared(NamedTuple):
    """An earlier node and how many messages it shares."""

    messages: int
    node: Node
    said: list[bytes]
    """Its messages and its answer."""


def why(node: Node, earlier: Sequence[Node]) -> Start:
    """Why a node that continues nothing begins a chain. `earlier`: the nodes before it, of its agent, in order."""
    if node.parent is not None or any(other.call is node.call for other in earlier):
        return "forked"
    if not earlier:
        return "first"
    said = node.call.story
    if not said:
        return _by_tokens(node, earlier)
    best = max((_shared(said, other) for other in earlier), key=lambda shared: shared.messages, default=None)
    if best is None or all(message.startswith(SYSTEM) for message in best.said[: best.messages]):
        return _anywhere(said, earlier)
    if best.messages == len(best.said):
        return _differs(node, best.node)
    asked_again = best.messages == len(said) or best.said[best.messages - 1].startswith(b'["assistant"')
    return "forked" if asked_again else "compacted"


def _shared(said: Sequence[bytes], other: Node) -> _Shared:
    answer = other.call.replies.get(other.choice)
    theirs = [*other.call.story, *([answer] if answer else [])]
    pairs = enumerate(zip(said, theirs, strict=False))
    return _Shared(next((at for at, (a, b) in pairs if a != b), min(len(said), len(theirs))), other, theirs)


def _anywhere(said: Sequence[bytes], earlier: Sequence[Node]) -> Start:
    """`compacted` if some earlier answers of the conversation are kept although its beginning is gone, else `first`."""
    old = {answer for other in earlier if (answer := other.call.replies.get(other.choice))}
    return "compacted" if old & set(said) else "first"


def _by_tokens(node: Node, earlier: Sequence[Node]) -> Start:
    """The reason when there are no messages: the same prompt, or a continuation of an earlier prompt."""
    prompt = _prompt(node)
    asked_again = any(len(p := _prompt(other)) <= len(prompt) and same(p, prompt) == len(p) for other in earlier)
    return "forked" if asked_again else "first"


def _differs(node: Node, before: Node) -> Start:
    if reasons_aloud(message_of(before.call, before.choice)):
        return "template"
    old = _prompt(before)
    return "template" if same(old, _prompt(node)) < len(old) else "retokenised"


def _prompt(node: Node) -> Ids:
    return output_of(node.call, node.choice).prompt


def same(a: Ids, b: Ids) -> int:
    """How many tokens two sequences begin with in common."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size
