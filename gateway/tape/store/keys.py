"""Key layout of the tape: pure and order-preserving, so that one range scan lists one attempt in order.

| database   | key                                 | value                                                          |
|------------|-------------------------------------|----------------------------------------------------------------|
| `meta`     | name                                | format version, signing secret                                 |
| `rollouts` | rollout NUL                         | the rollout, with its number: the cursor of its creation       |
| `tasks`    | rollout NUL                         | its input and metadata, as JSON                                |
| `order`    | `order`                             | numbers (u64) of all rollouts, sorted: newest-first lists      |
| `attempts` | number (u64) attempt NUL            | the attempt with its sums, and the cursors of its last block   |
| `index`    | number (u64) attempt NUL block (u32) | cursors (u64) of the summaries of 32 sequences, 0 while it runs |
| `open`     | rollout NUL attempt NUL seq (u32)   | a call that ran at the last commit: summary, body, process       |
| `styles`   | number (u64)                        | the values that the summaries with this number share            |
| `log`      | its last cursor (u64)               | a segment: the summaries of one commit and what else it changed |
| `bodies`   | number of its first body (u64)      | a segment: the bodies that one commit wrote, numbered on       |
| `queue`    | mode (u8) urgency (u32) order (u64) | key of a rollout that waits to be claimed, the next one first  |
| `live`     | rollout NUL attempt NUL             | nothing: attempts that were claimed and have not ended         |
| `unclaimed` | number (u64) attempt NUL           | nothing: attempts that run and that nobody has claimed         |
| `rewards`  | rollout NUL attempt NUL key         | sequence (u32) of the reward that was given this key           |
| `workers`  | name                                | the worker                                                     |
| `resources` | resource NUL version NUL           | a version of it                                                |
| `stable`   | resource                            | the version that new rollouts get                              |
| `releases` | release                             | the release                                                    |
| `audit`    | release NUL number (u32)            | a link of its audit chain                                      |
| `assigned` | release NUL number (u32)            | a rollout that takes part                                      |
| `seen`     | release NUL number (u32)            | its outcome when it was counted                                |
| `pins`     | rollout NUL                         | its pins: the versions of resources that it gets               |
| `runs`     | run NUL                             | the training run                                               |
| `run_order` | cursor of its creation (u64)       | key of the run: newest-first lists                             |
| `run_configs` | run NUL                          | its configuration, as JSON                                     |
| `run_metrics` | run NUL number (u32)             | a block of its points                                          |
| `run_events` | run NUL time (u64) hash (8 bytes) | something that happened in it                                  |
| `run_trees` | run NUL                            | its candidates, as JSON                                        |
| `definitions` | server NUL hash (32 bytes or none) | versions of what it lists; with a hash, one definition        |
| `audit_log` | number (u64)                       | a change by the control API: who, what, why                    |
| `coverage` | resource                            | its coverage: calls that matched and missed                    |
| `units`    | release NUL hash NUL                | the assignment of a unit, and the rollouts of it that count    |
| `told`     | release                             | the last link (u32) of which deliveries were made              |
| `deliveries` | number (u64)                      | the delivery of one link to one webhook, and its result        |
| `uses`     | number of a shared body (u64) number of a body (u64) | the parts of the first that the second uses   |
| `holes`    | database NUL its last number (u64)  | its first: numbers of the log or of bodies that were forgotten |
| `forgotten` | rollout NUL                        | when and why it was forgotten, and whether it is wiped          |
| `held`     | rollout NUL                         | who keeps it, and why                                          |
| `budgets`  | budget NUL unit/window/per NUL owner NUL   | its use and reservations in a window                    |
| `reservations` | that key, process (8 bytes) number (u64) | the reservation of a running call                     |
| `reservers` | process (8 bytes)                  | time (u64) until which its reservations hold                   |
| `background` | name of an answer                 | the call that waits for it, or the one that has fetched it     |
| `guesses`  | name of an answer                   | its estimate in budgets until it is fetched, as JSON           |
| `batches`  | kind (1 byte) name of a batch, a file ... | the call that made or fetched it, the results kept       |
| `hosted`   | kind (1 byte) name of a session ... | its home and agents, the events that were taken or wait        |
| `lightning` | kind (1 byte) key of a rollout, an attempt or a span, or a name | what Agent Lightning keeps besides  |

Attempts are found by the number of their rollout, because names are long and in no order: numbers grow, so that pages
are full. Integers are big-endian. Ids hold no NUL (`model.ID_PATTERN`), so `a NUL` sorts before `ab NUL` and never
mixes with it. Log and bodies are only ever appended and take whole segments: pages are full, and a commit is few
operations. The log is the change feed too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")

u32: Callable[[int], bytes] = _U32.pack
"""Returns the last part of the key of a summary or of a block of the index."""
number: Callable[[int], bytes] = _U64.pack
"""Returns a number as a key, for example of a segment of bodies or changes."""

_MIDDLE = 1 << 31

HIGHEST_SEQUENCE = 0xFFFFFFFF
HIGHEST_NUMBER = 0xFFFFFFFFFFFFFFFF


LIGHTNING_ROLLOUT, LIGHTNING_ATTEMPT, LIGHTNING_COUNTER = b"r", b"a", b"n"
"""Kinds of records of `lightning` by the key of a rollout or an attempt."""
LIGHTNING_SPAN, LIGHTNING_SEEN = b"s", b"i"
"""Kinds by the key of an attempt's record: with a sequence (u32) the span as it came, with a span id its sequence."""
LIGHTNING_SERVED, LIGHTNING_EVENT, LIGHTNING_MODELS = b"t", b"e", b"m"
"""Kinds of its server API 1.0: a rollout, an event of an attempt by its sequence, engines by the time from which they
serve models (ns)."""
LIGHTNING_RESOURCES, LIGHTNING_WORKER, LIGHTNING_LATEST = b"v", b"w", b"l"
"""Kinds by name; the last has none and holds the name of the newest resources."""


