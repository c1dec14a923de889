"""The first day of a user who is not root: a gateway on a new directory, what it keeps, and what stands in the way.

Every process here has an ordinary user's rights to files (`.ci/ordinary`), also where the tests run as root, who may
open anything. So nothing here is skipped, and a machine on which root cannot give up these rights fails.
"""

from __future__ import annotations

import asyncio
import getpass
import os
from pathlib import Path
from stat import S_IMODE

import pytest
from fakes.many_turns import hello
from fakes.process import ORDINARY, running, upstreams
from fakes.provider import Provider
from fakes.shell import PENSTOCK, Done, Shell

pytestmark = pytest.mark.slow

ME = getpass.getuser()
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Commands of an ordinary user, in a folder of the test."""
    return Shell(NOWHERE, tmp_path, (*ORDINARY, *PENSTOCK))


async def as_ordinary(*command: str | Path) -> Done:
    """A command with an ordinary user's rights, when it has ended."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*ORDINARY, *command, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    assert process.returncode is not None
    return Done(process.returncode, out, err.decode())


async def test_what_nobody_may_write_is_refused_here(tmp_path: Path) -> None:
    """Without this the other tests would prove nothing."""
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch(0o400)
    folder.mkdir(0o600)
    refused = await asyncio.gather(
        as_ordinary("sh", "-c", f'echo x > "{file}"'), as_ordinary("touch", folder / "new"), as_ordinary("cat", file)
    )
    assert [done.code == 0 for done in refused] == [False, False, True]
    assert all("Permission denied" in done.err for done in refused[:2])


async def test_a_gateway_on_a_new_directory_records_restarts_and_is_read(
    provider: Provider, tmp_path: Path, shell: Shell
) -> None:
    home = tmp_path / "not" / "there" / "yet"
    async with running(home, upstreams(openai=provider.openai_url), under=ORDINARY) as gateway:
        shell.env["PENSTOCK_GATEWAY"] = gateway.url
        await hello(gateway, "r1")
        await gateway.restart()
        await hello(gateway, "r2")
        listed, shown, clean = [
            await shell.run(*words) for words in (("rollouts",), ("show", "r1"), ("check", "--data", str(gateway.data)))
        ]
        assert await gateway.terminate() == 0
    assert [line.split()[0] for line in listed.text.splitlines()] == ["rollout", "r2", "r1"]
    assert "user  Hello." in shown.text
    assert (clean.code, clean.text.splitlines()[-1]) == (0, "clean")
    # Prompts and answers of a whole company may be in it: they are their owner's alone.
    assert modes(gateway.data) == {
        ".": 0o700,
        "lock": 0o600,
        "tape": 0o700,
        "tape/data.mdb": 0o600,
        "tape/lock.mdb": 0o600,
        "writers": 0o700,
    }


def modes(folder: Path) -> dict[str, int]:
    """Who may do what with everything in a folder."""
    return {str(it.relative_to(folder)): S_IMODE(it.stat().st_mode) for it in (folder, *folder.rglob("*"))}


@pytest.fixture
async def data(tmp_path: Path, shell: Shell) -> Path:
    """The directory of a tape that a gateway has left."""
    async with running(tmp_path, upstreams(openai=NOWHERE), under=ORDINARY) as gateway:
        return gateway.data


WRONG = {
    "a directory that LMDB made": ("tape", 0o600, "chmod u+rwx {data}/tape", True),
    "a directory without rights": (".", 0o000, "chmod u+rwx {data}", True),
    "a tape that may not be written": ("tape/data.mdb", 0o400, "chmod u+rw {data}/tape/data.mdb", False),
    "a table of readers that may not be written": ("tape/lock.mdb", 0o400, "chmod u+rw {data}/tape/lock.mdb", True),
    "a lock that may not be written": ("lock", 0o400, "chmod u+rw {data}/lock", False),
    "a directory that may not be written": (".", 0o500, "", False),
}
"""Something of the tape, its mode, the way out (none: a gateway starts), and whether who only reads is told it too."""


@pytest.mark.parametrize("case", WRONG)
async def test_a_tape_with_wrong_rights_names_what_is_in_the_way_and_the_way_out(
    data: Path, shell: Shell, case: str
) -> None:
    name, mode, way, also_read = WRONG[case]
    before = modes(data)
    (data / name).chmod(mode)
    try:
        start, check = await served_until_ready(shell, data), await shell.run("check", "--data", str(data))
    finally:
        for name, right in before.items():
            (data / name).chmod(right)
    assert is_told(start, way.format(data=data))
    assert is_told(check.err, way.format(data=data) if also_read else "")
    assert check.code == also_read


def is_told(said: str, way: str) -> bool:
    """Whether the way out is named, and who may not; nothing where there is none."""
    return all(word in said for word in (f" {ME} may not ", f"; {way}, or choose another --data")) if way else not said


async def served_until_ready(shell: Shell, data: Path) -> str:
    """What a gateway says that cannot start; nothing where it can, and then it is stopped again."""
    process = await shell.start("serve", "--data", str(data), "--port", "0")
    assert process.stdout is not None
    assert process.stderr is not None
    if await process.stdout.readline():
        process.terminate()
        await process.communicate()
        return ""
    said = (await process.stderr.read()).decode().strip()
    assert await process.wait() == 1
    return said


async def test_a_directory_that_cannot_be_made(shell: Shell, tmp_path: Path) -> None:
    closed, file = tmp_path / "closed", tmp_path / "file"
    closed.mkdir(0o500)
    file.touch()
    assert is_told(await served_until_ready(shell, closed / "data"), f"chmod u+rwx {closed}")
    said = await served_until_ready(shell, file / "data")
    assert all(word in said for word in (f"{file} is a file", "; choose another --data"))
    assert os.listdir(closed) == []


async def test_nothing_is_named_and_the_working_directory_may_not_be_written(shell: Shell, tmp_path: Path) -> None:
    shell.folder = tmp_path / "closed"
    shell.folder.mkdir(0o500)
    process = await shell.start("serve", "--port", "0")
    _, err = await process.communicate()
    assert is_told(err.decode(), f"chmod u+rwx {shell.folder}")


async def test_a_configuration_that_may_not_be_read(shell: Shell, tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.touch(0o000)
    done = await shell.run("serve")
    assert (done.code, done.err.strip()) == (1, "penstock: penstock.toml cannot be read: Permission denied")


async def test_files_of_results_that_may_not_be_written(provider: Provider, tmp_path: Path, shell: Shell) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(0o500)
    async with running(tmp_path / "home", upstreams(openai=provider.openai_url), under=ORDINARY) as gateway:
        shell.env["PENSTOCK_GATEWAY"] = gateway.url
        await hello(gateway, "r1")
        done = [await shell.run(command, "-o", f"{closed}/out.jsonl") for command in ("export", "samples")]
    assert [(one.code, one.err.strip()) for one in done] == [
        (1, f"penstock: {closed}/out.jsonl: Permission denied")
    ] * 2


async def test_a_run_that_may_not_write_its_directory(shell: Shell, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(0o500)
    text = f'model.path = "model"\nmodel.name = "policy"\nrun.name = "r"\nrun.directory = "{closed}/run"\n'
    (tmp_path / "train.toml").write_text(text)
    done = await shell.run("train", "sft", "train.toml")
    assert done.code == 2
    assert all(word in done.err for word in ("run.directory: ", f"{closed} may not be written", "; name another"))
