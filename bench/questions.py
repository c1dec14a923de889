"""How long a tape takes to answer: `python -m bench.questions --calls 1000000`.

A gateway serves a made tape (`bench.question_tape`, kept in bench/out for the next run), and one client asks over HTTP,
as the CLI and the TUI do: 50 filters of rollouts and of spans, the first page of each list, texts, figures and SQL. *An
answer* is the first 100 rows, or all where there are fewer: pages that end early, because they looked at enough, are
followed to the end. *Cold* is the first time that a question is asked of a gateway; *warm* is the median of the rounds
after it. The index is made anew first; `--scan` asks without one. A question that has no answer after `--patience`
seconds counts as that long. Figures (`/api/breakdown`) are those of all calls.

Written to bench/out/questions.json: for each kind of question the 50th and the 95th percentile in milliseconds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

from bench import procfs, question_tape
from bench.rollouts import process, said
from bench.store import HERE, Figure, report

OUT: Final = HERE / "out" / "questions.json"
ROWS: Final = 100
_SPANS: Final = (
    "status:ok", "status:error", "status:failed", "status:interrupted", "latency>2s", "latency>20s", "latency>10m",
    "latency<200ms", "tokens>6000", "tokens>1000000", "input_tokens<900", "output_tokens>390", "tool_calls>0",
    "tool_calls>3", "http:429", "http:500", "http>599", "error:http_429", "error:timeout", "model:gpt-4o",
    "model:claude*", "model:none-such", "agent:planner", "agent:refunds status:error", "version:travel@v2",
    "version:travel@v9", "kind:reward", "finish:stop", "bytes>100000", "stream:true",
    "agent:critic model:qwen* latency>3s", "-status:ok -status:error",
)  # fmt: skip
_ROLLOUTS: Final = (
    "status:failed", "status:succeeded", "status:claimed", "reward>0.5", "reward<0.5 status:succeeded", "reward>1.5",
    "mode:val", "mode:online reward>0", "group:task-17", "group:none-such", "metadata.tenant:tenant-7",
    "metadata.tenant:tenant-7 status:failed", "metadata.customer.plan:scale reward<0.5", "latency>15s",
    "latency>10m", "model:claude* reward>0.5", "worker:worker-3 status:failed", "version:travel@v2 reward<0.5",
)  # fmt: skip
_TEXTS: Final = (question_tape.NEEDLE, "needle-777", "certificate number", "no such words anywhere", "refund to gift")
_SQL: Final = (
    "select agent, count(*), sum(input_tokens) from spans where kind = 'llm' group by agent",
    "select model, quantile_cont(duration_ms, 0.95) from spans group by model",
    "select date_trunc('day', started) as day, count(*) from spans group by day",
    "select tool, count(*) from tool_calls group by tool",
    "select status, avg(reward) from rollouts group by status",
)
QUESTIONS: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "filters": [("spans", it) for it in _SPANS] + [("rollouts", it) for it in _ROLLOUTS],
    "page": [("spans", ""), ("rollouts", "")],
    "text": [("spans", f'text~"{it}"') for it in _TEXTS],
    "stats": [("breakdown", it) for it in ("agent", "model", "error", "day", "mode", "tool")],
    "sql": [("sql", it) for it in _SQL],
}
"""(list, filter) by kind; for SQL the query instead of the filter."""


class Asking:
    """A client that keeps its connection."""

    def __init__(self, port: int, patience: float) -> None:
        self._port, self._patience = port, patience
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience)

    def seconds(self, name: str, filter: str) -> float:
        """Return the seconds until the answer, at most the patience."""
        began = time.perf_counter()
        try:
            rows, cursor = 0, ""
            while rows < ROWS and cursor is not None and time.perf_counter() - began < self._patience:
                if name == "sql":
                    self._ask_sql(filter)
                    break
                asked = (
                    f"?by={filter}" if name == "breakdown" else f"?limit={ROWS - rows}&filter={quote(filter)}{cursor}"
                )
                self._connection.request("GET", f"/api/{name}{asked}")
                answer = self._connection.getresponse()
                found = json.loads(answer.read())
                assert answer.status == 200, found
                if name == "breakdown":
                    break
                rows += len(found[name])
                cursor = f"&cursor={found['next']}" if found["next"] else None
        except TimeoutError:
            self._connection.close()
            self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._patience)
        return min(time.perf_counter() - began, self._patience)

    def _ask_sql(self, query: str) -> None:
        body = json.dumps({"query": query})
        self._connection.request("POST", "/api/sql", body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        found = json.loads(answer.read())
        assert answer.status == 200, found

    def made_index(self, gateway: int) -> dict[str, float]:
        """Wait until the index of this gateway process is made; return its size and the cost of making it."""
        began = time.perf_counter()
        while True:
            self._connection.request("GET", "/api/index")
            view = json.loads(self._connection.getresponse().read())
            if view["status"] == "ready":
                (pid,) = procfs.children(gateway)
                used = {"cpu": procfs.cpu_seconds(pid), "memory": procfs.memory(pid).anonymous}
                return used | {"bytes": view["bytes"], "wall": time.perf_counter() - began}
            time.sleep(0.1)


def asked(
    data: Path, rounds: int, patience: float, scan: bool
) -> tuple[dict[str, list[list[float]]], dict[str, float]]:
    """Return the seconds of every question of each kind, round by round, and the cost of the index."""
    config, index = data / "penstock.toml", dict[str, float]()
    config.write_text(f'port = 0\ndata = "{data}"\n[index]\nwhen = "{"never" if scan else "always"}"\n')
    shutil.rmtree(data / "index", ignore_errors=True)
    found: dict[str, list[list[float]]] = {}
    with process(["-m", "penstock", "serve", "--config", str(config)], data / "gateway.log") as gateway:
        client = Asking(int(said(gateway).rpartition(":")[2]), patience)
        if not scan:
            index = client.made_index(gateway.pid)
            print(f"index: {index}", flush=True)
        for kind, questions in QUESTIONS.items():
            if scan and kind == "sql":
                continue  # it has no other way
            found[kind] = [[client.seconds(*one) for _ in range(rounds + 1)] for one in questions]
            slowest = max(zip(found[kind], questions, strict=True))
            print(f"{kind}: the slowest is {' '.join(slowest[1])!r}, {max(slowest[0]):.2f} s", flush=True)
    return found, index


def percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the 50th and the 95th percentile in ms."""
    ordered = sorted(seconds)
    return statistics.median(ordered) * 1e3, ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] * 1e3


