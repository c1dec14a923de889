"""What CI runs: which of the heavy suites, by `.ci/plan.py`, and how, by `.ci/run`."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

ROOT = Path(__file__).parents[1]
RUN = ROOT / ".ci" / "run"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE)
PATIENCE_S = 100


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plan: Final[Any] = loaded("plan")
quick: Final[Any] = loaded("quick")
NAMES: Final[list[str]] = [suite.name for suite in plan.SUITES]

GRAPH: Mapping[str, frozenset[str]] = {
    name: frozenset(imported.split())
    for name, imported in {
        "tests.gateway.test_tape": "penstock.gateway.tape tests.fakes.tape",
        "tests.gateway.helper": "penstock.gateway.unseen",
        "tests.providers.test_agents": ("penstock.gateway.traffic.proxy.translation.framing tests.fakes.odd json"),
        "tests.clients.test_same_client": "tests.fakes.odd tests.fakes.tape",
        "tests.clients.test_trained_agents": "tests.fakes.tape",
        "tests.trainer.test_credit": "penstock.trainer.credit",
        "tests.trainer.test_engine": "torch penstock.trainer.credit penstock.trainer.engines.local",
        "tests.trainer.test_learns": "torch tests.fakes.tape",
        "tests.verl.test_engine": "verl penstock.trainer.engines.local penstock.trainer.ranks",
        "tests.fakes.tape": "penstock.gateway.tape",
        "tests.fakes.odd": "",
        "examples.lookup_rl": "examples.lookup penstock.trainer.credit",
        "examples.lookup": "",
        "penstock.gateway.traffic.proxy.translation.framing": "penstock.gateway.pieces penstock.gateway.tape",
        "penstock.gateway.pieces": "penstock.gateway.bytes penstock.gateway.pieces",
        "penstock.gateway.bytes": "json",
        "penstock.gateway.tape": "penstock.gateway.below",
        "penstock.gateway.below": "",
        "penstock.gateway.unseen": "",
        "penstock.gateway.releases.adapter_server": "",
        "penstock.trainer.credit": "",
        "penstock.trainer.ranks": "",
        "penstock.trainer.engines.local": "torch penstock.trainer.engines.policy",
        "penstock.trainer.engines.policy": "",
        "penstock.trainer.engines.verl_backend": "verl",
        "json": "",
    }.items()
}


def reached(*changed: str) -> list[str]:
    """The suites that run for what has changed, whoever's turn it is."""
    runs = [{each.suite for each in plan.decide(commits, changed, GRAPH) if each.runs} for commits in range(plan.TURNS)]
    return [name for name in NAMES if all(name in each for each in runs)]


@pytest.mark.parametrize(
    ("changed", "suites"),
    [
        ("tests/providers/test_agents.py", ["providers"]),
        ("gateway/traffic/proxy/translation/framing.py", ["providers"]),
        # At any depth, in a ring too.
        ("gateway/bytes.py", ["providers"]),
        # Tests that always run have it, and what it stands on.
        ("gateway/tape.py", []),
        ("gateway/below.py", []),
        ("tests/fakes/tape.py", []),
        # A suite further up in the table has it.
        ("tests/fakes/odd.py", ["providers"]),
        # Nobody imports it; it is what a suite is there for.
        ("gateway/releases/adapter_server.py", ["vllm"]),
        # Of tests/trainer what needs torch.
        ("tests/trainer/test_credit.py", []),
        ("trainer/credit.py", []),
        ("tests/trainer/test_engine.py", ["train"]),
        ("tests/trainer/test_learns.py", ["learns"]),
        ("trainer/engines/policy.py", ["train"]),
        ("trainer/engines/local.py", ["train", "learns"]),
        ("trainer/ranks.py", ["verl"]),
        ("trainer/engines/verl_backend.py", ["verl"]),
        # What starts as a process.
        ("examples/lookup.py", ["learns"]),
        ("tests/clients/test_trained_agents.py", ["agents"]),
        # No modules.
        ("tests/vllm/model.jinja", ["vllm"]),
        ("deploy/locks/torch.txt", ["deploy"]),
        ("deploy/compose/alerts.yaml", []),
        ("pyproject.toml", ["extras"]),
        ("import duckdb in gateway/followers", ["extras"]),
        (".ci/litellm.txt", ["providers"]),
        ("docs/tape.md", []),
        ("gateway/nobody.py", []),
    ],
)
def test_a_suite_runs_where_a_change_reaches_it(changed: str, suites: list[str]) -> None:
    assert reached(changed) == suites