def rollout_key(rollout: str) -> bytes:
    """Return the key of a rollout, and the prefix of all that belongs to it."""
    return rollout.encode("ascii") + b"\0"


def numbered_key(name: str, number: int) -> bytes:
    """Return the key of a numbered record of a release or a run."""
    return rollout_key(name) + u32(number)


def attempt_key(rollout: str, attempt: str) -> bytes:
    """Return the key of an attempt, and the prefix of its summaries."""
    return f"{rollout}\0{attempt}\0".encode("ascii")


def queue_key(mode: int, priority: int, order: int) -> bytes:
    """Return the key of a rollout that waits in the queue: within a mode the highest priority sorts first, then the
    oldest."""
    return bytes([mode]) + _U32.pack(_MIDDLE - priority) + _U64.pack(order)


def summary_key(rollout: str, attempt: str, sequence: int) -> bytes:
    """Return the key of a span's summary."""
    return attempt_key(rollout, attempt) + u32(sequence)


def attempt_record_key(rollout: int, attempt: str) -> bytes:
    """Return the key of an attempt's record, by the number of its rollout, and the prefix of its blocks of cursors."""
    return number(rollout) + attempt.encode("ascii") + b"\0"


def attempt_of_record_key(key: bytes) -> str:
    """Return the name of the attempt from the key of its record."""
    return key[8:-1].decode("ascii")


def split_summary_key(key: bytes) -> tuple[str, str, int]:
    """Return (rollout, attempt, sequence) of a summary's key; bytes after the key are ignored."""
    rollout, attempt, rest = key.split(b"\0", 2)
    return rollout.decode("ascii"), attempt.decode("ascii"), _U32.unpack_from(rest)[0]


def summary_key_length(record: bytes) -> int:
    """Return the length of the summary key that a log record starts with."""
    return record.index(0, record.index(0) + 1) + 5


def split_attempt_key(key: bytes) -> tuple[str, str]:
    """Return (rollout, attempt) of an attempt's key."""
    rollout, attempt, _ = key.split(b"\0", 2)
    return rollout.decode("ascii"), attempt.decode("ascii")


def to_number(key: bytes) -> int:
    """The inverse of `number`; it reads the first eight bytes."""
    return _U64.unpack_from(key)[0]


def numbers(values: Sequence[int]) -> bytes:
    """Return numbers one after the other, eight bytes each."""
    return b"".join(map(_U64.pack, values))


def to_numbers(keys: bytes) -> list[int]:
    """Return the numbers that `numbers` has packed."""
    return [found for (found,) in _U64.iter_unpack(keys)]
