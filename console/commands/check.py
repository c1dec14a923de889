"""`penstock check`: reads every record and reports each that is wrong. It repairs nothing.

It may run beside a gateway: records that belong together are read in one transaction, one attempt at a time, so a
commit in between does not look like damage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.gateway.model.lightning import unpack
from penstock.gateway.model.release import (
    Assignment,
    AssignmentEvidence,
    AuditTrailEntry,
    Delivery,
    Release,
    Unit,
    content_hash,
)
from penstock.gateway.model.resource import Coverage, Resource
from penstock.gateway.model.rollout import LIVE, WAITING, RolloutStatus, Worker, is_claimed
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.state import ForgottenRollout, RetentionHold
from penstock.gateway.model.tools import ServerDefinitions
from penstock.gateway.releases.operations import pins_of
from penstock.gateway.releases.reader import ReleaseReader
from penstock.gateway.tape.store import Store, codec, keys, records
from penstock.gateway.tape.store.audit_log import entry_of
from penstock.gateway.tape.store.environment import TapeError
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.tape.store.view import TapeView
from penstock.gateway.tools.definitions import DefinitionReader, fingerprint, unpacked
from penstock.gateway.wire.dialects.mcp import LISTENING
from penstock.gateway.work.curves import MetricBlock
from penstock.gateway.work.queue import queue_key
from penstock.gateway.work.runs import RunReader, RunRecord, event_key, event_of

# The checks of `penstock check` for records of training runs.


def run(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    """Checks that a run's record agrees with its blocks, and that the versions it has made exist."""
    book, blocks = RunReader(tape).run_whole(key)
    with tape.view() as view:
        if view.get("run_configs", key) is None:
            yield "its configuration is missing"
        for made in book.run.made:
            if view.get("resources", keys.attempt_key(made.name, made.version)) is None:
                yield f"it has made {made.name}@{made.version}, which is missing"
    if keys.rollout_key(book.run.id) != key:
        yield "it is the record of another run"
    yield from _points(book, blocks)


def _points(book: RunRecord, blocks: list[tuple[int, MetricBlock]]) -> Iterator[str]:
    """Checks that a run's record counts the points in its blocks."""
    highest = max((block.last for _, block in blocks), default=None)
    if highest != book.run.step:
        yield f"its highest step is {book.run.step}, its points go to {highest}"
    rows = sum(len(block.steps) for number, block in blocks if number >= book.small)
    if rows != book.rows:
        yield f"it counts {book.rows} rows that are not folded, {rows} are there"
    if any(number >= book.next for number, _ in blocks):
        yield "it has a block with a number that was not given out"
    if strange := {name for _, block in blocks for name in block.names} - set(book.run.metrics):
        yield f"it does not name its metric {min(strange)!r}"


