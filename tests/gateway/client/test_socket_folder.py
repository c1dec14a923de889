"""Directories of sockets, whose addresses are short."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from penstock.gateway.client import child_process as module
from penstock.gateway.client.child_process import LockedFolder, socket_folder


@pytest.mark.parametrize("depth", [1, 20, 60, 61, 62, 200])
def test_a_socket_has_an_address(depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Path(tempfile.mkdtemp(dir="/tmp"), "d" * depth)
    usual.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(usual))
    with socket_folder("penstock-", "gateway.sock") as folder, socket.socket(socket.AF_UNIX) as made:
        made.bind(f"{folder}/gateway.sock")
        assert Path(folder).stat().st_mode & 0o777 == 0o700
        path = f"{usual}/penstock-12345678/gateway.sock"
        assert (Path(folder).parent == usual) == (len(path) <= 100)
    assert not Path(folder).exists()


DIES = (
    "import os, signal, sys; from penstock.gateway.client.child_process import LockedFolder; "
    "one = LockedFolder('penstock-run-', "
    "sys.argv[1]); open(os.path.join(one.name, 'input.json'), 'w').close(); print(one.name, flush=True); "
    "sys.stdin.read() or os.kill(os.getpid(), signal.SIGKILL)"
)


@pytest.mark.slow
def test_what_a_killed_process_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    folder = str(tmp_path)
    (tmp_path / "penstock-mine").mkdir()
    module._sweep.cache_clear()  # pyright: ignore[reportPrivateUsage]  # it looks once
    command = (sys.executable, "-c", DIES, folder)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as lives:
        assert lives.stdout is not None
        own = lives.stdout.readline().strip()
        dead = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert dead.returncode == -9
        left = dead.stdout.strip()
        assert Path(left, "input.json").exists()
        with LockedFolder("penstock-", folder) as made:
            assert sorted(map(str, tmp_path.iterdir())) == sorted([f"{folder}/penstock-mine", own, made])
        _ = lives.communicate("go on")
    assert sorted(map(str, tmp_path.iterdir())) == [f"{folder}/penstock-mine"]
