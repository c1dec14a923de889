"""Directories of sockets, whose addresses are short."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from penstock.gateway.client.socket_folder import socket_folder


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
