"""`penstock export --format atif` and `penstock import atif`: trajectories as Harbor has them, out and in.

Out: lines of JSON, or a folder for each attempt, `ROLLOUT.ATTEMPT/agent/trajectory.json`, where Harbor's tools look.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import time_ns
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from penstock.console.commands.imports import ImportedSpan, send_spans
from penstock.gateway.client.console import (
    LOCAL,
    CommandError,
    Url,
    note,
    unreadable,
    whole_file,
    with_asked,
    with_client,
)

if TYPE_CHECKING:
    from penstock.adapters.atif import AtifReport
    from penstock.adapters.atif_spans import SpanOfStep, Wire
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.base import SpanKind
    from penstock.gateway.model.queue import FinishRequest
    from penstock.gateway.model.rollout import Judgement, RolloutSummary

KINDS: Final[tuple[SpanKind, ...]] = ("llm", "tool", "reward", "otel")
LINES: Final = ".jsonl"


async def write_atif(client: Client, filter: str, output: Path | None) -> None:
    """Write the trajectories of the rollouts that a filter finds. `output`: None is stdout, a name that ends in .jsonl
    a file of lines, any other a folder."""
    from penstock.adapters.atif import AtifReport, as_line

    report = AtifReport()
    if output is None or output.suffix == LINES:
        with whole_file(output) as file:
            await _each(client, filter, report, lambda _, made: file.write(as_line(made)))
    else:
        await _each(client, filter, report, lambda name, made: _write_file(output, name, made))
    if not report.trajectories:
        note(with_asked("Nothing was written: no rollout that matches has a conversation."))
    note("\n".join(report.lines()))


async def _each(client: Client, filter: str, report: AtifReport, write: Callable[[str, Wire], object]) -> None:
    """Make the trajectories, a rollout at a time. Rollouts that were made to try a release belong in no data set."""
    from penstock.adapters.atif import trajectories
    from penstock.adapters.source import list_rollouts, load
    from penstock.gateway.model.facts import is_rehearsal

    async def wanted() -> AsyncIterator[RolloutSummary]:
        async for one in list_rollouts(client, filter):
            if not is_rehearsal(one.id):
                yield one

    gone: list[str] = []
    async with aclosing(load(client, wanted(), gone.append, KINDS)) as episodes:
        async for episode in episodes:
            rollout = episode.rollout.id
            # Lists have the costs of calls, whole rollouts have not.
            heads = {(it.attempt, it.sequence): it async for it in client.spans(rollout, filter="kind:llm")}
            for call in (call for one in episode.attempts for call in one.calls):
                head = heads.get((call.span.attempt, call.span.sequence))
                call.span.cost = None if head is None else head.cost
            for attempt, made in trajectories(episode, report):
                _ = write(f"{rollout}.{attempt}", made)
            del episode
    if gone:
        report.problems.append(f"{len(gone):,} more were forgotten meanwhile (retention)")


def _write_file(folder: Path, name: str, made: Wire) -> None:
    from penstock.adapters.atif import as_line

    path = folder / name / "agent" / "trajectory.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from None
    with whole_file(path) as file:
        _ = file.write(as_line(made))


# -- penstock import atif ----

LARGEST: Final = 256 << 20
"""Most bytes of one document."""
LONGEST_ID: Final = 128
LOGS: Final = {"verifier": "verifier/test-stdout.txt", "exception": "exception.txt"}
"""Files of a trial that become events, by the events' names."""


@dataclass(slots=True)
class _Source:
    """A document that is to be imported."""

    where: str
    """Its file, and its line if it is one of several."""
    name: str
    """The rollout's name, if the document has none: by Harbor's trial, or by the file."""
    document: Any
    trial: Path | None = None
    """The folder of Harbor's trial, where it is from one."""


@dataclass(slots=True)
class _ImportSums:
    rollouts: int = 0
    steps: int = 0
    rewards: int = 0
    spans: int = 0
    known: int = 0
    left: list[str] = field(default_factory=list[str])


