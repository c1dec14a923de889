"""The queue, its workers and a diagnosis for a terminal. Pure, as `console.views.rollouts` is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views.noun import NounSelection, NounView, all_rows, only_row
from penstock.console.views.rollouts import pluralized, status
from penstock.console.views.table import Column, Listing, age, ago, clean, figure, number, plain, size
from penstock.gateway.model.answers import AttemptDiagnosis, CallDiagnosis, Diagnosis, Finding
from penstock.gateway.model.queue import EnqueueResult, QueueStatus, RewardAnswer
from penstock.gateway.model.rollout import Rollout, Worker

RUN_THEM = "`penstock run -- COMMAND` runs an agent on each."
DIAGNOSES = (
    Column("rollout"), Column("status", 2), figure("reward", 3), figure("train"), figure("sequences", 1),
    Column("why", narrows="fold", least=24),
)  # fmt: skip
MENDING = (Column("why"), figure("rollouts"), Column("way out (of the first)", narrows="words", least=30))
CALLS = (
    figure("#"), Column("train"), Column("model", 4, narrows="cut", least=12), figure("prompt", 2),
    figure("answer", 3), Column("goes on", 1), Column("why", narrows="fold", least=30),
)  # fmt: skip


def queue(found: QueueStatus, now_ns: int) -> Text:
    """The queue in a line."""
    modes = ", ".join(f"{count:,} {mode}" for mode, count in found.waiting.items())
    waiting = f"{sum(found.waiting.values()):,} waiting" + (f" ({modes})" if modes else "")
    oldest = "" if found.oldest_ns is None else f", the oldest for {age(found.oldest_ns, now_ns)}"
    return Text(f"Queue {found.state}: {waiting}{oldest}; {found.claimed:,} claimed.")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} %"


def _bytes(value: int | None) -> str:
    return "" if value is None else size(value)


QUEUE = NounView[NounSelection, QueueStatus](
    "queue", QueueStatus, only_row(lambda client: client.queue()), lambda _: "queue", whole=queue,
    concerns=frozenset({"rollouts"}), every_s=5.0,
)  # fmt: skip
WORKERS = NounView[NounSelection, Worker](
    "workers",
    Worker,
    all_rows(
        lambda client: client.workers(),
        "No worker was heard of in the last quarter of an hour: `penstock run -- COMMAND` starts one.",
    ),
    key=lambda one: one.id,
    columns={
        Column("worker"): lambda one, _: plain(one.id),
        Column("heard of", 6): lambda one, now_ns: ago(one.last_seen_ns, now_ns),
        Column("attempts", narrows="words"): lambda one, _: plain(" ".join(one.attempts)),
        figure("finished", 5): lambda one, _: f"{one.finished:,}",
        figure("cpu", 4): lambda one, _: _percent(one.figures.cpu_percent),
        figure("memory", 3): lambda one, _: _bytes(one.figures.memory_bytes),
        figure("gpu", 2): lambda one, _: _percent(one.figures.gpu_percent),
        figure("gpu memory", 1): lambda one, _: _bytes(one.figures.gpu_memory_bytes),
        Column("own figures", narrows="words", least=20, optional=True): lambda one, _: plain(
            ", ".join(f"{name} {number(value)}" for name, value in one.figures.own.items())
        ),
    },
    concerns=frozenset({"rollouts"}),
    every_s=5.0,
)


def enqueued(answers: Sequence[EnqueueResult]) -> Text:
    """The result of an enqueue, in a sentence."""
    there = Counter(str(answer.status) for answer in answers if not answer.created)
    new = len(answers) - sum(there.values())
    by_status = ", ".join(f"{count:,} {name}" for name, count in there.most_common())
    before = f"; {sum(there.values()):,} were there already ({by_status})" if there else ""
    names = list(dict.fromkeys((answers[0].id, answers[-1].id)))
    after = f" {RUN_THEM}" if new else ""
    return Text(f"{pluralized(new, 'rollout')} queued{before}: {' … '.join(map(clean, names))}.{after}")


def status_list(rows: Iterable[Rollout]) -> Listing:
    """A line with the status of each rollout."""
    made = Listing(Column("rollout"), Column("status"))
    for row in rows:
        made.add_row(plain(row.id), status(row.status))
    return made


def rewarded(target: str, answer: RewardAnswer) -> Text:
    """A sentence about a reward that was kept."""
    notes = ["" if answer.trusted else ", untrusted", ", after the attempt had ended" if answer.late else ""]
    now = "has no reward yet" if answer.reward is None else f"has the reward {number(answer.reward)}"
    return Text(f"Kept as #{answer.sequence}{''.join(notes)}: {clean(target)} {now}.")


# --- a diagnosis ---


def diagnoses(found: Sequence[Diagnosis]) -> Group:
    """One rollout in full; of several a line each, with the findings and their counts, and the fixes."""
    if len(found) == 1:
        return diagnosis(found[0])
    made = Listing(*DIAGNOSES)
    for one in found:
        made.add_row(*_rollout(one))
    good = sum(one.trainable for one in found)
    verdict = Text(f"{good:,} of {len(found):,} rollouts can be trained on.", style="green" if good else "red")
    mending = _mending([_findings(one) for one in found])
    return Group(made, *([Text(), mending] if mending.rows else []), Text(), verdict)


def _rollout(found: Diagnosis) -> Iterator[Text]:
    calls = [call for attempt in found.attempts for call in attempt.calls]
    codes = Counter(finding.code for finding in _findings(found))
    yield from (plain(found.rollout), status(found.status), plain(number(found.reward)))
    yield plain(f"{sum(call.trainable for call in calls):,} of {len(calls):,}")
    yield plain(f"{found.sequences:,}")
    why = ", ".join(code if count == 1 else f"{code} ({count:,})" for code, count in codes.most_common())
    yield plain(why, "" if found.trainable else "red")


def _mending(every: Sequence[Sequence[Finding]]) -> Listing:
    """Each reason once, with the number of rollouts that have it and the fix of the first."""
    made = Listing(*MENDING)
    counts = Counter(code for findings in every for code in dict.fromkeys(f.code for f in findings))
    fixes = {f.code: f.fix for findings in reversed(every) for f in reversed(findings) if f.fix}
    for code, count in counts.most_common():
        if code in fixes:
            made.add_row(code, f"{count:,}", plain(fixes[code]))
    return made


def diagnosis(found: Diagnosis) -> Group:
    """A table for each attempt, the fixes of the findings, and the verdict."""
    model = f" for the model {clean(found.model)}" if found.model else ""
    pieces: list[RenderableType] = [Text(f"{clean(found.rollout)}  {found.status}{model}", style="bold")]
    for attempt in found.attempts:
        pieces += [Text(), *_attempt(attempt)]
    if found.skipped:
        pieces += [Text(f"{found.skipped:,} more calls were not looked at.", style="red")]
    fixes = _fixes(_findings(found))
    pieces += [Text(), fixes] if fixes.rows else []
    return Group(*pieces, Text(), Text(clean(found.verdict), style="green" if found.trainable else "red"))


def _findings(found: Diagnosis) -> list[Finding]:
    of_attempts = (f for a in found.attempts for f in (*a.findings, *(f for c in a.calls for f in c.findings)))
    return [*found.findings, *of_attempts]


def _attempt(found: AttemptDiagnosis) -> Iterator[RenderableType]:
    reward = "no reward" if found.reward is None else f"reward {number(found.reward)}"
    yield Text(f"{clean(found.attempt)}  {found.status}  {reward}")
    for finding in found.findings:
        yield _why([finding])
    if found.calls:
        made = Listing(*CALLS)
        for call in found.calls:
            made.add_row(*_call(call))
        yield made


def _call(call: CallDiagnosis) -> Iterator[Text]:
    yield plain(call.sequence)
    yield Text("yes", style="green") if call.trainable else Text("no", style="red")
    yield plain(call.model)
    yield from (plain("" if count is None else f"{count:,}") for count in (call.prompt_tokens, call.output_tokens))
    yield plain(", ".join([*([] if call.goes_on is None else [f"from #{call.goes_on}"]), *_begun(call)]))
    yield _why(call.findings)


def _begun(call: CallDiagnosis) -> list[str]:
    """The reasons why sequences begin with the call, except `first` and those that are findings of it."""
    told = {"first", *(finding.code for finding in call.findings)}
    counts = Counter(why for why in call.begins if why not in told)
    return [why if count == 1 else f"{why} ({count})" for why, count in counts.items()]


def _why(findings: Iterable[Finding]) -> Text:
    parts = (plain(f"{finding.code}: {finding.reason}", "red" if finding.blocks else "yellow") for finding in findings)
    return Text("; ").join(parts)


def _fixes(findings: Iterable[Finding]) -> Listing:
    """Each fix once; of fixes that differ only by the call the first."""
    made = Listing(Column("why"), Column("way out", narrows="words", least=30))
    first = {finding.code: finding.fix for finding in reversed(list(findings)) if finding.fix}
    for code, fix in reversed(first.items()):
        made.add_row(code, plain(fix))
    return made
