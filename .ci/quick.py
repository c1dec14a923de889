"""Checks a change in a minute and a half: `make quick`. Runs the tests of a package: `make test-of P=PACKAGE`.

    .venv/bin/python .ci/quick.py PYTEST...
    .venv/bin/python .ci/quick.py --of gateway/tape PYTEST...

PYTEST is the command that runs tests, to which their files are added.

**Changed** is what differs between the working tree and the commit where this branch left `origin/main` (else `main`;
`BASE=COMMIT` names another one), and what git does not know yet.

**Tests** are taken by the graph of imports that `.ci/plan.py` has, the nearest first: tests that have changed
themselves, those that import a changed module, those in the folder of a changed package, those that import an importer,
and so on. Only as many are taken as fit, by what each took the last time; the others are counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import plan

ROOT = plan.ROOT
BIN = Path(sys.executable).parent
LIMIT_S = 68.0
"""Seconds after which no test begins; those that run, and pyright, end some seconds later."""
FILE_S = 2.0
"""Seconds of one core that the fast tests of a file take on average."""
CORES = min(4, os.cpu_count() or 1)
OTHER_TESTS = {
    "docs/": ("tests/test_docs.py", "tests/docs/"),
    ".ci/": ("tests/test_ci.py",),
    "Makefile": ("tests/test_ci.py",),
    "deploy/": ("tests/deploy/",),
    "examples/": ("tests/test_examples.py",),
    "tests/": (),
}
"""Tests of files that are no modules, by how their paths begin. A file below `tests` has those of its folder."""


class Choice(NamedTuple):
    """Files of tests, the nearest first."""

    taken: list[str]
    left: list[str]
    """Those that a change reaches and that do not fit."""


def folder_of(package: str) -> str | None:
    """The folder of a package's tests: `gateway/tape` -> `tests/gateway/tape`; that of its parent where it has none."""
    parts = [part for part in package.removesuffix(".py").split("/") if part and part != "tests"]
    while parts:
        for folder in ("tests", "tests/gateway"):
            if (ROOT / folder).joinpath(*parts).is_dir():
                return "/".join((folder, *parts))
        parts.pop()
    return None


def distances(changed: Collection[str], graph: plan.Graph) -> dict[str, int]:
    """How many imports lie between each module and the nearest changed one that it needs."""
    importers: dict[str, set[str]] = {}
    for name, imported in graph.items():
        for each in imported:
            importers.setdefault(each, set()).add(name)
    found = dict.fromkeys((plan.module(path) for path in changed), 0)
    ahead = list(found)
    for name in ahead:
        for importer in importers.get(name, ()):
            if importer not in found:
                found[importer] = found[name] + 1
                ahead.append(importer)
    return found


def choose(
    changed: Collection[str], graph: plan.Graph, tests: Collection[str], seconds: Mapping[str, float], room: float
) -> Choice:
    """The files of tests for changed files. `tests`: all files; `seconds`: what each took; `room`: seconds of a
    core."""
    near = distances(changed, graph)
    folders = {folder_of(path.rpartition("/")[0]) for path in changed if path.endswith(".py")}
    others = tuple(
        test for path in changed if not path.endswith(".py")
        for start, own in OTHER_TESTS.items() if path.startswith(start)
        for test in (own or (path.rpartition("/")[0] + "/",))
    )  # fmt: skip

    def rank(path: str) -> float:
        if path in changed:
            return 0
        beside = path.rpartition("/")[0] in folders or path.startswith(others)
        return min(near.get(plan.module(path), inf), 1.5 if beside else inf)

    reached = sorted((path for path in tests if rank(path) < inf), key=lambda path: (rank(path), path))
    taken: list[str] = []
    for path in reached:
        room -= seconds.get(path, FILE_S)
        if room < 0 and taken:
            break
        taken.append(path)
    return Choice(taken, reached[len(taken) :])


def base() -> str:
    """The commit since which something may have changed."""
    if named := os.environ.get("BASE"):
        return named
    for branch in ("origin/main", "main"):
        found = subprocess.run(
            ("git", "merge-base", "HEAD", branch), cwd=ROOT, capture_output=True, text=True, check=False
        )
        if found.returncode == 0:
            return found.stdout.strip()
    return "HEAD"


def changed_files(since: str) -> list[str]:
    """Files that differ from a commit, new ones too; deleted ones are among them."""
    told = plan.git("diff", "--name-only", since), plan.git("ls-files", "--others", "--exclude-standard")
    return sorted({line for each in told for line in each.splitlines()})