def test_several_changes_reach_what_each_reaches() -> None:
    assert reached("trainer/ranks.py", "gateway/tape.py", "gateway/bytes.py") == ["providers", "verl"]


@pytest.mark.parametrize("first", range(plan.TURNS))
def test_within_four_commits_each_suite_has_its_turn(first: int) -> None:
    ran = [
        [each.suite for each in plan.decide(commits, (), GRAPH) if each.runs]
        for commits in range(first, first + plan.TURNS)
    ]
    assert sorted(name for names in ran for name in names) == sorted(NAMES)


def test_what_is_skipped_says_when_its_turn_is() -> None:
    skipped = {each.suite: each.why for each in plan.decide(1330, (), GRAPH) if not each.runs}
    assert {name for name, why in skipped.items() if "commit 1332" in why} == {"deploy", "learns"}


@pytest.mark.parametrize("known", [(None, ()), (7, None), (None, None)])
def test_where_nobody_knows_what_has_changed_everything_runs(known: tuple[Any, Any]) -> None:
    assert all(each.runs for each in plan.decide(*known, {}))


def test_turns_take_about_the_same_time() -> None:
    costs = [plan.cost(*(each.name for each in plan.SUITES if each.turn == turn)) for turn in range(plan.TURNS)]
    assert max(costs) <= 1.15 * min(costs)


def test_no_suite_is_forgotten() -> None:
    own = {target.removeprefix("test-") for target in TARGETS if target.startswith("test-")}
    # What always runs, and all of them; what only CI has.
    assert own - {"more", "all", "of"} == set(NAMES) - {"agents", "newest", "bench"}
    assert len(set(NAMES)) == len(NAMES)
    always = set(re.findall(r"part make ([a-z-]+)", RUN.read_text(encoding="utf-8")))
    assert {target for target in TARGETS if re.match(r"(demo|check|test)$|check-", target)} <= always


def test_the_tests_that_it_names_are_there() -> None:
    """Those of another Python were in folders that had moved."""
    named = re.findall(r"tests/\S+", RUN.read_text(encoding="utf-8") + MAKEFILE)
    split = [re.match(r"([^{]*)\{?([^}]*)\}?(.*)", name) for name in named]
    paths = {f"{one[1]}{middle}{one[3]}" for one in split if one for middle in one[2].split(",")}
    assert len(paths) > 10
    assert [path for path in sorted(paths) if not (ROOT / path.rstrip(";")).exists()] == []


def test_environments_are_those_of_the_makefile() -> None:
    named = {name for table in (plan.NEEDS, plan.USES) for names in table.values() for name in names}
    assert named == set(plan.INSTALLED_S)
    assert {f"install-{name}" for name in named} <= set(TARGETS)
    assert plan.NEEDS.keys() | plan.USES.keys() <= set(NAMES)


def test_what_needs_an_environment_of_its_own_runs_with_it_alone() -> None:
    """Beside the suites that always run CI makes these environments: half of one made eight tests fail."""
    elsewhere = re.search(r"^ELSEWHERE := ((?:.*\\\n)*.*)", MAKEFILE, flags=re.MULTILINE)
    assert elsewhere
    left_out = tuple(path.removesuffix(".py") for path in elsewhere[1].split() if path.startswith("tests/"))
    # Without torch the tests of the trainer are none.
    with_torch = {"train", "learns"}
    needy = {name for suite in plan.SUITES if suite.name in plan.NEEDS.keys() - with_torch for name in suite.tests}
    assert [name for name in sorted(needy) if not name.replace(".", "/").startswith(left_out)] == []