def run_order(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    """Checks that a record of the order names an existing run."""
    if RunReader(tape).run_head(value[:-1].decode("ascii")) is None:
        yield "it names a run that is missing"


def _of_run(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    if RunReader(tape).run_head(key.partition(b"\0")[0].decode("ascii")) is None:
        yield "its run is missing"


def run_json(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    """Checks that a record is JSON of an existing run."""
    json.loads(value)
    _ = RunReader(tape).run(key[:-1].decode("ascii"))
    yield from _of_run(tape, key, value)


def block(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    """Checks that a block of points can be read, and that its bounds are right."""
    block = MetricBlock(value)
    if any(later <= earlier for earlier, later in pairwise(block.steps)):
        yield "its steps do not rise"
    if (block.first, block.last) != (block.steps[0], block.steps[-1]):
        yield "its bounds are not those of its steps"
    for name in block.names:
        block.column(name)
    yield from _of_run(tape, key, value)


def run_event(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    """Checks that the key of an event's record is its own."""
    event, run = event_of(key, value), key.partition(b"\0")[0].decode("ascii")
    if event_key(run, event, 0) != key:
        yield "it is the record of another event"
    yield from _of_run(tape, key, value)


def being_wiped(view: TapeView, key: bytes) -> bool:
    """True if the rest of a rollout is about to be wiped. `key`: any key that begins with the rollout's."""
    stored = view.get("forgotten", key[: key.index(0) + 1])
    return stored is not None and not ForgottenRollout.model_validate_json(stored).wiped


def forgotten_between(tape: StoreReader, database: str, first: int, following: int) -> bool:
    """True if the numbers from `first` to before `following` were forgotten."""
    with tape.view() as view:
        return view.hole(database, first) == (first, following - 1)


def use(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    """Checks that a body refers to the shared body that its record names."""
    shared, body = keys.to_numbers(key)
    with tape.view() as view:
        if view.get("uses", key) is None:
            return  # it was forgotten meanwhile
        if codec.base_use(view.body_record(body)) != (shared, *keys.to_numbers(value)):
            yield f"body {body} does not stand on body {shared} so"


def forgotten(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    """Checks that a forgotten rollout is gone."""
    one = ForgottenRollout.model_validate_json(value)
    if keys.rollout_key(one.rollout) != key:
        yield "it is the record of another rollout"
    with tape.view() as view:
        left = view.has("attempts", keys.number(one.number))
    if one.wiped and left:
        yield "its attempts are still there"


def held(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    """Checks that a rollout with a hold exists."""
    if tape.rollout(RetentionHold.model_validate_json(value).rollout) is None:
        yield "it is kept, and missing"


_MASKED = "****"
"""The mark in a text from which a secret was removed."""
_SPANS, _SUMS, _STATUS, _WORKER = map(records.ATTEMPT.index, ("spans", "totals", "status", "worker"))


def problems(tape: StoreReader) -> Iterator[str]:
    """A sentence for every problem of the tape."""
    for database, check in _CHECKS:
        for key, value in tape.records(database):
            yield from _guarded(partial(_record, tape, database, key), check, tape, key, value)
    for number in tape.numbers():
        yield from _guarded(partial("order {}".format, number), _order, tape, number)
    yield from _numbering(tape, "log", lambda key, count: (key - count + 1, key))
    yield from _numbering(tape, "bodies", lambda key, count: (key, key + count - 1))


def _guarded(where: Callable[[], str], check: Callable[..., Iterator[str]], *args: Any) -> Iterator[str]:
    """The problems that a check finds; if the check fails, that is one too. `where` is called only if there are any."""
    try:
        for problem in check(*args):
            yield f"{where()}: {problem}"
    except (TapeError, *codec.DECODE_ERRORS) as error:
        yield f"{where()}: {error}"


def _record(tape: StoreReader, database: str, key: bytes) -> str:
    return f"{database} {_named(tape, database, key)}"


def _named(tape: StoreReader, database: str, key: bytes) -> str:
    """A key in readable form; an attempt's rollout, which the key has by number, is named if it can be read."""
    if database not in ("attempts", "unclaimed"):
        return _readable(key)
    try:
        with tape.view() as view:
            return f"{view.name(keys.to_number(key))}/{keys.attempt_of_record_key(key)}"
    except (TapeError, *codec.DECODE_ERRORS):
        return f"{keys.to_number(key)}/{keys.attempt_of_record_key(key)}"


def _readable(key: bytes) -> str:
    """A key in readable form: the names in it and the number at its end, or the number that it is."""
    *names, rest = key.split(b"\0", 2) if key.count(b"\0") >= 2 and key[:1] != b"\0" else (key,)
    if names:
        sequence = f"#{int.from_bytes(rest)}" if rest else ""
        return "/".join(name.decode("ascii", "replace") for name in names) + sequence
    return str(keys.to_number(key)) if len(key) == 8 else rest.rstrip(b"\0").decode("ascii", "replace")


def _rollout(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    # Read anew in this transaction, together with the queue.
    with tape.view() as view:
        rollout = view.rollout(key[:-1].decode("ascii"))
        if rollout is None:
            return
        waits = view.get("queue", queue_key(rollout)) is not None
        held = rollout.attempt and view.get("live", keys.attempt_key(rollout.id, rollout.attempt)) is not None
        # A client of Agent Lightning may say that a rollout runs.
        said = view.get("lightning", keys.LIGHTNING_ROLLOUT + keys.rollout_key(rollout.id)) is not None
    if rollout.place is None:
        return
    if rollout.status == RolloutStatus.QUEUING and not waits:
        yield "it is queuing and not in the queue"
    if rollout.status == RolloutStatus.REQUEUING and not waits and not held:
        yield "it is requeuing, and neither in the queue nor held by the worker of its last attempt"
    if rollout.status not in WAITING and waits:
        yield f"it is {rollout.status} and in the queue"
    if is_claimed(rollout.origin, rollout.status) and not (held or said):
        yield f"it is {rollout.status} and nobody holds its attempt"


def _order(tape: StoreReader, number: int) -> Iterator[str]:
    with tape.view() as view:
        origins = view.origins(view.name(number))
        if origins is None or origins.number != number:
            yield "it names a rollout that is missing"


def _attempt(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    with tape.view() as view:
        rollout, attempt = view.name(keys.to_number(key)), keys.attempt_of_record_key(key)
        origins = view.origins(rollout)
        if origins is None or origins.number != keys.to_number(key):
            if not being_wiped(view, keys.rollout_key(rollout)):
                yield "its rollout is missing"
            return
        # Read anew in this transaction: a running gateway may have written since the slice was read.
        record, _ = records.attempt_values(view.get("attempts", key) or value, origins)
        if record[_STATUS] in LIVE and record[_WORKER] is None and view.get("unclaimed", key) is None:
            yield "it runs, nobody has claimed it, and its quiet time is not watched"
        spans, broken = _heads(view, rollout, attempt, record[_SPANS])
    yield from broken
    finished = sum(span.kind == "llm" and span.status != SpanStatus.OPEN for span in spans)
    if not broken and finished != record[_SUMS][0]:
        yield f"it counts {record[_SUMS][0]} finished calls, {finished} are there"
    for span in spans:
        yield from _guarded(partial("#{}".format, span.sequence), _body, tape, span)


def _heads(view: TapeView, rollout: str, attempt: str, count: int) -> tuple[list[Span], list[str]]:
    """The heads of an attempt that can be read, and a sentence for each that cannot."""
    spans: list[Span] = []
    broken: list[str] = []
    for sequence in range(1, count + 1):
        try:
            span = view.span(rollout, attempt, sequence)
        except (TapeError, *codec.DECODE_ERRORS) as error:
            broken.append(f"#{sequence}: {error}")
            continue
        if span is None:
            broken.append(f"#{sequence}: it was given out but is not in the index")
        else:
            spans.append(span)
    return spans, broken


def _body(tape: StoreReader, span: Span) -> Iterator[str]:
    found = tape.exchange(span)
    if found is None or span.truncated:
        return
    apart = span.kind == "mcp" and (span.name or "").partition(" ")[0] in LISTENING and not found.response_body
    if span.status != SpanStatus.OPEN and not apart and len(found.response_body) != span.response_bytes:
        yield f"its response has {len(found.response_body)} bytes, the head says {span.response_bytes}"
    if len(found.request_body) != span.request_bytes:
        yield f"its request has {len(found.request_body)} bytes, the head says {span.request_bytes}"


def _open(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    head, _ = codec.unpack_open(value)
    with tape.view() as view:
        records.span_from(key, head, view.style)
        rollout, attempt, sequence = keys.split_summary_key(key)
        found = view.span(rollout, attempt, sequence)
    if found is None:
        yield "it is not in the index of its attempt"


def _log(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    found = codec.unpack_log(value)
    first = keys.to_number(key) - len(found) + 1
    with tape.view() as view:
        for at, record in enumerate(found, first):
            if record[:1] == b"s" and _indexed(view, record[1:]) != at and not being_wiped(view, record[1:]):
                yield f"change {at} is a span that the index of its attempt does not name"


def _indexed(view: TapeView, key: bytes) -> int | None:
    rollout, attempt, sequence = keys.split_summary_key(key)
    return view.index(rollout, attempt, sequence)


def _bodies(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    for at, record in enumerate(codec.unpack_segment(value), keys.to_number(key)):
        if record and not 0 <= codec.base_of(record) < at:
            yield f"body {at} leans on body {codec.base_of(record)}, which comes later"


def _queue(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    rollout = tape.rollout(value[:-1].decode("ascii"))
    if rollout is None:
        yield "it names a rollout that is missing"
    elif rollout.status in WAITING and queue_key(rollout) != key:
        yield f"rollout {rollout.id} should wait at another place"


def _live(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    rollout, attempt = keys.split_attempt_key(key)
    if attempt not in [found.id for found in tape.attempts(rollout)]:
        yield "it names an attempt that is missing"


def _unclaimed(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    with tape.view() as view:
        if view.get("attempts", key) is None:
            yield "it names an attempt that is missing"


def _reward(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    rollout, attempt, _ = key.split(b"\0", 2)
    span = tape.span(rollout.decode("ascii"), attempt.decode("ascii"), int.from_bytes(value))
    if span is None or span.kind != "reward":
        yield f"span {int.from_bytes(value)} of its attempt is no reward"


def _worker(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    if Worker.model_validate_json(value).id.encode() != key:
        yield "it is the record of another worker"


def _resource(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    version = Resource.model_validate_json(value)
    if keys.attempt_key(version.name, version.version) != key:
        yield "it is the record of another version"
    if content_hash(version) != version.sha256:
        yield "its content was changed: its hash does not agree"


def _release(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    with tape.view() as view:
        release = Release.model_validate_json(view.get("releases", key) or value)
        stored = view.get("audit", keys.numbered_key(release.id, release.revision))
    if stored is None or AuditTrailEntry.model_validate_json(stored).hash != release.head:
        yield "the last entry of its audit chain is not the one that it names"


def _link(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    entry, before = AuditTrailEntry.model_validate_json(value), key[:-4] + keys.u32(int.from_bytes(key[-4:]) - 1)
    if entry.hash != entry.digest():
        yield "it was changed: its hash does not agree"
    with tape.view() as view:
        stored = view.get("audit", before)
    if entry.previous != ("" if stored is None else AuditTrailEntry.model_validate_json(stored).hash):
        yield "it does not follow the entry before it"


def _change(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    number = keys.to_number(key)
    with tape.view() as view:
        if number > 1 and view.get("audit_log", keys.number(number - 1)) is None:
            yield f"change {number - 1} is missing before it"
        entry_of(view, key, value)


def _assigned(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    assignment = Assignment.model_validate_json(value)
    release, pins = key[:-5].decode("ascii"), ReleaseReader(tape).pins_under(assignment.rollout)
    if (release, assignment.number, assignment.arm) not in {(pin.release, pin.number, pin.arm) for pin in pins}:
        yield f"rollout {assignment.rollout} is not pinned to it"


def _seen(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    seen = AssignmentEvidence.model_validate_json(value)
    with tape.view() as view:
        stored = view.get("assigned", key)
    if stored is None or Assignment.model_validate_json(stored).rollout != seen.rollout:
        yield "it was not assigned"


def _unit(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    unit, (release, name, _) = Unit.model_validate_json(value), key.decode("ascii").split("\0")
    with tape.view() as view:
        assigned = view.get("assigned", keys.numbered_key(release, unit.number))
        seen = view.get("seen", keys.numbered_key(release, unit.number))
    if assigned is None or Assignment.model_validate_json(assigned).unit != name:
        yield f"assignment {unit.number} is not of it"
    members = [one.rollout for one in unit.members]
    parts = [] if seen is None else [one.rollout for one in AssignmentEvidence.model_validate_json(seen).parts]
    # A rollout whose pin was written while the unit was counted is not among them.
    if parts != members[: len(parts)]:
        yield "other rollouts of it were counted"
    for member in members:
        pins = [pin for pin in ReleaseReader(tape).pins_under(member) if pin.release == release]
        if (unit.number, name) not in {(pin.number, pin.unit) for pin in pins} or any(
            (pin.number, pin.unit) != (unit.number, name) for pin in pins if not pin.forgotten
        ):
            yield f"rollout {member} is not pinned to it"


def _pins(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    for pin in pins_of(value):
        with tape.view() as view:
            if view.get("resources", keys.attempt_key(pin.resource, pin.version)) is None:
                yield f"it is pinned to {pin.resource}@{pin.version}, which is missing"


def _coverage(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    _ = Coverage.model_validate_json(value)
    with tape.view() as view:
        if view.get("stable", key) is None:
            yield "its resource is missing"


def _told(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    with tape.view() as view:
        stored = view.get("releases", key)
    if stored is None or Release.model_validate_json(stored).revision < int.from_bytes(value):
        yield f"link {int.from_bytes(value)} of its chain is missing"


def _delivery(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    delivery = Delivery.model_validate_json(value)
    if keys.number(delivery.number) != key:
        yield "it is the record of another delivery"
    with tape.view() as view:
        if view.get("audit", keys.numbered_key(delivery.release, delivery.entry)) is None:
            yield f"link {delivery.entry} of release {delivery.release} is missing"


def _numbering(tape: StoreReader, database: str, span_of: Callable[[int, int], tuple[int, int]]) -> Iterator[str]:
    """Problems of segments that do not follow each other without a gap."""
    expected = 1
    for key, value in tape.records(database):
        try:
            first, last = span_of(keys.to_number(key), len(codec.unpack_segment(value)))
        except codec.DECODE_ERRORS:
            # Its own check has reported it. Its length is unknown, so the next segment may begin anywhere.
            expected = 0
            continue
        if expected and first != expected and not forgotten_between(tape, database, expected, first):
            yield f"{database}: {expected} should follow, found {first}"
        expected = last + 1


def _definition(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    name, _, wanted = key.partition(b"\0")
    if wanted:
        text = unpacked(value)
        if fingerprint(text) != wanted.hex() and _MASKED not in text:
            yield "it was changed: its hash does not agree"
        return
    server = ServerDefinitions.model_validate_json(value)
    if server.server.encode() != name:
        yield "it is the record of another server"
    items = {one for version in server.versions for one in version.items.values()}
    missing = items - DefinitionReader(tape).texts(server.server, items).keys()
    if missing:
        yield f"{len(missing)} of the definitions that it names are missing"
    for kind, number in (*server.pinned.items(), *server.newest.items()):
        if server.version(number) is None:
            yield f"its version {number} of {kind} is missing"


def _lightning(tape: StoreReader, key: bytes, value: bytes) -> Iterator[str]:
    kind, rest = key[:1], key[1:]
    with tape.view() as view:
        if kind == keys.LIGHTNING_LATEST:
            if view.get("lightning", keys.LIGHTNING_RESOURCES + value) is None:
                yield f"resources {value.decode()} are missing"
        elif kind in (keys.LIGHTNING_SPAN, keys.LIGHTNING_SEEN):
            attempt, rest = rest[: rest.index(0, 8) + 1], rest[rest.index(0, 8) + 1 :]
            sequence = rest if kind == keys.LIGHTNING_SPAN else value
            stored = view.get("lightning", keys.LIGHTNING_SPAN + attempt + sequence)
            if stored is None or not isinstance(unpack(stored), dict):
                yield f"span {int.from_bytes(sequence)} is missing"
            elif view.get("attempts", attempt) is None:
                yield "its attempt is missing"
        elif kind == keys.LIGHTNING_ATTEMPT:
            if view.attempt_values(*keys.split_attempt_key(rest)) is None:
                yield "its attempt is missing"
        elif kind in (keys.LIGHTNING_ROLLOUT, keys.LIGHTNING_COUNTER) and view.get("rollouts", rest) is None:
            yield "its rollout is missing"
        if kind not in (keys.LIGHTNING_LATEST, keys.LIGHTNING_SEEN, keys.LIGHTNING_COUNTER):
            _ = unpack(value)


_CHECKS: tuple[tuple[str, Callable[[StoreReader, bytes, bytes], Iterator[str]]], ...] = (
    ("rollouts", _rollout),
    ("attempts", _attempt),
    ("open", _open),
    ("log", _log),
    ("bodies", _bodies),
    ("queue", _queue),
    ("live", _live),
    ("unclaimed", _unclaimed),
    ("rewards", _reward),
    ("workers", _worker),
    ("resources", _resource),
    ("releases", _release),
    ("audit", _link),
    ("audit_log", _change),
    ("assigned", _assigned),
    ("seen", _seen),
    ("pins", _pins),
    ("coverage", _coverage),
    ("units", _unit),
    ("told", _told),
    ("deliveries", _delivery),
    ("runs", run),
    ("run_order", run_order),
    ("run_configs", run_json),
    ("run_metrics", block),
    ("run_events", run_event),
    ("run_trees", run_json),
    ("definitions", _definition),
    ("uses", use),
    ("forgotten", forgotten),
    ("held", held),
    ("lightning", _lightning),
)


def examine(path: Path) -> tuple[dict[str, int], list[str]]:
    """Figures and problems of the tape in `path`, read without disturbing a gateway that runs on it."""
    with Store(path, readonly=True) as store:
        return store.figures(), list(problems(store))