def atif(
    path: Annotated[Path, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    prefix: str = "",
    gateway: Url = LOCAL,
) -> None:
    """Put trajectories of agents on the tape, as Harbor has them (ATIF).

    What is on the tape already is not put there again. A Harbor job gives its rewards too.

    Parameters
    ----------
    path
        A trajectory as JSON, lines of them (.jsonl), or a folder, such as that of a Harbor job.
    prefix
        Begins the ids of the rollouts, so that they are no others' on the tape.
    """
    from penstock.gateway.model.toml import pluralized

    sums = _ImportSums()

    async def ask(client: Client) -> None:
        for source in _sources(path, sums):
            try:
                await _import(client, source, prefix, sums)
            except CommandError as error:
                sums.left.append(str(error))

    with_client(gateway, ask)
    known = f" ({sums.known:,} there already)" if sums.known else ""
    counts = [(sums.rollouts, "rollout"), (sums.steps, "step"), (sums.rewards, "reward"), (sums.spans, "new span")]
    first, *more = [pluralized(count, noun) for count, noun in counts]
    note(f"{first}{known}, {', '.join(more)}.")
    for why in sums.left:
        note(f"Left out: {why}")
    if sums.left:
        raise CommandError(f"{path}: not all of it was imported")
    if not sums.rollouts:
        raise CommandError(f"{path}: there are no trajectories in it")
    note("What can be trained on: penstock doctor ROLLOUT")


def _sources(path: Path, sums: _ImportSums) -> Iterator[_Source]:
    """Read the documents of a file or a folder; what cannot be read is left out, and said."""
    files = [path]
    if path.is_dir():
        found = sorted(path.rglob("agent/trajectory*.json"))
        files = found or sorted(it for end in ("*.json", "*.jsonl") for it in path.rglob(end))
    for file in files:
        try:
            with file.open("rb") as content:
                if file.suffix != LINES:
                    pieces: Iterable[tuple[bytes, str]] = [(content.read(LARGEST + 1), str(file))]
                else:
                    lines = iter(lambda content=content: content.readline(LARGEST + 1), b"")
                    pieces = ((line, f"{file} line {number}") for number, line in enumerate(lines, 1) if line.strip())
                for piece, where in pieces:
                    if (source := _source(file, piece, where, sums)) is not None:
                        yield source
        except OSError as error:
            sums.left.append(unreadable(file, error))


def _source(file: Path, content: bytes, where: str, sums: _ImportSums) -> _Source | None:
    """The document of a file or a line; None, with a reason among the sums, if it is none."""
    from pydantic_core import from_json

    name, trial = file.stem + where.removeprefix(str(file)).replace(" line ", "."), None
    if file.parent.name == "agent":
        trial = file.parent.parent
        name = trial.name + file.stem.removeprefix("trajectory")
    try:
        if len(content) > LARGEST:
            raise ValueError(f"it is larger than {LARGEST >> 20} MiB")
        return _Source(where, name, from_json(content, allow_inf_nan=False), trial)
    except ValueError as error:
        sums.left.append(f"{where}: it cannot be read: {error}")
        return None


async def _import(client: Client, source: _Source, prefix: str, sums: _ImportSums) -> None:
    """Import one document; raises `CommandError` where that cannot be, before anything of it is sent."""
    from penstock.adapters.atif_model import flaws
    from penstock.adapters.atif_spans import spans_of
    from penstock.gateway.wire.http import redaction

    if found := flaws(source.document):
        more = f" (and {len(found) - 1:,} more)" if len(found) > 1 else ""
        raise CommandError(f"{source.where}: {found[0]}{more}")
    # The gateway masks too, but without the names of members, since it gets the document packed.
    document: Wire = redaction.attributes(source.document)
    rollout, attempt = _name(document, source, prefix)
    spans = [*spans_of(document, f"{rollout}/{attempt}", time_ns())]
    known = await _known(client, (rollout, attempt), spans[0], source.where)
    kept = (ImportedSpan(it.span_id, it.name, it.start_ns, it.end_ns, it.parent_id, it.attributes) for it in spans)
    sent = await send_spans(client, rollout, attempt, kept)
    end, rewards = _end(document, source)
    if end is not None:
        _ = await client.finish(rollout, attempt, end.model_copy(update={"rewards": rewards}))
    else:
        for reward in rewards:
            _ = await client.reward(rollout, attempt, reward)
    sums.rewards += 0 if known else len(rewards)
    sums.rollouts, sums.known, sums.spans = sums.rollouts + 1, sums.known + known, sums.spans + sent
    sums.steps += len(document["steps"])


def _name(document: Wire, source: _Source, prefix: str) -> tuple[str, str]:
    """The rollout and the attempt of a document: those that it was exported from; else its trial, its own id, its
    session or its file. What cannot stand in an id becomes a hyphen."""
    ours = _ours(document)
    own = None if source.trial is not None else document.get("trajectory_id") or document.get("session_id")
    rollout, attempt = str(ours.get("rollout") or own or source.name), str(ours.get("attempt") or "a1")
    return _id(prefix + rollout), _id(attempt)


def _id(text: str) -> str:
    from hashlib import sha256

    made = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".") or "trajectory"
    return made if len(made) <= LONGEST_ID else f"{made[: LONGEST_ID - 17]}-{sha256(text.encode()).hexdigest()[:16]}"


