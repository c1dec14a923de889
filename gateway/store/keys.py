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
| `styles`   | number (u64)                        | what the summaries that name the number have in common          |
| `log`      | its last cursor (u64)               | a segment: the summaries of one commit and what else it changed |
| `bodies`   | number of its first body (u64)      | a segment: the bodies that one commit wrote, numbered on       |
| `queue`    | mode (u8) urgency (u32) order (u64) | key of the rollout: what waits to be claimed, the next first   |
| `live`     | rollout NUL attempt NUL             | nothing: attempts that were claimed and have not ended         |
| `unclaimed` | number (u64) attempt NUL           | nothing: attempts that run and that nobody has claimed         |
| `rewards`  | rollout NUL attempt NUL key         | sequence (u32) of the reward that was given this key           |
| `workers`  | name                                | the worker                                                     |
| `resources` | resource NUL version NUL           | a version of it                                                |
| `stable`   | resource                            | which version new rollouts get                                 |
| `releases` | release                             | the release                                                    |
| `audit`    | release NUL number (u32)            | a link of its audit chain                                      |
| `assigned` | release NUL number (u32)            | a rollout that takes part                                      |
| `seen`     | release NUL number (u32)            | what was seen of it when it was counted                        |
| `pins`     | rollout NUL                         | the versions that it was given                                 |
| `runs`     | run NUL                             | the training run                                               |
| `run_order` | cursor of its creation (u64)       | key of the run: newest-first lists                             |
| `run_configs` | run NUL                          | what it was started with, as JSON                              |
| `run_metrics` | run NUL number (u32)             | a block of its points                                          |
| `run_events` | run NUL time (u64) hash (8 bytes) | something that happened in it                                  |
| `run_trees` | run NUL                            | its candidates, as JSON                                        |
| `definitions` | server NUL hash (32 bytes or none) | versions of what it lists; with a hash, one definition        |
| `audit_log` | number (u64)                       | a change that was asked for: who, what, why                    |
| `coverage` | resource                            | whom it reaches: calls that matched and missed                 |
| `units`    | release NUL hash NUL                | the assignment of a unit, and the rollouts of it that count    |
| `told`     | release                             | the last link (u32) that webhooks are told of                  |
| `deliveries` | number (u64)                      | what one webhook is told of one link, and what came of it      |
| `uses`     | number of a shared body (u64) number of a body (u64) | what the second takes of the first            |
| `holes`    | database NUL its last number (u64)  | its first: numbers of the log or of bodies that were forgotten |
| `forgotten` | rollout NUL                        | that it was forgotten: when, why, and what of it is still there |
| `held`     | rollout NUL                         | who wants it kept, and why                                     |
| `budgets`  | budget NUL how it is counted NUL whose NUL | what is used and reserved of it in a window             |
| `reservations` | that key, process (8 bytes) number (u64) | what a call that runs may use of it                   |
| `reservers` | process (8 bytes)                  | until when (u64) what it has reserved stays so                 |
| `background` | name of an answer                 | the call that waits for it, or the one that has fetched it     |
| `guesses`  | name of an answer                   | what is counted of it in budgets until it is fetched, as JSON  |
| `batches`  | kind (1 byte) name of a batch, a file ... | who has made or fetched it, which results are kept       |

Attempts are found by the number of their rollout, because names are long and in no order: numbers grow, so that pages
are full. Integers are big-endian. Ids hold no NUL (`model.ID_PATTERN`), so `a NUL` sorts before `ab NUL` and never
mixes with it. Log and bodies are only ever appended and take whole segments: pages are full, and a commit is few
operations. The log is the change feed too.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")

_MIDDLE = 1 << 31

HIGHEST_SEQUENCE = 0xFFFFFFFF
HIGHEST_NUMBER = 0xFFFFFFFFFFFFFFFF


def rollout_key(rollout: str) -> bytes:
    """Key of a rollout, and prefix of all that belongs to it."""
    return rollout.encode("ascii") + b"\0"


def numbered_key(name: str, number: int) -> bytes:
    """Key of one of the numbered records of a release or a run."""
    return rollout_key(name) + u32(number)


def attempt_key(rollout: str, attempt: str) -> bytes:
    """Key of an attempt, and prefix of its summaries."""
    return f"{rollout}\0{attempt}\0".encode("ascii")


def queue_key(mode: int, priority: int, order: int) -> bytes:
    """Key of a rollout that waits: of one mode the highest priority first, then the oldest."""
    return bytes([mode]) + _U32.pack(_MIDDLE - priority) + _U64.pack(order)


def summary_key(rollout: str, attempt: str, sequence: int) -> bytes:
    """Key of a span's summary."""
    return attempt_key(rollout, attempt) + u32(sequence)


def place_key(rollout: int, attempt: str) -> bytes:
    """Key of an attempt's record, by the number of its rollout, and prefix of its blocks of cursors."""
    return number(rollout) + attempt.encode("ascii") + b"\0"


def attempt_of_place(key: bytes) -> str:
    """The attempt that the key of its record names."""
    return key[8:-1].decode("ascii")


def split_head_key(key: bytes) -> tuple[str, str, int]:
    """(rollout, attempt, sequence) of a summary's key; whatever follows the key is ignored."""
    rollout, attempt, rest = key.split(b"\0", 2)
    return rollout.decode("ascii"), attempt.decode("ascii"), _U32.unpack_from(rest)[0]


def summary_key_length(record: bytes) -> int:
    """Length of the summary key that a log record starts with."""
    return record.index(0, record.index(0) + 1) + 5


def split_attempt_key(key: bytes) -> tuple[str, str]:
    """(rollout, attempt) of an attempt's key."""
    rollout, attempt, _ = key.split(b"\0", 2)
    return rollout.decode("ascii"), attempt.decode("ascii")


def u32(value: int) -> bytes:
    """What follows an attempt's key in the key of a summary or of a block of the index."""
    return _U32.pack(value)


def number(value: int) -> bytes:
    """Key of a body segment or a change segment."""
    return _U64.pack(value)


def to_number(key: bytes) -> int:
    """The inverse of `number`; reads the first eight bytes."""
    return _U64.unpack_from(key)[0]


def numbers(values: Sequence[int]) -> bytes:
    """Numbers one after the other."""
    return b"".join(map(_U64.pack, values))


def to_numbers(keys: bytes) -> list[int]:
    """The numbers that were written one after the other."""
    return [found for (found,) in _U64.iter_unpack(keys)]
