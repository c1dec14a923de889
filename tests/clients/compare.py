"""What differs between two sessions of an agent, after what differs between any two sessions is taken out.

`VOLATILE` says what that is. Requests are compared for each path in the order in which they came: agents ask some paths
beside their conversation, from other threads.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

import zstandard

Shown = dict[str, str]
_UUID: Final = rb"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
VOLATILE: Final = (
    (_UUID, b"<uuid>"),
    (rb"\b20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)?", b"<time>"),
    (rb"Process Group PGID: [0-9]+", b"PGID"),
    (rb"(?<![0-9])1[789]\d{11}(?![0-9])", b"<ms>"),
    (rb"\bses_[0-9A-Za-z]{26}\b", b"<session>"),
    (rb"\b[0-9a-f]{64}\b", b"<device>"),
    (rb"\b(resp|msg|fc|rs)_[0-9a-f]{16,64}\b", rb"\1_<response>"),
    (rb"\bagents-sdk:run:[0-9a-f]{32}\b", b"<run>"),
    (rb'"create_time":[0-9.]+', b'"create_time":<time>'),
    (rb" \(codex_exec; [0-9.]+\)\r\n", b"\r\n"),
    (rb"\bcch=[0-9a-f]{5}\b", b"cch=<checksum>"),
    (rb"Wall time [0-9.]+ seconds", b"Wall time"),
    (rb"(\r\nx-claude-code-prev-tool-durations: \w+=)[0-9]+", rb"\1<ms>"),
)
"""Ids of sessions, requests, installations and of the answers of our own hosts, which are made of such; times; Claude
Code's checksum of a request with such ids in it; Codex names its front end twice once another thread has said it."""
BESIDE: Final = re.compile(r"^POST (/api/event_logging/|/backend-api/codex/analytics-events/)")
"""Telemetry, whose bodies hold durations and sizes of the process: only their heads are compared, without a length, and
however many there are."""


SIDE: Final = re.compile(r"^(GET|HEAD|POST) /backend-api/(?!codex/responses)")
"""What Codex asks from other threads until it ends: each may be asked once more, or not at all."""


def difference(one: list[Shown], other: list[Shown]) -> list[str]:
    """What a person reads of the difference between two sessions; nothing where they are the same."""
    first, second = _by_path(one), _by_path(other)
    found: list[str] = []
    for path in sorted({*first, *second}):
        mine, its = _rests(first.get(path, []), second.get(path, []))
        if len(mine) != len(its) and not SIDE.match(path.partition(" ")[2]):
            found.append(f"{path}: {len(mine)} and {len(its)} times")
        found += [f"{path}: {_request(a, b)}" for a, b in zip(mine, its, strict=False)]
    return list(dict.fromkeys(found))


def _rests(first: list[Shown], second: list[Shown]) -> tuple[list[Shown], list[Shown]]:
    """What has no equal in the other list. Agents ask for a title beside their conversation, at any time."""
    if any(BESIDE.match(one["head"]) for one in (*first, *second)):
        # Two parts of the program send it, in any order: one that both sessions have is enough.
        both = {_head(one) for one in first} & {_head(one) for one in second}
        first, second = ([], []) if both else (first[:1], second[:1])
    mine, its = Counter(_whole(one) for one in first), Counter(_whole(one) for one in second)
    return _without(first, its), _without(second, mine)


def _without(asked: list[Shown], known: Counter[tuple[bytes, bytes]]) -> list[Shown]:
    left, found = Counter(known), list[Shown]()
    for one in asked:
        if left[_whole(one)]:
            left[_whole(one)] -= 1
        else:
            found.append(one)
    return found


def _whole(shown: Shown) -> tuple[bytes, bytes]:
    """What must be the same."""
    return _head(shown), b"" if BESIDE.match(shown["head"]) else _body(shown)


def _by_path(asked: Iterable[Shown]) -> dict[str, list[Shown]]:
    found: dict[str, list[Shown]] = {}
    for one in asked:
        line = one["head"].partition("\r\n")[0].removesuffix(" HTTP/1.1") or "a message on its WebSocket"
        found.setdefault(f"{one['host']} {line}", []).append(one)
    return found


def _request(one: Shown, other: Shown) -> str:
    (head, body), (its_head, its_body) = _whole(one), _whole(other)
    if head != its_head:
        a, b = head.split(b"\r\n"), its_head.split(b"\r\n")
        lines = [line.decode("latin-1") for line in (*a, *b) if (line in a) != (line in b)]
        return f"headers: {', '.join(lines) or 'their order'}"
    at = next(
        (at for at, (a, b) in enumerate(zip(body, its_body, strict=False)) if a != b), min(len(body), len(its_body))
    )
    begin = max(0, at - 60)
    return f"bodies at {at}: {body[begin : at + 40]!r}, {its_body[begin : at + 40]!r}"


def _head(shown: Shown) -> bytes:
    head = shown["head"].encode("latin-1")
    head = re.sub(rb"(?i)(\r\nsec-websocket-key: )[^\r]+", rb"\1<random>", head)
    if b"codex-mcp-client" in head:
        line, *fields = head.split(b"\r\n")
        head = b"\r\n".join([line, *sorted(fields)])
    if BESIDE.match(shown["head"]):
        head = re.sub(rb"(?i)(\r\ncontent-length: )[^\r]+", rb"\1<length>", head)
    if b"content-encoding: zstd" in head.lower():
        head = re.sub(rb"(?i)(\r\ncontent-length: )[^\r]+", rb"\1<length of other ids>", head)
    return _still(head)


def _body(shown: Shown) -> bytes:
    body = base64.b64decode(shown["body"])
    if "content-encoding: zstd" in shown["head"].lower():
        body = zstandard.ZstdDecompressor().decompressobj().decompress(body)
    return _still(_ordered(body))


def _still(text: bytes) -> bytes:
    for pattern, name in VOLATILE:
        text = re.sub(pattern, name, text)
    return text


def _ordered(body: bytes) -> bytes:
    """Codex writes `client_metadata` in the order of a hash map: its entries are sorted."""
    found = re.search(rb'"client_metadata":(\{(?:"(?:[^"\\]|\\.)*"|[^{}"])*\})', body)
    if found is None:
        return body
    ordered = json.dumps(json.loads(found[1]), sort_keys=True, separators=(",", ":")).encode()
    return body[: found.start(1)] + ordered + body[found.end(1) :]
