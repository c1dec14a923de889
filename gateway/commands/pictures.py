"""The queue, its workers and a diagnosis for a terminal. Pure, as `gateway.render` is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.model import Rollout, Worker
from gateway.render import age, ago, clean, counted, number, plain, size, status, table
from gateway.views import AttemptDiagnosis, CallDiagnosis, Diagnosis, Finding
from gateway.work import Enqueued, QueueStatus, RewardAnswer


def queue(found: QueueStatus, now_ns: int) -> Text:
    """The queue in a line."""
    modes = ", ".join(f"{count:,} {mode}" for mode, count in found.waiting.items())
    waiting = f"{sum(found.waiting.values()):,} waiting" + (f" ({modes})" if modes else "")
    oldest = "" if found.oldest_ns is None else f", the oldest for {age(found.oldest_ns, now_ns)}"
    return Text(f"Queue {found.state}: {waiting}{oldest}; {found.claimed:,} claimed.")


def workers(rows: Iterable[Worker], now_ns: int) -> Table:
    """A line for each worker."""
    made = table("worker", "heard of", "attempts", ">finished", ">cpu", ">memory", ">gpu", ">gpu memory")
    for w in rows:
        f = w.figures
        used = (_percent(f.cpu_percent), _bytes(f.memory_bytes), _percent(f.gpu_percent), _bytes(f.gpu_memory_bytes))
        made.add_row(plain(w.id), ago(w.last_seen_ns, now_ns), plain(" ".join(w.attempts)), f"{w.finished:,}", *used)
    return made


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} %"


def _bytes(value: int | None) -> str:
    return "" if value is None else size(value)


def enqueued(answers: Sequence[Enqueued]) -> Text:
    """What became of tasks, in a sentence."""
    there = Counter(str(answer.status) for answer in answers if not answer.created)
    new = len(answers) - sum(there.values())
    by_status = ", ".join(f"{count:,} {name}" for name, count in there.most_common())
    before = f"; {sum(there.values()):,} were there already ({by_status})" if there else ""
    return Text(f"{counted(new, 'rollout')} queued{before}.")


def moved(rows: Iterable[Rollout]) -> Table:
    """Where rollouts stand now."""
    made = table("rollout", "status")
    for row in rows:
        made.add_row(plain(row.id), status(row.status))
    return made


def rewarded(target: str, answer: RewardAnswer) -> Text:
    """A reward that was kept."""
    notes = ["" if answer.trusted else ", untrusted", ", after the attempt had ended" if answer.late else ""]
    now = "has no reward yet" if answer.reward is None else f"has the reward {number(answer.reward)}"
    return Text(f"Kept as #{answer.sequence}{''.join(notes)}: {clean(target)} {now}.")


# --- a diagnosis ---


def diagnosis(found: Diagnosis) -> Group:
    """A table for each attempt, what mends what was found, and the verdict."""
    model = f" for the model {clean(found.model)}" if found.model else ""
    pieces: list[RenderableType] = [Text(f"{clean(found.rollout)}  {found.status}{model}", style="bold")]
    for attempt in found.attempts:
        pieces += [Text(), *_attempt(attempt)]
    if found.skipped:
        pieces += [Text(f"{found.skipped:,} more calls were not looked at.", style="red")]
    every = [
        *found.findings,
        *(f for a in found.attempts for f in (*a.findings, *(f for c in a.calls for f in c.findings))),
    ]
    fixes = _fixes(every)
    pieces += [Text(), fixes] if fixes.row_count else []
    return Group(*pieces, Text(), Text(clean(found.verdict), style="green" if found.trainable else "red"))


def _attempt(found: AttemptDiagnosis) -> Iterator[RenderableType]:
    reward = "no reward" if found.reward is None else f"reward {number(found.reward)}"
    yield Text(f"{clean(found.attempt)}  {found.status}  {reward}")
    for finding in found.findings:
        yield _why([finding])
    if found.calls:
        made = table(">#", "train", "model", ">prompt", ">answer", "goes on", "why")
        for call in found.calls:
            made.add_row(*_call(call))
        yield made


def _call(call: CallDiagnosis) -> Iterator[Text]:
    yield plain(call.sequence)
    yield Text("yes", style="green") if call.trainable else Text("no", style="red")
    yield plain(call.model)
    yield from (plain("" if count is None else f"{count:,}") for count in (call.prompt_tokens, call.output_tokens))
    yield plain("" if call.goes_on is None else f"from #{call.goes_on}")
    yield _why(call.findings)


def _why(findings: Iterable[Finding]) -> Text:
    parts = (plain(f"{finding.code}: {finding.reason}", "red" if finding.blocks else "yellow") for finding in findings)
    return Text("; ").join(parts)


def _fixes(findings: Iterable[Finding]) -> Table:
    """Each fix once, the first of its kind when they differ by the call only."""
    made = table("why", "what mends it")
    first = {finding.code: finding.fix for finding in reversed(list(findings)) if finding.fix}
    for code, fix in reversed(first.items()):
        made.add_row(code, plain(fix))
    return made
