"""`nft` and `iptables` where the machine has none: Debian's, unpacked into a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

PACKAGES: Final = (
    *("nftables", "libnftables1", "libnftnl11", "libmnl0", "libjansson4", "libgmp10", "libedit2", "libbsd0", "libmd0"),
    *("iptables", "libip4tc2", "libip6tc2", "libxtables12", "libnetfilter-conntrack3", "libnfnetlink0"),
)
PROGRAMS: Final = {
    "nft": ("nft",),
    "iptables": ("iptables-restore", "ip6tables-restore"),
}
NOWHERE: Final = "this machine has no nft, and Debian's package cannot be had with apt-get"


def programs(folder: Path) -> dict[str, str] | None:
    """A PATH for each tool, with that tool alone; None where there is none to be had."""
    if all(shutil.which(name) for names in PROGRAMS.values() for name in names):
        return {tool: _linked(folder / tool, {name: _script(name) for name in PROGRAMS[tool]}) for tool in PROGRAMS}
    if shutil.which("apt-get") is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, capture_output=True)
    if done.returncode != 0:
        return None
    root = folder / "root"
    for package in folder.glob("*.deb"):
        _ = subprocess.run(["dpkg", "-x", package, root], check=True)
    libraries = [str(root / place / "x86_64-linux-gnu") for place in ("usr/lib", "lib")]
    given = f"LD_LIBRARY_PATH={':'.join(libraries)} XTABLES_LIBDIR={libraries[0]}/xtables"
    found = {
        "nft": {"nft": f"{given} exec {root}/usr/sbin/nft"},
        "iptables": {name: f"{given} exec {root}/usr/sbin/xtables-nft-multi {name}" for name in PROGRAMS["iptables"]},
    }
    return {tool: _linked(folder / tool, scripts) for tool, scripts in found.items()}


def _script(name: str) -> str:
    return f"exec {shutil.which(name)}"


def _linked(folder: Path, scripts: dict[str, str]) -> str:
    """A PATH on which only these are, besides what is there anyway and is none of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in scripts.items():
        (folder / name).write_text(f'#!/bin/sh\n{words} "$@"\n')
        (folder / name).chmod(0o755)
    return os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
