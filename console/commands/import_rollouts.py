"""Parts that the imports of recorded rollouts share: files and servers are read with bounds, each odd record is left
out and named, and what is understood goes to the tape.

An import makes `ImportedAttempt`s of records, and `run_import` sends them. A function that makes them is pure, and
raises nothing for a record: it tells the `ImportReport` of each that it does not understand.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import orjson

from penstock.console.commands.imports import ImportedSpan, Value, send_spans
from penstock.gateway.client.console import CommandError, note, unreadable, with_client
from penstock.gateway.model.base import ID_PATTERN

if TYPE_CHECKING:
    import aiohttp

    from penstock.gateway.client.client import Client
    from penstock.gateway.model.rollout import RewardSource

MOST_BYTES: Final = 256 << 20
"""Most bytes of one file, or of one answer, unpacked."""
MOST_REASONS: Final = 20
"""Most reasons that are told of what was left out."""
EVERY: Final = 100
"""Number of rollouts after which the progress is told."""
BATCH: Final = 64
"""Attempts after which they are sent, several at a time."""
AT_ONCE: Final = 200
"""Rollouts of one question for their sums."""
LONGEST_NAME: Final = 120
LATEST_NS: Final = 2**63
MOST_MESSAGES: Final = 8_000
"""Characters of messages in one attribute; of a longer text the gateway would leave an end that is no JSON."""
INPUT, OUTPUT = "input.value", "output.value"
"""Attributes with what a run, or a step that calls no model, was given and has given."""

Fields = Mapping[str, Any]
"""A JSON object of a foreign file."""


class OddRecordError(ValueError):
    """A record, or a field of one, that is not understood; the message names the field and what was expected."""


class Record(NamedTuple):
    """A JSON value with its place, for reports."""

    place: str
    value: Any


@dataclass(frozen=True, slots=True)
class ImportedReward:
    """A judgement on its way to the tape."""

    key: str
    """Made from the source, so that the same one is kept once."""
    value: float | None
    dimensions: Mapping[str, float] = field(default_factory=dict[str, float])
    source: RewardSource = "user"
    reason: str | None = None
    span_id: str | None = None
    """The span that it judges; None for the attempt."""


@dataclass(slots=True)
class ImportedAttempt:
    """An attempt with all that is imported of it."""

    rollout: str
    attempt: str
    spans: list[ImportedSpan] = field(default_factory=list[ImportedSpan])
    rewards: list[ImportedReward] = field(default_factory=list[ImportedReward])


class ImportReport:
    """Counts of an import, and the reasons of what was left out, each with the place of the first."""

    def __init__(self) -> None:
        self.rollouts: dict[str, None] = {}
        self.spans = 0
        self.new = 0
        self.rewards = 0
        self.calls = 0
        self.left_out: dict[str, list[str]] = {}

    def leave_out(self, place: str, why: str) -> None:
        """Note that a record was left out."""
        self.left_out.setdefault(why, []).append(place)

    @contextmanager
    def reading(self, place: str) -> Generator[None]:
        """Leave a record out if reading it raises `OddRecordError`."""
        try:
            yield
        except OddRecordError as error:
            self.leave_out(place, str(error))

    def lines(self) -> list[str]:
        """The report for a person; the last line has the sums."""
        found = [
            f"left out: {places[0]}{f' and {len(places) - 1:,} more' if len(places) > 1 else ''}: {why}"
            for why, places in list(self.left_out.items())[:MOST_REASONS]
        ]
        if (more := len(self.left_out) - MOST_REASONS) > 0:
            found.append(f"left out for {more} more reasons")
        left = sum(map(len, self.left_out.values()))
        sums = [f"{_count(len(self.rollouts), 'rollout')}: {_count(self.spans, 'span')}, {self.new:,} of them new"]
        sums += [_count(self.calls, "model call"), _count(self.rewards, "reward"), f"{left:,} left out"]
        return [*found, ", ".join(sums)]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# To the tape ----------------------------------------------------------------------------------------------------------

Attempts = Callable[[ImportReport], AsyncIterator[ImportedAttempt]]


def run_import(gateway: str, attempts: Attempts) -> None:
    """Put attempts on the tape of a gateway, and print what has come of it."""
    report = ImportReport()

    async def ask(client: Client) -> None:
        batch = list[ImportedAttempt]()
        async for one in attempts(report):
            batch.append(one)
            if len(batch) == BATCH:
                await _put_all(client, batch, report)
                batch = []
        await _put_all(client, batch, report)
        ids = list(report.rollouts)
        for at in range(0, len(ids), AT_ONCE):
            found = await client.rollouts_by_id(ids[at : at + AT_ONCE])
            report.calls += sum(one.totals.told for one in found)

    try:
        with_client(gateway, ask)
    except CommandError as error:
        if report.rollouts:
            note(
                f"{_count(len(report.rollouts), 'rollout')} came in before. Import again for the rest: nothing doubles."
            )
        raise error
    *left, sums = report.lines()
    for line in left:
        note(line)
    print(sums)
    if report.rollouts:
        note(f"What can be trained on: penstock doctor {selection(list(report.rollouts))}")
    elif report.left_out:
        raise CommandError("nothing was imported")


async def _put_all(client: Client, batch: Sequence[ImportedAttempt], report: ImportReport) -> None:
    from penstock.gateway.client.connection import map_concurrently

    before = len(report.rollouts) // EVERY
    await map_concurrently(lambda one: _put(client, one, report), batch)
    if len(report.rollouts) // EVERY > before:
        note(f"… {len(report.rollouts):,} rollouts")


async def _put(client: Client, one: ImportedAttempt, report: ImportReport) -> None:
    from penstock.gateway.client.connection import Refused
    from penstock.gateway.model.rollout import Judgement

    report.spans += len(one.spans)
    try:
        report.new += await send_spans(client, one.rollout, one.attempt, one.spans)
    except (CommandError, Refused) as error:
        report.leave_out(f"rollout {one.rollout}", str(error))
        return
    report.rollouts[one.rollout] = None
    sequences = dict[str | None, int]()
    if any(reward.span_id for reward in one.rewards):
        found = client.spans(one.rollout, one.attempt, "kind:otel")
        sequences = {span.span_id: span.sequence async for span in found}
    report.rewards += sum(bool(span.attributes.keys() & _REWARDS) for span in one.spans)
    for reward in one.rewards:
        at = None if reward.span_id is None else sequences.get(reward.span_id)
        judgement = Judgement(
            value=reward.value, dimensions=dict(reward.dimensions), source=reward.source,
            reason=reward.reason and reward.reason[:10_000], span=at, key=reward.key,
        )  # fmt: skip
        try:
            await client.reward(one.rollout, one.attempt, judgement)
        except Refused as error:
            report.leave_out(f"a reward of rollout {one.rollout}", str(error))
        else:
            report.rewards += 1


_REWARDS: Final = frozenset({"penstock.reward", "agentlightning.reward.0.value"})
"""Attributes with a reward that the gateway itself keeps."""


def selection(rollouts: Sequence[str]) -> str:
    """Words that select these rollouts for a command: a filter if their names begin alike, else the first ids."""
    first, last = min(rollouts), max(rollouts)
    common = next((first[:at] for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), first)
    prefix = common[: max(common.rfind("-"), common.rfind("."), common.rfind("_")) + 1]
    if len(rollouts) > 3 and prefix:
        return f"'rollout:{prefix}*'"
    return " ".join(rollouts[:3])


# Out of files and servers ---------------------------------------------------------------------------------------------


def file_bytes(path: Path) -> bytes:
    """The bytes of a file, unpacked if it is gzip. Raises `CommandError` if it cannot be read or is too large."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as e:
        raise CommandError(unreadable(path, e)) from None
    if content.startswith(b"\x1f\x8b"):
        content = _gunzip(path, content)
    if len(content) > MOST_BYTES:
        raise CommandError(f"{path} has more than {MOST_BYTES >> 20} MiB: import it in parts")
    if not content.strip():
        raise CommandError(f"{path} is empty")
    return content


