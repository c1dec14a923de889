"""Rollouts of clients that say nothing: a request that continues a conversation belongs where the conversation began.

Agents resend the whole conversation with every call. A request whose first messages are all of an earlier request,
followed by the answer to it, continues that one. Equal openings by different agents are told apart by the answer. State
lives in memory, as digests, bounded: the longest untouched conversations are forgotten first, and of equal openings the
oldest. After a restart a conversation goes on as a new rollout.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from hashlib import blake2b
from itertools import accumulate

_REMEMBERED = 20_000
_EQUAL = 64


def new_rollout() -> str:
    """A fresh name that sorts by time."""
    return f"i-{time.time_ns() // 1_000_000:011x}-{secrets.token_hex(4)}"


class Conversations:
    """Which rollout the conversations of late belong to.

    Not kept over a restart: the first call after it of a client that says nothing opens a new rollout.
    """

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        self._open: OrderedDict[bytes, list[tuple[str, bytes]]] = OrderedDict()
        self._responses: OrderedDict[str, str] = OrderedDict()

    def find(self, messages: list[bytes]) -> str | None:
        """The rollout that these messages continue; None when they open a new one."""
        prefixes = _prefixes(messages)
        for length in range(len(messages) - 1, 0, -1):
            candidates = self._open.get(prefixes[length - 1])
            if candidates:
                answer = _digest(messages[length])
                answered = [rollout for rollout, reply in candidates if reply == answer]
                if answered:
                    return answered[-1]
                return candidates[0][0] if len(candidates) == 1 else None
        return None

    def remember(self, messages: list[bytes], reply: bytes, rollout: str) -> None:
        """This conversation, answered so, belongs to the rollout."""
        if not messages:
            return
        key = _prefixes(messages)[-1]
        candidates = self._open.setdefault(key, [])
        candidates.append((rollout, _digest(reply)))
        del candidates[:-_EQUAL]
        self._open.move_to_end(key)
        while len(self._open) > self._remembered:
            self._open.popitem(last=False)

    def find_response(self, response_id: str) -> str | None:
        """The rollout of a `previous_response_id`."""
        return self._responses.get(response_id)

    def remember_response(self, response_id: str, rollout: str) -> None:
        """The response with this id belongs to the rollout."""
        self._responses[response_id] = rollout
        while len(self._responses) > self._remembered:
            self._responses.popitem(last=False)


def _digest(message: bytes) -> bytes:
    return blake2b(message, digest_size=16).digest()


def _prefixes(messages: list[bytes]) -> list[bytes]:
    """A digest of every prefix of the conversation."""
    return list(
        accumulate(messages, lambda before, one: blake2b(one, key=before[:32], digest_size=32).digest(), initial=b"p")
    )[1:]