@pytest.mark.slow
def test_the_table_names_what_there_is() -> None:
    graph = plan.read_graph()
    for suite in plan.SUITES:
        for name in (*suite.tests, *suite.about):
            assert any(f"{module}.".startswith(f"{name}.") for module in graph), name
        for path in suite.files:
            assert path.endswith(" ") or (ROOT / path).exists(), path
    for name, package in plan.ONLY_WITH.items():
        assert any(package in graph[module] for module in plan.reach(graph)[name])
    # Folders that are imported by their bare names, as if they were packages from outside.
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/*.py")}
    bare = {name for name in graph if name in folders and not (ROOT / name / "__init__.py").exists()}
    assert bare <= {"verl", "vllm"}, "ON_THE_PATH lacks them"


class Repository:
    """A small history. Hours count from its first commit."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.path = path
        patch.setattr(plan, "ROOT", path)
        patch.setenv("GIT_CEILING_DIRECTORIES", str(path.parent))
        for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
            patch.setenv(name, os.devnull)
        for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
            patch.delenv(name, raising=False)
        for who in ("AUTHOR", "COMMITTER"):
            patch.setenv(f"GIT_{who}_NAME", "A")
            patch.setenv(f"GIT_{who}_EMAIL", "a@example.com")

    def git(self, *words: str, hour: int = 0) -> None:
        dated = {f"GIT_{who}_DATE": f"{1_700_000_000 + hour * 3600} +0000" for who in ("AUTHOR", "COMMITTER")}
        subprocess.run(("git", *words), cwd=self.path, env=os.environ | dated, check=True, capture_output=True)

    def commit(self, hour: int, **files: str) -> None:
        for name, text in files.items():
            path = self.path / FILES[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "x", hour=hour)


FILES = {
    "project": "pyproject.toml",
    "store": "gateway/tape/store/codec.py",
    "tape": "gateway/tape.py",
    "page": "docs/é.md",
}
PROJECT = '[build-system]\n[project]\ndependencies = ["orjson>=3", "googleapis-common-protos"]\n[tool.hatch]\n'


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    made = Repository(tmp_path / "repository", monkeypatch)
    made.path.mkdir()
    made.git("init", "--quiet")
    made.commit(0, project=PROJECT, store="import os\n", tape="import lmdb\n")
    return made


@pytest.mark.slow
def test_what_a_day_has_changed(repository: Repository) -> None:
    repository.commit(1, page="1")
    repository.commit(2, tape="import lmdb, os\n")
    repository.commit(3, store="import json\nimport orjson\nfrom google.protobuf import message\n")
    repository.commit(26, page="2")
    # At its hour, the commit of the second hour is a day old.
    assert plan.read_history() == (5, {"gateway/tape/store/codec.py", "docs/é.md"})


@pytest.mark.slow
def test_a_merge_has_changed_what_its_branch_has(repository: Repository) -> None:
    repository.git("checkout", "--quiet", "-b", "branch")
    repository.commit(30, tape="import lmdb\n#\n")
    repository.git("checkout", "--quiet", "-")
    repository.commit(31, page="1")
    repository.git("merge", "--quiet", "--no-ff", "--no-edit", "branch", hour=32)
    assert plan.read_history() == (4, {"gateway/tape.py", "docs/é.md"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "import duckdb\n",
        "import duckdb as d, os\n",
        "def f():\n    from duckdb.typing import INTEGER\n",
        'x = import_module("duckdb.typing")\n',
    ],
)
def test_a_new_package_is_a_change_of_its_folder(repository: Repository, text: str) -> None:
    repository.commit(30, store=text)
    assert plan.read_history()[1] == {"gateway/tape/store/codec.py", "import duckdb in gateway/tape"}


@pytest.mark.slow
def test_settings_of_development_tools_are_no_change_of_packages(repository: Repository) -> None:
    repository.commit(30, project=f"{PROJECT}[tool.ruff]\nline-length = 120\n")
    assert plan.read_history()[1] == set()
    repository.commit(31, project=PROJECT.replace(">=3", ">=4"))
    assert plan.read_history()[1] == {"pyproject.toml"}


@pytest.mark.slow
def test_a_project_of_less_than_a_day_has_changed_whole(repository: Repository) -> None:
    assert plan.read_history() == (1, {"pyproject.toml", "gateway/tape/store/codec.py", "gateway/tape.py"})


@pytest.mark.slow
def test_a_shallow_clone_knows_nothing(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.commit(30, page="1")
    repository.git("clone", "--quiet", "--depth", "1", repository.path.as_uri(), str(tmp_path / "shallow"))
    monkeypatch.setattr(plan, "ROOT", tmp_path / "shallow")
    plan.main()
    told = capsys.readouterr()
    assert [line.split("\t")[:2] for line in told.out.splitlines()] == [["run", name] for name in NAMES]
    assert "shallow" in told.err


@pytest.mark.slow
def test_nor_does_a_tree_without_history(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(repository.path / ".git")
    plan.main()
    assert "not a git repository" in capsys.readouterr().err


@pytest.mark.slow
def test_nor_does_a_machine_without_git(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(plan.NoHistoryError):
        plan.read_history()


PLAN = """\
run\tdeploy\t110\t-\t-\tit is its turn, at commit 8
run\tclients\t60\t-\tclients\tit is its turn, at commit 8
run\ttrain\t490\ttrain\t-\tcommits of a day reach it: trainer/x.py
run\tbench\t150\t-\t-\tit is its turn, at commit 8
run\tnewest\t290\t-\t-\tit is its turn, at commit 8
skip\tlearns\t600\ttrain vllm\t-\tno commit of a day reaches it; its turn is at commit 10, this is 8
"""

STUB = f"""\
#!{sys.executable}
import os, sys, time
from pathlib import Path
here, said = Path("HERE"), " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
if said.endswith(".ci/plan.py"):
    print((here / "plan").read_text(), end="")
    sys.exit()
with (here / "calls").open("a") as calls:
    print(said, file=calls)
print("this is", said, flush=True)
does = os.environ["DOES"].split("; ")
if "waits: " + said in does:
    (here / "waiting").write_text(str(os.getpid()))
    time.sleep({PATIENCE_S})
if "fails: " + said in does:
    while "waits" in os.environ["DOES"] and not (here / "waiting").exists():
        time.sleep(0.01)
    print(*range(500), "it broke", sep="\\n", flush=True)
    sys.exit(3)
"""
"""Stands for every command. It keeps what it was asked, and may fail, when one that never ends has begun."""

Run = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs `.ci/run` where every command is a stub: (exit status, output, commands)."""
    for name in ("bin/make", "bin/python3.13", ".venv/bin/python", ".ci/ordinary"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STUB.replace("HERE", str(tmp_path)))
        path.chmod(0o755)
    shutil.copy(RUN, tmp_path / ".ci" / "run")
    (tmp_path / "plan").write_text(PLAN)

    def start(*words: str, does: str = "") -> tuple[int, str, list[str]]:
        env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "DOES": does}
        done = subprocess.run(
            (tmp_path / ".ci" / "run", *words), env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        calls = tmp_path / "calls"
        return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines() if calls.exists() else []

    return start


NEWER = "make install VENV=.venv-newest PYTHON=python3.13"


def listed(said: str, title: str) -> dict[str, str]:
    """A list at the end, by its first words."""
    lines = said.rpartition(f"\n{title}\n")[2].partition("\n\n")[0].splitlines()
    return dict(line.split(maxsplit=1) for line in lines)


def ran(said: str) -> set[str]:
    lines = said.rpartition("\nseconds  part\n")[2].partition("\n\n")[0].splitlines()
    return {line.split(maxsplit=1)[1] for line in lines}


@pytest.mark.slow
def test_runs_what_always_runs_and_what_was_chosen(run: Run) -> None:
    status, said, calls = run(does=f"fails: {NEWER}; fails: python -m bench --quick")
    assert status == 0, said
    always = ["make demo", "make install", "make check", "make docs", "make test", "make test-more"]
    chosen = ["make install-clients", "make install-train", "make check-train", "make test-train", "make test-deploy"]
    beside = [NEWER, "python -m pytest -n 0 tests/clients/test_same_client.py", "python -m bench --quick"]
    assert sorted(call for call in calls if not call.startswith("python3.13")) == sorted(always + chosen + beside)
    # In two lanes, and the figures alone.
    assert calls[:2] == always[:2]
    assert calls[-1] == beside[-1]
    assert calls.index("make test") < calls.index("make test-more")
    assert calls.index("make check-train") < calls.index("make test-train")
    parts = ran(said)
    assert {"make test-more", "make test-train", f"{NEWER} FAILED: 3".replace(" FAILED", "  FAILED")} <= parts
    assert listed(said, "did not run  why") == {
        "newest": "python3.13 has not all that the tests need here",
        "learns": "no commit of a day reaches it; its turn is at commit 10, this is 8",
    }


@pytest.mark.slow
def test_what_cannot_be_installed_fails_nothing(run: Run) -> None:
    status, said, calls = run(does="fails: make install-train; fails: make install-clients")
    assert status == 0, said
    assert "make test-train" not in calls
    assert "python -m pytest -n 0 tests/clients/test_same_client.py" in calls
    assert listed(said, "did not run  why")["train"] == "make install-train failed here"
    assert "it broke" in said


@pytest.mark.slow
def test_the_first_lane_that_fails_ends_all(run: Run, tmp_path: Path) -> None:
    status, said, calls = run(does="fails: make check; waits: make test")
    assert status == 3
    assert "make test-more" not in calls
    log, _, end = said.partition("\nseconds  part\n")
    assert "this is make test\n" in log, "of the other lane there is the end"
    assert log.endswith("\n499\nit broke\n"), "the log of what failed is the last"
    assert "\n101\n" in log
    assert "\n100\n" not in log
    assert "make check  FAILED: 3" in end
    assert set(listed(said, "did not run  why").values()) >= {"it had ended before"}
    gone(int((tmp_path / "waiting").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("first", ["demo", "install"])
def test_what_fails_before_the_lanes_ends_all(run: Run, first: str) -> None:
    status, said, calls = run(does=f"fails: make {first}")
    assert status == 3
    assert calls[-1] == f"make {first}"
    assert ran(said) > {f"make {first}  FAILED: 3"}
    assert "it had ended before they were chosen" in said


@pytest.mark.slow
def test_a_suite_that_fails_ends_all(run: Run) -> None:
    status, said, calls = run(does="fails: make check-train")
    assert status == 3
    assert "make test-train" not in calls
    assert "make check-train  FAILED: 3" in ran(said)


@pytest.mark.slow
def test_only_says_what_it_would_run(run: Run) -> None:
    status, said, calls = run("--plan")
    assert (status, calls) == (0, [])
    assert re.search(r"^run +490  train .*: trainer/x\.py$", said, flags=re.MULTILINE)
    assert re.search(r"^skip +600  learns ", said, flags=re.MULTILINE)


def gone(pid: int) -> None:
    """Waits until there is no such process."""
    until = time.monotonic() + PATIENCE_S / 2
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["run", "ordinary"])
def test_bash_reads_the_script(script: str) -> None:
    subprocess.run(("bash", "-n", ROOT / ".ci" / script), check=True, capture_output=True)


# -- `make quick`


@pytest.mark.parametrize(
    ("package", "folder"),
    [
        ("gateway/tape", "tests/gateway/tape"),
        ("gateway/tape/store/records.py", "tests/gateway/tape/store"),
        ("tests/gateway/tape", "tests/gateway/tape"),
        ("console/commands", "tests/gateway/console/commands"),
        ("adapters", "tests/adapters"),
        ("gateway/followers/lake/nothing", "tests/gateway/followers/lake"),
        ("nothing", None),
    ],
)
def test_the_tests_of_a_package(package: str, folder: str | None) -> None:
    assert quick.folder_of(package) == folder


@pytest.mark.parametrize(
    ("changed", "files"),
    [
        # Itself, those that import it, those of its folder, those that import an importer.
        ({"gateway/below.py"}, ["tests/gateway/test_tape.py", "tests/clients/test_same_client.py"]),
        ({"tests/fakes/odd.py"}, ["tests/clients/test_same_client.py", "tests/providers/test_agents.py"]),
        ({"tests/verl/test_engine.py"}, ["tests/verl/test_engine.py"]),
        ({"trainer/ranks.py"}, ["tests/verl/test_engine.py", "tests/trainer/test_credit.py"]),
        ({"docs/tape.md"}, ["tests/test_docs.py"]),
        ({"tests/providers/golden.json"}, ["tests/providers/test_agents.py"]),
        ({"gateway/nobody.md"}, []),
    ],
)
def test_the_nearest_tests_of_a_change_come_first(changed: set[str], files: list[str]) -> None:
    tests = [f"{name.replace('.', '/')}.py" for name in GRAPH if name.rpartition(".")[2].startswith("test_")]
    found = quick.choose(changed, GRAPH, [*tests, "tests/test_docs.py"], {}, 1000)
    assert (found.taken[: len(files)], found.left) == (files, [])
    assert bool(found.taken) == bool(files)


def test_only_as_many_are_taken_as_fit_and_the_nearest_always() -> None:
    tests = [f"tests/t/test_{number}.py" for number in range(4)]
    graph = {plan.module(path): {"penstock.gateway.x"} for path in tests} | {"penstock.gateway.x": set[str]()}
    seconds = {tests[0]: 5.0, tests[1]: 3.0, tests[2]: 3.0}
    assert quick.choose({"gateway/x.py"}, graph, tests, seconds, 9) == (tests[:2], tests[2:])
    assert quick.choose({"gateway/x.py"}, graph, tests, seconds, 1) == (tests[:1], tests[1:])


def test_types_are_checked_of_what_make_check_checks() -> None:
    files = (
        "gateway/app.py",
        "tests/test_ci.py",
        "tests/verl/nothing.py",
        "trainer/runs/grpo.py",
        "docs/tape.md",
        "gone.py",
    )
    assert quick.typed(files) == ["penstock/gateway/app.py", "tests/test_ci.py"]


@pytest.mark.slow
def test_tests_that_have_not_begun_in_time_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, command = tmp_path / "test_it.py", (sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider")
    monkeypatch.setattr(quick, "REPORT", tmp_path / "quick.xml")
    for body, until, result in (("pass", math.inf, (0, True)), ("1/0", math.inf, (1, True)), ("1/0", 0, (0, False))):
        file.write_text(f"def test_one(): {body}\n")
        assert quick.run_tests(command, [str(file)], until) == result