def typed(changed: Iterable[str]) -> list[str]:
    """The changed files whose types `make check` checks, as pyright knows them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pyright"]
    named = [f"penstock/{path}" if path.split("/")[0] in plan.PRODUCT else path for path in changed]
    return [
        path for path in named
        if path.endswith((".py", ".pyi")) and (ROOT / path).exists()
        and any(f"{path}/".startswith(f"{each}/") for each in settings["include"])
        and not any(f"{path}/".startswith(f"{each}/") for each in settings["exclude"])
    ]  # fmt: skip


REPORT = ROOT / ".build" / "quick.xml"


def last_seconds() -> dict[str, float]:
    """What files of tests took when they ran last, as far as all of a file has run."""
    found: dict[str, float] = {}
    for case in ElementTree.parse(REPORT).iter("testcase") if REPORT.exists() else ():
        folder, _, name = case.get("classname", "").rpartition(".test_")
        file = f"{folder.replace('.', '/')}/test_{name.partition('.')[0]}.py"
        left = any(OVER in each.get("message", "") for each in case.iter("skipped"))
        found[file] = found.get(file, 0.0) + (inf if left else float(case.get("time", 0)))
    return {file: seconds for file, seconds in found.items() if seconds < inf}


UNTIL = "PENSTOCK_QUICK_UNTIL"
"""Variable with the time (s since the epoch) after which no test begins."""
OVER = "the time is over"


def pytest_runtest_setup() -> None:
    """Leave out a test that would begin too late. This module is a plugin of the pytest that it starts."""
    if time.time() > float(os.environ[UNTIL]):
        import pytest

        pytest.skip(OVER)


def run_tests(command: Sequence[str], files: Sequence[str], until: float) -> tuple[int, bool]:
    """(exit code, whether all have run); tests that have not begun by then (s since the epoch) are left out."""
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT / ".ci"), os.environ.get("PYTHONPATH"))))
    words = (*command, "-q", "-p", "quick", f"--junitxml={REPORT}", *files)
    code = subprocess.run(
        words, cwd=ROOT, env={**os.environ, UNTIL: str(until), "PYTHONPATH": path}, check=False
    ).returncode
    skipped = ElementTree.parse(REPORT).iter("skipped") if REPORT.exists() else ()
    return code, not any(OVER in each.get("message", "") for each in skipped)


def quick(command: Sequence[str]) -> int:
    """Check what has changed; return the exit code."""
    began = time.time()
    since = base()
    changed = changed_files(since)
    print(
        f"{len(changed)} files have changed since {since[:10]}: {', '.join(changed[:8])}{' ...' if changed[8:] else ''}"
    )
    if not changed:
        print("There is nothing to check. BASE=COMMIT compares with another commit.")
        return 0
    failed = [
        " ".join(words) for words in (("ruff", "format", "--check", "--quiet", "."), ("ruff", "check", "--quiet", "."))
        if subprocess.run((BIN / words[0], *words[1:]), cwd=ROOT, check=False).returncode
    ]  # fmt: skip
    graph = plan.read_graph()
    ignored = tuple(word.removeprefix("--ignore=") for word in command if word.startswith("--ignore="))
    every = (path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
    tests = [path for path in every if not path.startswith(ignored)]
    files = typed(changed)
    room = (LIMIT_S - (time.time() - began)) * CORES * (0.5 if files else 0.8)
    chosen = choose(changed, graph, tests, last_seconds(), room)
    checks = [(BIN / "lint-imports", "--no-cache")] if any(path.endswith(".py") for path in changed) else []
    checks += [(BIN / "pyright", *files)] if files else []
    beside = [subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) for words in map(tuple, checks)]
    code, whole = run_tests(command, chosen.taken, began + LIMIT_S) if chosen.taken else (0, True)
    failed += ["tests"] if code else []
    for one, words in zip(beside, checks, strict=True):
        told, _ = one.communicate()
        if one.returncode:
            print(told)
            failed.append(Path(words[0]).name)
    print(f"\n{time.time() - began:.0f} s: format, lint, layers, types of {len(files)} files, ", end="")
    print(f"fast tests of {len(chosen.taken)} files" + ("" if whole else ", not all: the time was over"))
    if chosen.left:
        print(f"Left out: {len(chosen.left)} files of tests that the change reaches: {', '.join(chosen.left[:3])} ...")
    print(
        "Slow tests are left out, and suites with an environment of their own: make test-of P=PACKAGE runs all of one."
    )
    print(f"failed: {', '.join(failed)}" if failed else "nothing has failed")
    return bool(failed)


def test_of(package: str, command: Sequence[str]) -> int:
    """Run all tests of a package, slow ones too; return the exit code."""
    folder = folder_of(package.strip("/"))
    if folder is None:
        print(f"P={package}: no folder of tests is for it; name a package such as gateway/tape", file=sys.stderr)
        return 2
    return subprocess.run((*command, folder), cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(test_of(words[1], words[2:]) if words[0] == "--of" else quick(words))