def _gunzip(path: Path, content: bytes) -> bytes:
    """The members of a gzip file one after the other, as collectors append them."""
    found = bytearray()
    while content and len(found) <= MOST_BYTES:
        inflater = zlib.decompressobj(16 + zlib.MAX_WBITS)
        try:
            found += inflater.decompress(content, MOST_BYTES + 1 - len(found))
        except zlib.error as e:
            raise CommandError(f"{path} is damaged gzip: {e}") from None
        if not inflater.eof and len(found) <= MOST_BYTES:
            raise CommandError(f"{path} is gzip that ends early: it was not written to its end")
        content = inflater.unused_data
    return bytes(found)


def file_records(path: Path, report: ImportReport) -> Iterator[Record]:
    """The JSON values of a file: of one document (the items of a list), or one a line. Lines that are not JSON are
    left out. Raises `CommandError` for a file without any."""
    return json_records(file_bytes(path), str(path), report)


def json_records(content: bytes, name: str, report: ImportReport) -> Iterator[Record]:
    """The same of bytes; `name`: of their source."""
    try:
        whole = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        yield from _line_records(content, name, report, str(error))
        return
    if isinstance(whole, list):
        for at, one in enumerate(cast(list[Any], whole)):
            yield Record(f"{name}[{at}]", one)
    else:
        yield Record(name, whole)