def _ours(document: Wire) -> Wire:
    from penstock.gateway.wire.dialects.loose_json import obj

    return obj(obj(document.get("extra")).get("penstock"))


async def _known(client: Client, name: tuple[str, str], head: SpanOfStep, where: str) -> bool:
    """True if the same document was imported as this attempt. Raises `CommandError` if the attempt is anything else."""
    from penstock.adapters.atif_spans import DIGEST
    from penstock.gateway.client.connection import NotFound

    try:
        spans = [span async for span in client.spans(*name)]
    except NotFound:
        return False
    before = next((span.attributes or {} for span in spans if span.span_id == head.span_id), None)
    if before is not None and before.get(DIGEST) == head.attributes[DIGEST]:
        return True
    what = "was imported from another document" if before else "is on the tape, and was not imported"
    raise CommandError(f"{where}: {'/'.join(name)} {what}; --prefix NAME gives the rollouts of an import other ids")


def _end(document: Wire, source: _Source) -> tuple[FinishRequest | None, list[Judgement]]:
    """The end of the attempt, if it is known, and its rewards: as Harbor's result of the trial tells, else as an
    export does."""
    from penstock.adapters.harbor import ENDS, judgement, trial_end
    from penstock.gateway.model.queue import FinishRequest
    from penstock.gateway.wire.dialects.loose_json import obj

    if (result := _result(source)) is not None:
        end = trial_end(*result)
        return end, end.rewards
    ours = _ours(document)
    scores = {**obj(ours.get("rewards"))} | ({"reward": ours["reward"]} if "reward" in ours else {})
    found = judgement(scores, "user")
    status = ours.get("status")
    end = FinishRequest(status=status) if status in ENDS else None
    return end, [] if found is None else [found]


def _result(source: _Source) -> tuple[Wire, dict[str, str]] | None:
    """Harbor's result of a trial and the logs of its verifier; None where there are none, or the document is another
    one of the trial."""
    from pydantic_core import from_json

    from penstock.gateway.wire.dialects.loose_json import obj

    if source.trial is None or source.name != source.trial.name:
        return None
    try:
        found = from_json((source.trial / "result.json").read_bytes(), allow_inf_nan=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CommandError(f"{source.trial / 'result.json'}: it cannot be read: {error}") from None
    logs: dict[str, str] = {}
    for name, file in LOGS.items():
        with suppress(OSError):
            logs[name] = (source.trial / file).read_text(encoding="utf-8", errors="replace")
    return obj(found), logs
