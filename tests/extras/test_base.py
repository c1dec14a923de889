"""The base install: what is in it, that all of it works from anywhere, and how it asks for more."""

from __future__ import annotations

import json
import subprocess
import zipfile
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from fakes.clean import PIP, Clean
from fakes.many_turns import hello
from fakes.mistakes import tells
from fakes.process import ROOT, Gateway, upstream, upstreams
from fakes.provider import Provider

from penstock.gateway.client.client import Client
from penstock.gateway.model.run import NewRun, Point

PACKAGES = ("gateway", "console", "sidecar", "adapters", "trainer", "tui")
HELP = """
from penstock.console.main import main
from penstock.console.commands.command_table import GROUPS, all_commands
for words in [(), *((name,) for name in GROUPS), *(name.split() for name in all_commands())]:
    print("asked:", *words)
    main([*words, "--help"])
"""
NOWHERE = upstreams(openai="http://127.0.0.1:9/v1")


def names(wheel: Path) -> set[str]:
    """The files in it."""
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path, tmp_path: Path) -> None:
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES)
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    own = {f"penstock/{name}" for name in ("__init__.py", "__main__.py", "graders.py", "py.typed")}
    assert names(wheel) == own | {f"penstock/{name}" for name in tracked if (ROOT / name).exists()}
    subprocess.run([*PIP, "wheel", "--no-deps", "--wheel-dir", tmp_path, sdist(tmp_path)], check=True)
    (again,) = tmp_path.glob("*.whl")
    assert names(again) == names(wheel)


def sdist(home: Path) -> Path:
    """The source distribution."""
    backend = home / "backend"
    subprocess.run([*PIP, "install", "--target", backend, "hatchling>=1.27"], check=True)
    command = (PIP[0], "-m", "hatchling", "build", "-t", "sdist", "-d", home / "dist")
    subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(backend)}, check=True)
    (made,) = (home / "dist").iterdir()
    # Half a megabyte of it are hashes of packages, as much the recording that the TUI plays: neither packs.
    assert made.stat().st_size < 5 << 20
    return made


def test_every_command_has_its_help(base: Clean) -> None:
    said = base.run("-c", HELP).split("asked:")[1:]
    assert len(said) > 40
    for one in said:
        words, _, shown = one.partition("\n")
        assert f"Usage: penstock{words.rstrip()} " in shown.replace("COMMAND", " "), one