def _line_records(content: bytes, name: str, report: ImportReport, why: str) -> Iterator[Record]:
    any_good, odd = False, list[str]()
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError:
            odd.append(f"{name}:{number}")
            continue
        any_good = True
        yield Record(f"{name}:{number}", value)
    if not any_good:
        raise CommandError(f"{name} is neither JSON nor JSON lines: {why}")
    for place in odd:
        report.leave_out(place, "the line is not JSON")


class ForeignServer:
    """A server that is asked for records by GET. No error has the credentials."""

    def __init__(self, url: str, headers: Mapping[str, str], credentials: str) -> None:
        """`credentials`: what a refusal is answered with, such as names of variables. Raises `CommandError`."""
        from aiohttp import BasicAuth
        from yarl import URL

        try:
            given = URL(url)
            self._login = BasicAuth(given.user or "", given.password or "") if given.user else None
            self._url = given.with_user(None)
        except ValueError as error:
            raise CommandError(f"that is not the URL of a server: {error}", 2) from None
        if self._url.scheme not in ("http", "https") or not self._url.host:
            raise CommandError(f"{self._url} is not the URL of a server: it must start with http:// or https://", 2)
        self.name = str(self._url).rstrip("/")
        if not all(value.isprintable() for value in headers.values()):
            raise CommandError(f"the key has a character that no header may have: {credentials}")
        self._headers = dict(headers)
        self._credentials = credentials

    async def get(self, session: aiohttp.ClientSession, path: str, **query: str | int) -> Any:
        """The JSON that is answered, None to a 404. Raises `CommandError`."""
        from aiohttp import ClientError, ClientTimeout

        url = f"{self.name}{path}"
        try:
            async with session.get(
                url, params=query, headers=self._headers, auth=self._login, timeout=ClientTimeout(total=300),
                allow_redirects=False,
            ) as answer:  # fmt: skip
                if answer.status == 404:
                    return None
                if answer.status in (401, 403):
                    raise CommandError(f"{url} answered {answer.status}: {self._credentials}")
                if answer.status != 200:
                    raise CommandError(f"{url} answered {answer.status}: is it the server's own address?")
                content = bytearray()
                async for piece in answer.content.iter_any():
                    content += piece
                    if len(content) > MOST_BYTES:
                        raise CommandError(f"{url} answered more than {MOST_BYTES >> 20} MiB")
        except (ClientError, TimeoutError) as error:
            raise CommandError(f"{url} cannot be reached: {error or type(error).__name__}") from None
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise CommandError(f"{url} did not answer JSON: {error}") from None


def fresh_page(found: list[Any], before: list[Any], what: str) -> list[Any]:
    """A page of a list. Raises `CommandError` if it is the page before once more, as of a server that knows no
    pages."""
    if found and found == before:
        raise CommandError(f"{what} answers the same page again and again")
    return found


# Out of records -------------------------------------------------------------------------------------------------------


def fields_of(value: Any, what: str = "the record") -> Fields:
    """A JSON object; raises `OddRecordError` for anything else."""
    if not isinstance(value, dict):
        raise OddRecordError(f"{what} is {_kind(value)}, not an object")
    return cast(Fields, value)


def as_object(value: Any) -> Fields:
    """A JSON object; an empty one for anything else."""
    return cast(Fields, value) if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any] | None:
    """A JSON list; None for anything else."""
    return cast(list[Any], value) if isinstance(value, list) else None


def objects(value: Any, what: str) -> list[Any]:
    """A JSON list; empty for null. Raises `OddRecordError` for anything else."""
    if value is not None and not isinstance(value, list):
        raise OddRecordError(f"{what} is {_kind(value)}, not a list")
    return cast(list[Any], value or [])


def text(record: Fields, name: str) -> str | None:
    """A text; None where it is absent, null or empty. Raises `OddRecordError` for anything else."""
    value = record.get(name)
    if value is not None and not isinstance(value, str):
        raise OddRecordError(f"{name} is {_kind(value)}, not text")
    return value or None


def needed(record: Fields, name: str) -> str:
    """A text that must be there."""
    value = text(record, name)
    if value is None:
        raise OddRecordError(f"{name} is missing")
    return value


