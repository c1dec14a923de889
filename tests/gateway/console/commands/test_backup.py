"""`penstock backup` and `penstock restore` as people use them, beside a gateway that works."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest
from fakes.disks import small_disk
from fakes.local import Local, locally
from fakes.mistakes import tells
from fakes.process import upstreams
from fakes.provider import Provider
from fakes.shell import Shell
from fakes.tape import Tape

from penstock.console.commands import check
from penstock.gateway.app import open_store


def odd(path: Path) -> tuple[dict[str, int], list[str]]:
    return dict.fromkeys(("rollouts", "attempts", "changes", "open", "used_bytes"), 1), ["rollout r1: odd"]


@pytest.mark.slow
async def test_a_backup_of_a_gateway_at_work_is_served_again(
    provider: Provider, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    config = upstreams(openai=provider.openai_url)
    async with locally(tmp_path / "first", config) as gateway:
        shell = Shell(gateway.url, tmp_path)
        for number in range(3):
            await gateway.ask(http, f"before-{number}")
        await Tape(gateway.url, http).written()
        shown = await shell.run("show", "before-1")
        token = (await shell.run("token", "late")).text.strip()
        async with asyncio.TaskGroup() as together:
            for number in range(20):
                _ = together.create_task(gateway.ask(http, f"during-{number}"))
            done = await shell.run("backup", "copies/monday", "--data", str(gateway.data))
    assert (done.code, done.err) == (0, "")
    assert re.match(r"copies/monday: \d+ rollouts, .* [0-9.]+ [KM]iB\n", done.text)
    assert done.text.endswith("\nclean\n")
    done = await shell.run("restore", "copies/monday", "--data", "second/data")
    assert (done.code, done.err) == (0, "")
    assert done.text.endswith("\nclean; second/data has it now\n")
    async with locally(tmp_path / "second", config) as again:
        shell = Shell(again.url, tmp_path)
        assert (await shell.run("show", "before-1")).text == shown.text
        await again.ask(http, "after")
        body = {"model": "gpt-5", "messages": [{"role": "user", "content": "Is my token good?"}]}
        headers = {"Authorization": f"Bearer {token}"}
        async with http.post(f"{again.url}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200
        await Tape(again.url, http).written()
        listed = (await shell.run("rollouts")).text
    assert all(name in listed for name in ("before-0", "before-1", "before-2", "after", "late"))


@pytest.mark.slow
async def test_no_tape_is_overwritten(shell: Shell, local: Local, http: aiohttp.ClientSession) -> None:
    await local.ask(http, "r1")
    data = str(local.data)
    assert (await shell.run("backup", "copy", "--data", data)).code == 0
    for words in (("backup", "copy"), ("restore", "copy")):
        done = await shell.run(*words, "--data", data)
        assert (done.code, done.text, done.err.count("\n")) == (1, "", 1)
        assert done.err.startswith("penstock: ")
        assert tells(done.err, "holds a tape already", "name another directory") or words[0] == "restore"


def test_a_damaged_backup_is_not_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a damaged tape is backed up, because there is nothing better."""
    from penstock.console.commands.serve import backup, restore
    from penstock.gateway.client.console import CommandError

    with open_store(tmp_path / "data"):
        pass
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "examine", odd)
    with pytest.raises(CommandError, match="copy is a whole copy of data, and neither is clean: 1 problems"):
        backup(Path("copy"), data=Path("data"))
    assert "rollout r1: odd" in capsys.readouterr().out
    with pytest.raises(CommandError, match="copy is not clean: 1 problems; nothing was restored"):
        restore(Path("copy"), data=Path("new"))
    assert not Path("new/tape/data.mdb").exists()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    restore(Path("copy"), data=Path("new"))
    assert Path("new/tape/data.mdb").exists()


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 24 << 10, 40 << 10], ids=["none", "24k", "40k"])
async def test_a_full_disk_is_said_by_whoever_needs_room_on_it(left: int, tmp_path: Path) -> None:
    """Also where it ends in a file that is written through a map, so that the system would kill the process."""
    with open_store(tmp_path / "tape"):
        pass
    shell = Shell("http://127.0.0.1:1", tmp_path)
    assert (await shell.run("backup", "good", "--data", "tape")).code == 0
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        (disk / "ballast").write_bytes(bytes((1 << 20) - left))
        copy = str(disk / "copy")
        tried = {
            "backup": await shell.run("backup", copy, "--data", "tape"),
            "restore": await shell.run("restore", "good", "--data", copy),
        }
        if not left:
            tried["serve"] = await shell.run("serve", "--data", copy, "--port", "0")
        for name, done in tried.items():
            assert done.code == 1, (name, done)
            assert "No space left on device; " in done.err, (name, done)
            assert f" {copy}: " in done.err, "it names what was asked for"
        assert not (disk / "copy" / "tape" / "data.mdb").exists()


@pytest.mark.slow
async def test_who_may_not_write_there_is_told_what_to_change(tmp_path: Path) -> None:
    with open_store(tmp_path / "tape"):
        pass
    shell = Shell("http://127.0.0.1:1", tmp_path)
    (tmp_path / "file").touch()
    backup = await shell.run("backup", "file", "--data", "tape")
    restore = await shell.run("restore", "tape", "--data", "file")
    said = "penstock: cannot write a copy to file: {} is a file where a directory must be; {}"
    assert backup.err.strip() == said.format(tmp_path / "file", "name another directory")
    assert restore.err.strip() == said.format(tmp_path / "file", "choose another --data")
    nothing = await shell.run("restore", "nowhere", "--data", "to")
    assert nothing.err.strip().endswith("or that `penstock backup` has made")