def somebodys(home: Path) -> Path:
    """A distribution `adapters` of somebody else, with modules that are called as ours are. None can be imported."""
    made = home / "adapters-1.3.0-py3-none-any.whl"
    files = {f"adapters/{name}.py": "raise ImportError('not ours')" for name in ("__init__", "commands", "samples")}
    files["adapters-1.3.0.dist-info/METADATA"] = "Metadata-Version: 2.1\nName: adapters\nVersion: 1.3.0\n"
    files["adapters-1.3.0.dist-info/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files["adapters-1.3.0.dist-info/RECORD"] = "".join(f"{name},,\n" for name in files)
    with zipfile.ZipFile(made, "w") as file:
        for name, text in files.items():
            file.writestr(name, text)
    return made


async def test_another_package_adapters_is_not_in_the_way(base: Clean, provider: Provider, tmp_path: Path) -> None:
    with base.beside(somebodys(tmp_path)):
        assert "not ours" in base.run("-c", "try:\n import adapters\nexcept ImportError as e: print(e)")
        test_every_command_has_its_help(base)
        nobody = await base.shell("http://127.0.0.1:9", tmp_path).run("samples", "--form", "chat")
        assert (nobody.code, "nothing answers there" in nobody.err) == (1, True), nobody.err
        async with base.gateway(tmp_path / "home", upstreams(openai=provider.openai_url)) as gateway:
            await hello(gateway, "r1")
            made = await base.shell(gateway.url, tmp_path).run("samples", "--form", "chat")
    assert made.code == 0, made.err
    assert json.loads(made.text)["messages"][0]["content"] == "Hello."


async def test_a_gateway_records_and_is_read_from_any_folder(base: Clean, provider: Provider, tmp_path: Path) -> None:
    async with base.gateway(tmp_path / "home", upstreams(openai=provider.openai_url)) as gateway:
        shell = base.shell(gateway.url, tmp_path)
        await hello(gateway, "r1")
        for words in (("show", "r1"), ("doctor", "r1"), ("stats",), ("queue",), ("check", "--data", str(gateway.data))):
            done = await shell.run(*words)
            assert (done.code, done.err) == (0, ""), words
        exported = await shell.run("export", "--what", "messages")
        chat = await shell.run("samples", "--form", "chat")
        pairs = await shell.run("samples", "--form", "preferences")
        worked = await run_tasks(shell.folder, gateway, base)
    assert json.loads(exported.out)["messages"][0]["parts"][0]["text"] == "Hello."
    (sample,) = map(json.loads, chat.text.splitlines())
    assert [message["role"] for message in sample["messages"]] == ["user", "assistant"]
    assert pairs.code == 0, pairs.err
    assert worked == "2 succeeded, 0 failed\n"


async def run_tasks(folder: Path, gateway: Gateway, base: Clean) -> str:
    """Two tasks, queued and worked off."""
    (folder / "tasks.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    shell = base.shell(gateway.url, folder)
    queued = await shell.run("enqueue", "tasks.jsonl")
    assert queued.code == 0, queued.err
    done = await shell.run("run", "--", "true")
    assert done.code == 0, done.err
    return done.text


TRAIN = "torch, transformers, peft must be installed for this: pip install '.[train]' in Penstock's checkout"
APO = "must be installed for this: pip install '.[apo]' in Penstock's checkout"
BOARD = "TensorBoard's files needs tensorboardX: pip install '.[plots]' in Penstock's checkout"
RULES = "masking rules with a pattern need google-re2: pip install '.[masking]' in Penstock's checkout"
ASKS = {
    "sql SELECT": "SQL needs the index: pip install '.[index]' in Penstock's checkout, then restart the gateway; "
    "until then filters scan the tape",
    "export --format parquet -o x": "Parquet needs pyarrow: pip install '.[parquet]' in Penstock's checkout",
    "lake --to lake": "a lake needs deltalake, pyarrow: pip install '.[lake]' in Penstock's checkout",
    "mcp": "an MCP server needs mcp: pip install '.[mcp]' in Penstock's checkout",
    "samples": "--form samples needs numpy: pip install '.[samples]' in Penstock's checkout; chat and preferences do "
    "without",
    "samples --form chat --format parquet -o x": "Parquet needs pyarrow: "
    "pip install '.[parquet]' in Penstock's checkout",
    "tui": "the TUI needs textual: pip install '.[tui]' in Penstock's checkout",
    "tui --plain": "the TUI needs textual: pip install '.[tui]' in Penstock's checkout",
    "run --on ray -- true": "--on ray needs more packages: pip install '.[ray]' in Penstock's checkout",
    "run --on kubernetes --image x -- true": "--on kubernetes needs more packages: "
    "pip install '.[kubernetes]' in Penstock's checkout",
    "runs plot run --out run.png": "PNG needs matplotlib: pip install '.[plots]' in Penstock's checkout",
    "runs export run --to tensorboard -o board": BOARD,
    "runs export run --to mlflow -o flow": "MLflow's database needs mlflow: "
    "pip install '.[mlflow]' in Penstock's checkout",
    "train apo apo.toml": f"gepa, numpy {APO}",
    "train custom json:loads": f"gepa, numpy {APO}",
    **{f"train {kind} train.toml": TRAIN for kind in ("grpo", "sft", "dpo")},
    "serve --config masking.toml --port 0": RULES,
    "masking try body --config masking.toml": RULES,
    "import litellm-config masking.toml": "YAML needs PyYAML: pip install '.[yaml]' in Penstock's checkout",
    "serve --config translating.toml --port 0": "litellm is not installed: "
    "pip install '.[providers]' in Penstock's checkout",
}


@pytest.fixture
async def reported(base: Clean, tmp_path: Path) -> AsyncGenerator[Gateway]:
    """A gateway that a trainer has reported to."""
    async with base.gateway(tmp_path / "home", NOWHERE) as gateway:
        async with Client(gateway.url) as client:
            await client.start_run(NewRun(id="run", kind="grpo"))
            await client.add_points("run", [Point(step=0, values={"reward": 1.0})])
        yield gateway


async def test_what_needs_an_extra_says_which(base: Clean, reported: Gateway, tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text('[model]\npath = "m"\n[run]\nname = "r"\n[rollouts]\ntasks = "t"\n')
    (tmp_path / "apo.toml").write_text('[texts]\nprompts = ["p"]\n[tasks]\nfile = "t"\n[reflection]\nmodel = "m"\n')
    route = '[[route]]\nmodel = "m"\nupstream = "vllm"\ntranslate = true\n'
    (tmp_path / "translating.toml").write_text(upstream("vllm", "http://127.0.0.1:9/v1", "openai") + route)
    rule = '[[masking]]\nname = "tickets"\npattern = "T-[0-9]+"\n'
    (tmp_path / "masking.toml").write_text(upstream("vllm", "http://127.0.0.1:9/v1", "openai") + rule)
    (tmp_path / "body").write_text("T-1")
    shell = base.shell(reported.url, tmp_path)
    for words, message in ASKS.items():
        done = await shell.run(*words.split())
        assert (done.code != 0, done.err.strip()) == (True, f"penstock: {message}"), words
    assert "x" not in {path.name for path in tmp_path.iterdir()}  # noqa: ASYNC240 - a few names


def test_the_demo_asks_for_its_own(base: Clean) -> None:
    done = subprocess.run([base.python, "-m", "examples.demo.demo"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert tells(done.stderr, "need openai and anthropic", "pip install '.[demo]'")