def number(value: Any, name: str) -> float | None:
    """A finite number, of a boolean 0 or 1; None for null. Raises `OddRecordError` for anything else."""
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise OddRecordError(f"{name} is {_kind(value)}, not a number")
    return float(value)


def instant_ns(value: Any, name: str) -> int | None:
    """ns since the epoch of seconds since then, or of an ISO time, which is UTC unless it says; None for null."""
    if isinstance(value, str):
        from datetime import UTC, datetime

        try:
            when = datetime.fromisoformat(value)
            value = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            raise OddRecordError(f"{name} is not a time: {value[:40]!r}") from None
    seconds = number(value, name)
    if seconds is None:
        return None
    found = round(seconds * 1e9)
    if not 0 < found < LATEST_NS:
        raise OddRecordError(f"{name} is no time since 1970: {seconds:g}")
    return found


def an_id(given: str, prefix: str = "") -> str:
    """The id of a rollout or attempt: the given one if it can be one, else one made of it that stays the same."""
    if re.fullmatch(ID_PATTERN, found := prefix + given) and found not in (".", ".."):
        return found
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", given)[:60].strip("-.")
    return f"{prefix}{readable}-{sha256(given.encode()).hexdigest()[:12]}"


def a_span_id(given: str) -> str:
    """The id of a span: the given one if it is one of OpenTelemetry, else one made of it that stays the same."""
    if re.fullmatch("[0-9a-fA-F]{16}", given) and given.strip("0"):
        return given.lower()
    return sha256(given.encode()).hexdigest()[:16]


def plain(value: Any) -> str:
    """A value as an attribute holds it: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else dumps(value, ensure_ascii=False, separators=(",", ":"))


def attributes(**given: Any) -> dict[str, Value]:
    """Attributes of those values that there are; of names a `__` stands for a dot. Objects and lists become JSON."""
    return {
        name.replace("__", "."): value if isinstance(value, str | int | float) else plain(value)
        for name, value in given.items()
        if value is not None and value != "" and value != {} and value != []
    }


def flat(value: Any, what: str) -> dict[str, Value]:
    """An object of attributes as OpenTelemetry has them."""
    return {name: _attribute(one) for name, one in fields_of(value or {}, what).items() if one is not None}


def _attribute(value: Any) -> Value:
    if isinstance(value, list):
        return [_attribute(one) for one in cast(list[Any], value)]
    if isinstance(value, dict):
        return {name: _attribute(one) for name, one in cast(Fields, value).items()}
    return value


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return dumps(value)
    kinds = ((str, "text"), (int | float, "a number that JSON has not or that is too large"), (list, "a list"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "an object")


# Messages -------------------------------------------------------------------------------------------------------------


def messages(name: str, value: Any, role: str) -> dict[str, Value]:
    """An attribute with messages as the GenAI conventions write them: those of OpenAI's chat completions, or one of
    `role` for anything else; empty for nothing. Of a long conversation it has the last ones, because the gateway cuts
    texts; a second attribute counts the others."""
    if value is None or value == "":
        return {}
    given = as_object(value).get("messages", value)
    written = [plain(_message(one, role)) for one in (as_list(given) or [given])]
    kept, room = list[str](), MOST_MESSAGES
    for one in reversed(written):
        room -= len(one) + 1
        if room < 0 and kept:
            break
        kept.insert(0, one)
    made: dict[str, Value] = {name: f"[{','.join(kept)}]"}
    if left := len(written) - len(kept):
        made[f"penstock.import.{name}.left_out"] = left
    return made


def _message(given: Any, role: str) -> dict[str, Any]:
    message = as_object(given)
    if not {"role", "content", "tool_calls"} & message.keys():
        return {"role": role, "parts": [{"type": "text", "content": plain(given)}]}
    parts, said, content = list[dict[str, Any]](), str(message.get("role") or role), message.get("content")
    if said == "tool":
        parts.append({"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content})
    else:
        parts += [_part(piece) for piece in (as_list(content) or [content]) if piece is not None and piece != ""]
    parts += [_tool_call(call) for call in as_list(message.get("tool_calls")) or []]
    return {"role": said, "parts": parts}


def _tool_call(given: Any) -> dict[str, Any]:
    asked = as_object(given)
    called = as_object(asked.get("function")) or asked
    return {
        "type": "tool_call",
        "id": asked.get("id"),
        "name": called.get("name"),
        "arguments": called.get("arguments"),
    }


def _part(piece: Any) -> dict[str, Any]:
    said = as_object(piece).get("text", piece)
    return {"type": "text" if isinstance(said, str) else "generic", "content": plain(said)}
