"""Runs the tests on a machine that has no time for them: what fails here depends on how long something takes.

    .venv/bin/python .ci/stress.py RUNS [pytest arguments]

Each core has a busy process beside the tests, and processes of the tests stop for up to half a second at a time, as on
a machine that swaps. The tests wait longer than they do elsewhere (`fakes.waiting`). After all runs it lists the tests
that failed, and how often; the exit code is 1 if there are any.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
LONGEST_STOP_S, BETWEEN_S, PATIENCE_S = 0.5, 0.2, 500
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def descendants(pid: int) -> list[int]:
    """Every process below this one."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def is_stopped(pid: int) -> bool:
    """Whether a test has stopped it itself: to go on is then the test's to say."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return True


def stop_some(tests: subprocess.Popen[str], chance: random.Random) -> None:
    """Stops one process of the tests after another, until they are over."""
    while tests.poll() is None:
        time.sleep(chance.uniform(0, BETWEEN_S))
        below = [pid for pid in descendants(tests.pid) if not is_stopped(pid)]
        if below:
            stopped = chance.choice(below)
            with suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGSTOP)
                time.sleep(chance.uniform(0, LONGEST_STOP_S))
                os.kill(stopped, signal.SIGCONT)


def main() -> None:
    """Runs the tests so many times."""
    runs, words = int(sys.argv[1]), sys.argv[2:]
    failed: Counter[str] = Counter()
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 1)]
    try:
        for number in range(runs):
            began, log = time.monotonic(), ROOT / ".build" / f"stress-{number + 1}.log"
            log.parent.mkdir(exist_ok=True)
            with log.open("w") as file:
                command = [sys.executable, "-m", "pytest", *words]
                env = {**os.environ, "PATIENCE_S": str(PATIENCE_S)}
                tests = subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=file, stderr=subprocess.STDOUT)
                stop_some(tests, random.Random(number))
            said = log.read_text()
            failed.update(FAILED.findall(said))
            if tests.returncode not in (0, 1):
                failed[f"pytest ended with {tests.returncode}, see {log}"] += 1
            last = said.splitlines()[-1] if said else ""
            print(f"run {number + 1}: {last} ({time.monotonic() - began:.0f} s)", flush=True)
    finally:
        for one in busy:
            one.kill()
    for name, times in failed.most_common():
        print(f"{times} of {runs}  {name}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
