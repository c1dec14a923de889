"""Which of the heavy suites CI runs, and why: those whose turn it is, and those that commits of the last day reach.

    .venv/bin/python .ci/plan.py

prints a line for each: `run` or `skip`, its name, its usual seconds, the environments that it needs and those that it
uses, why. `.ci/run` goes by them; all else that it runs, it always runs.

**Turns.** Each suite has one of four, and the number of commits says whose it is: within four commits each has run.

**Reach.** A suite is reached by a changed file that is its own, and by a changed module that its tests, or what they
start, import at any depth; the graph of imports is grimp's. Everything imports everything else somewhere, so the walk
ends where others test already: at modules that tests which always run import themselves, and at those that a suite
further up in the table reaches, because that one runs then. What a suite is there for (`about`) belongs to it whoever
else tests it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
TURNS = 4
DAY_S = 24 * 60 * 60

Graph = Mapping[str, Set[str]]
"""Module -> what it imports. They are named by their paths: `penstock.gateway.app`, `tests.fakes.tape`."""


class Suite(NamedTuple):
    """A heavy suite: `make test-NAME`, or a part that only `.ci/run` has."""

    name: str
    seconds: int
    """What it usually takes of one core, without its environments."""
    turn: int
    tests: tuple[str, ...] = ()
    """Modules and packages that hold its tests. They begin the walk."""
    about: tuple[str, ...] = ()
    """Modules and packages that it is there for. They begin the walk, too."""
    files: tuple[str, ...] = ()
    """What else is its own, by how the path begins."""


INTERCEPT = "penstock.sidecar.intercept."
INTERCEPTING = ("agent_proxy", "agent_connection", "egress", "session")
MCP = "penstock.gateway.tools."

SUITES = (
    # One page in a browser: what serves it. What it shows is what the TUI shows, which tests/tui always looks at.
    Suite("web", 7, 3, ("tests.tui.browser",), ("penstock.tui.web",), ("tests/tui/browser/",)),
    # The OpenAPI document is held against what the handlers do.
    Suite("api", 15, 2, ("tests.openapi",), ("penstock.gateway.api",), ("tests/openapi/",)),
    # The sidecar's other engine. The front behind it is that of `clients`.
    Suite("mitmproxy", 25, 3, ("tests.sidecar.intercept.test_mitm",), (INTERCEPT + "mitm", INTERCEPT + "mitm_addon")),
    # litellm is nowhere else; its release is pinned by a file of CI's own.
    Suite(
        "providers", 80, 2, ("tests.providers",), ("penstock.gateway.traffic.proxy.translation",),
        (".ci/litellm.txt",),
    ),
    # Images: their steps run, and what these make is started. What runs in them others test; text of manifests is
    # tested always. A new dependency comes with a new lock.
    Suite(
        "deploy", 110, 0, ("tests.deploy.test_images",),
        files=("Dockerfile", ".dockerignore", "deploy/locks/", "deploy/lock.py", "deploy/healthcheck.py"),
    ),
    # Do unmodified agents say behind a sidecar what they say without one? What each of their connections goes through.
    Suite(
        "clients", 175, 3, ("tests.clients",),
        tuple(INTERCEPT + name for name in INTERCEPTING),
        ("tests/clients/package.json", "tests/clients/package-lock.json", "tests/clients/scripts/"),
    ),
    # Agents as they are installed get better prompts, and are trained on: of `make test-clients` what needs no sidecar.
    # Agents that are scripts do both always.
    Suite("agents", 90, 2, ("tests.clients.test_optimised_claude", "tests.clients.test_trained_agents")),
    # MCP's own suite sees what crosses a gateway's addresses. Hosted and wrapped servers are tested always.
    Suite(
        "mcp", 250, 3, ("tests.conformance",),
        tuple(MCP + name for name in ("call", "response_rewriter", "sessions")),
        ("tests/conformance/",),
    ),
    # What a real engine does with adapters and tokens. Each has its tests with a scripted engine, always.
    Suite(
        "vllm", 115, 2, ("tests.vllm",),
        (
            "penstock.gateway.releases.adapter_server", "penstock.gateway.traffic.proxy.exact",
            "penstock.gateway.wire.capture", "penstock.gateway.wire.rewriting",
        ),
        ("tests/vllm/",),
    ),
    # Of tests/trainer those that need torch; what only they and modules with torch import.
    Suite("train", 400, 1, ("tests.trainer",), files=("pyright-train.json",)),
    # Several ranks against the local engine, which `train` tests.
    Suite("verl", 130, 1, ("tests.verl",), ("penstock.trainer.engines.verl_backend",), ("tests/verl/",)),
    # An agent learns, by a real engine: what decides whether it does. How runs begin, go on and end `train` tests.
    Suite(
        "learns", 600, 0, ("tests.trainer.test_learns",),
        ("examples.lookup_rl", "penstock.trainer.mathematics", "penstock.trainer.engines.local"),
    ),
    # Does each extra bring what is imported? What is imported is tested always, where all extras are. So it is reached
    # by another list of packages, and by an import of a package that a folder has not imported before.
    Suite("extras", 390, 2, ("tests.extras",), files=("tests/extras/", "pyproject.toml", "import ")),
    # Tests that always run, with another Python: it is reached by nothing, and has its turn.
    Suite("newest", 290, 3),
    # Its figures decide nothing, and what it is made of tests/bench always tests: it is reached by nothing.
    Suite("bench", 150, 1),
)  # fmt: skip

ONLY_WITH = {"train": "torch"}
"""Of the tests of such a suite only those that import this are its own. The others always run."""

NEEDS = {
    "agents": ("clients",), "api": ("schemathesis",), "learns": ("train", "vllm"), "mcp": ("mcp",),
    "mitmproxy": ("mitmproxy",), "providers": ("providers",), "train": ("train",), "verl": ("verl",),
    "vllm": ("vllm",), "web": ("browser",),
}  # fmt: skip
"""Environments without which a suite does not run, `make install-NAME`."""

USES = {"clients": ("clients",), "vllm": ("providers", "clients")}
"""Those without which a part of it is skipped."""

INSTALLED_S = {
    "browser": 15, "clients": 50, "mcp": 60, "mitmproxy": 20, "providers": 30, "schemathesis": 15, "train": 65,
    "verl": 90, "vllm": 100,
}  # fmt: skip


class Decision(NamedTuple):
    suite: str
    runs: bool
    why: str


def decide(commits: int | None, changed: Collection[str] | None, graph: Graph) -> list[Decision]:
    """What runs after so many commits, when those of the last day have changed these files. None: nobody knows."""
    if commits is None or changed is None:
        return [Decision(suite.name, True, "there is no whole history here, so everything runs") for suite in SUITES]
    reached = reach(graph)
    decisions: list[Decision] = []
    for suite in SUITES:
        wait = (suite.turn - commits) % TURNS
        hits = sorted(path for path in changed if path.startswith(suite.files) or module(path) in reached[suite.name])
        if hits:
            more = f" and {len(hits) - 1} more" if hits[1:] else ""
            decisions.append(Decision(suite.name, True, f"commits of a day reach it: {hits[0]}{more}"))
        elif wait:
            why = f"no commit of a day reaches it; its turn is at commit {commits + wait}, this is {commits}"
            decisions.append(Decision(suite.name, False, why))
        else:
            decisions.append(Decision(suite.name, True, f"it is its turn, at commit {commits}"))
    return decisions


def cost(*names: str) -> int:
    """What these suites take of one core, with their environments, each once."""
    environments = {each for name in names for table in (NEEDS, USES) for each in table.get(name, ())}
    installed = sum(INSTALLED_S[each] for each in environments)
    return installed + sum(suite.seconds for suite in SUITES if suite.name in names)


def reach(graph: Graph) -> dict[str, set[str]]:
    """The modules that belong to each suite."""
    tests = {suite.name: _tests(graph, suite) for suite in SUITES}
    heavy = set[str]().union(*tests.values())
    always = {name for name in graph if name.startswith("tests.") and _is_test(name)} - heavy
    tested = set[str]().union(*(graph[name] for name in always))
    reached: dict[str, set[str]] = {}
    for suite in SUITES:
        own = tests[suite.name] | _below(graph, suite.about)
        reached[suite.name] = _walk(graph, own, tested)
        tested |= reached[suite.name].union(*(graph[name] for name in tests[suite.name]))
    return reached


def _tests(graph: Graph, suite: Suite) -> set[str]:
    """Those in its packages, without what another suite has of these."""
    packages = tuple(f"{name}." for name in suite.tests)
    others = {name for one in SUITES for name in one.tests if name.startswith(packages)}
    needed = ONLY_WITH.get(suite.name)
    found = _below(graph, suite.tests) - _below(graph, others)
    return {name for name in found if needed is None or needed in graph[name]}


def _is_test(module: str) -> bool:
    last = module.rpartition(".")[2]
    return last.startswith("test_") or last == "conftest"


def _below(graph: Graph, names: Collection[str]) -> set[str]:
    """These modules, and all that is in these packages."""
    return {module for module in graph if any(f"{module}.".startswith(f"{name}.") for name in names)}


def _walk(graph: Graph, starts: set[str], ends: Set[str]) -> set[str]:
    found, ahead = set(starts), [name for start in starts for name in graph[start]]
    while ahead:
        name = ahead.pop()
        if name not in found and name not in ends and name in graph:
            found.add(name)
            ahead += graph[name]
    return found


PRODUCT = ("gateway", "console", "sidecar", "adapters", "trainer", "tui")
ON_THE_PATH = ("clients", "conformance", "deploy", "docs", "e2e", "fakes")
"""Folders of tests that others import by their bare names."""


def module(path: str) -> str:
    """`gateway/app.py` -> `penstock.gateway.app`; of what is no module its path."""
    name = path.removesuffix(".py").removesuffix("/__init__")
    if not path.endswith(".py"):
        return path
    return ("penstock." if name.split("/")[0] in PRODUCT else "") + name.replace("/", ".")


def read_graph() -> Graph:
    """What every module of ours imports, for types and inside of functions, too. A test that is skipped where it lacks
    a package imports that."""
    import grimp

    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    read = grimp.build_graph("penstock", "tests", "bench", "examples", *ON_THE_PATH, include_external_packages=True)
    graph: dict[str, set[str]] = {}
    for name in read.modules:
        graph.setdefault(_ours(name), set()).update(map(_ours, read.find_modules_directly_imported_by(name)))
    for path in (ROOT / "tests").rglob("test_*.py"):
        named = graph.setdefault(module(path.relative_to(ROOT).as_posix()), set())
        named.update(re.findall(r"importorskip\(\s*['\"](\w+)", path.read_text(encoding="utf-8")))
    return graph


def _ours(name: str) -> str:
    return f"tests.{name}" if name == "conftest" or name.partition(".")[0] in ON_THE_PATH else name


class NoHistoryError(Exception):
    """The number of commits, or those of the last day, cannot be known here."""


def read_history() -> tuple[int, set[str]]:
    """The number of commits, and what those of the last day have changed. The last day is that before the last commit:
    who runs CI for a commit once more gets the same plan."""
    if git("rev-parse", "--is-shallow-repository") != "false\n":
        raise NoHistoryError("the history is cut off: it is a shallow clone")
    dated = [line.split() for line in git("log", "--format=%H %ct").splitlines()]
    since = int(dated[0][1]) - DAY_S
    young = [commit for commit, seconds in dated if int(seconds) > since]
    before = next((commit for commit, seconds in dated if int(seconds) <= since), None)
    names = ("diff-tree", "--stdin", "--root", "-r", "-c", "--name-only", "--no-commit-id")
    changed = set(git(*names, told="".join(f"{commit}\n" for commit in young)).splitlines())
    if before:
        now, then = _project("HEAD"), _project(before)
        if now == then:
            changed.discard("pyproject.toml")
        base = now["project"]["dependencies"]
        new = _imports("HEAD") - _imports(before)
        changed |= {f"import {package} in {folder}" for folder, package in new if not _is_of(package, base)}
    return len(dated), changed


IMPORT = re.compile(r"^[^:]+:([^:]+):\s*(?:from (\w+)[\w.]* import |import (\w+)[\w., ]*$|.*import_module\(\"(\w+))")


def _imports(commit: str) -> set[tuple[str, str]]:
    """(folder, package from outside that it imports)."""
    looked = git("grep", "-IE", r"^ *(from|import) |import_module\(", commit, "--", *PRODUCT)
    found = [match for line in looked.splitlines() if (match := IMPORT.match(line))]
    named = {("/".join(each[1].split("/")[:2]), each[2] or each[3] or each[4]) for each in found}
    return {(folder, name) for folder, name in named if name not in sys.stdlib_module_names and name != "penstock"}


def _is_of(package: str, requirements: list[str]) -> bool:
    """`google` is of `googleapis-common-protos`, `pydantic_core` of `pydantic`: every install has them."""
    names = [re.split(r"[^\w-]", line)[0].replace("-", "_") for line in requirements]
    return any(name.startswith(package) or package.startswith(name) for name in names)


def _project(commit: str) -> dict[str, Any]:
    """pyproject.toml without the settings of development tools."""
    told = tomllib.loads(git("show", f"{commit}:pyproject.toml"))
    return {"project": told["project"], "build-system": told["build-system"], "hatch": told["tool"]["hatch"]}


def git(*words: str, told: str = "") -> str:
    try:
        done = subprocess.run(
            ("git", "-c", "core.quotePath=off", *words),
            cwd=ROOT,
            input=told,
            capture_output=True,
            text=True,
            check=True,
        )
    except FileNotFoundError:
        raise NoHistoryError("there is no git") from None
    except subprocess.CalledProcessError as error:
        raise NoHistoryError(error.stderr.strip() or f"git {words[0]} failed") from None
    return done.stdout


def main() -> None:
    try:
        commits, changed = read_history()
    except NoHistoryError as error:
        print(f"what has changed is not known: {error}", file=sys.stderr)
        commits = changed = None
    graph = read_graph() if changed is not None else {}
    seconds = {suite.name: suite.seconds for suite in SUITES}
    decisions = decide(commits, changed, graph)
    for name, runs, why in decisions:
        environments = (" ".join(table.get(name, ())) or "-" for table in (NEEDS, USES))
        print("run" if runs else "skip", name, seconds[name], *environments, why, sep="\t")
    print(f"heavy suites: {cost(*(each.suite for each in decisions if each.runs))} s of one core", file=sys.stderr)


if __name__ == "__main__":
    main()