def figures(found: Mapping[str, list[list[float]]]) -> Iterator[Figure]:
    """Yield the table, with the goals of a tape of a million calls."""
    goals = {"filters": 100.0, "page": 20.0, "text": 800.0, "stats": 100.0, "sql": 300.0}
    for kind, times in found.items():
        warm, cold = ([statistics.median(one[1:]) for one in times], [one[0] for one in times])
        yield Figure(f"{kind}, warm: p50", percentiles(warm)[0], "ms")
        yield Figure(f"{kind}, warm: p95", percentiles(warm)[1], "ms", at_most=goals[kind])
        yield Figure(f"{kind}, cold: p95", percentiles(cold)[1], "ms", at_most=200 if kind == "filters" else None)


def index_figures(index: Mapping[str, float], size: int, calls: int) -> Iterator[Figure]:
    """Yield the cost of making the index."""
    yield Figure("index, of the tape", 100 * index["bytes"] / size, "%", at_most=30)
    yield Figure("index, made in", index["wall"], "s", at_most=60)
    yield Figure("index, CPU a call", 1e3 * index["cpu"] / calls, "ms", at_most=0.045)
    yield Figure("index, memory after", index["memory"], "MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=50_000, help="calls on the tape (default: 50,000)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after the first (default: 3)")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for one question (default: 60)")
    parser.add_argument("--scan", action="store_true", help="ask without an index")
    given = parser.parse_args()
    data = HERE / "out" / f"questions-{given.calls}"
    if not (data / "made").exists():
        shutil.rmtree(data, ignore_errors=True)
        calls, rollouts = question_tape.make(data, given.calls)
        (data / "made").write_text(f"{calls:,} calls in {rollouts:,} rollouts\n")
    size = (data / "tape" / "data.mdb").stat().st_size
    print(f"{(data / 'made').read_text().strip()}, {size / 1e6:,.0f} MB on disk")
    found, index = asked(data, given.rounds, given.patience, given.scan)
    report([*figures(found), *(index_figures(index, size, given.calls) if index else ())], OUT)
    made: dict[str, dict[str, float]] = {}
    for kind, times in found.items():
        middle, slow = percentiles([statistics.median(one[1:]) for one in times])
        made[kind] = {"p50_ms": round(middle, 2), "p95_ms": round(slow, 2)}
    OUT.write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
