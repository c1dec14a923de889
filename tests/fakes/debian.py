"""A Debian in a folder, made of its packages, and commands that run in it: chroot in a mount namespace of their own.

It needs root, `unshare` and apt; `missing` says what is not there. The folder is kept below `.build/`, so that it is
made once. Nothing that is mounted outlives its command.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fakes.process import ROOT

_MIRROR = "http://deb.debian.org/debian"
_GIVEN = ("etc/hosts", "etc/resolv.conf")
"""What an engine gives every container, as the machine has it."""
_KEPT = ROOT / ".build" / "bookworm"


def missing() -> str | None:
    """Why there can be none here."""
    if os.geteuid() != 0:
        return "only root may chroot"
    for tool in ("apt-get", "dpkg", "unshare", "chroot"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0:
        return "mount namespaces are not allowed here"
    return None


class NoDebian(Exception):
    """The packages cannot be had."""


def bookworm() -> Path:
    """About what debian:bookworm-slim is: Debian's minimal system, without lists and packages of apt. Raises
    `NoDebian`."""
    if _KEPT.exists():
        return _KEPT
    begun = _KEPT.with_name("bookworm.begun")
    shutil.rmtree(begun, ignore_errors=True)
    begun.parent.mkdir(exist_ok=True)
    program, env = _debootstrap(begun.parent)
    _told([program, "--variant=minbase", "bookworm", str(begun), _MIRROR], os.environ | env)
    for cache in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
        shutil.rmtree(begun / cache, ignore_errors=True)
    for name in _GIVEN:
        (begun / name).touch()
    begun.rename(_KEPT)
    return _KEPT


def _debootstrap(folder: Path) -> tuple[str, dict[str, str]]:
    """The program, installed here or taken out of its package, and variables that it needs."""
    installed = shutil.which("debootstrap")
    if installed is not None:
        return installed, {}
    at = folder / "debootstrap"
    if not at.exists():
        _told(["apt-get", "download", "debootstrap"], os.environ, folder)
        (package,) = folder.glob("debootstrap_*.deb")
        _told(["dpkg", "-x", str(package), str(at)], os.environ)
        package.unlink()
    return str(at / "usr/sbin/debootstrap"), {"DEBOOTSTRAP_DIR": str(at / "usr/share/debootstrap")}


def _told(command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise NoDebian(f"{shlex.join(command)}: {done.stdout[-500:]}")


@dataclass(frozen=True, slots=True)
class Mounts:
    """What a command sees besides the root."""

    binds: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """By where they are in the root, which has a folder there."""
    beside: Sequence[Path] = ()
    """Files that it finds below /mnt by their own paths; nothing of that stays in the root."""
    read_only: bool = False
    """Whether the root cannot be written to, but for what is bound."""


def entered(root: Path, command: Sequence[str], user: str, workdir: str, mounts: Mounts) -> list[str]:
    """The command line that runs a command in a root. Its process is the command's own: signals get there."""
    at = shlex.quote(str(root))
    steps = ["set -e", f"mount --bind {at} {at}"]
    if mounts.read_only:
        steps.append(f"mount -o remount,bind,ro {at}")
    steps += [f"mount --bind /{name} {at}/{name}" for name in _GIVEN]
    steps += [f"mount -t proc proc {at}/proc", f"mount --rbind /dev {at}/dev"]
    steps += [f"mount --bind {shlex.quote(str(path))} {at}{where}" for where, path in mounts.binds.items()]
    if mounts.beside:
        steps.append(f"mount -t tmpfs tmpfs {at}/mnt")
    for path in mounts.beside:
        inside = f"{at}/mnt{shlex.quote(str(path))}"
        steps.append(f"mkdir -p $(dirname {inside}) && cp {shlex.quote(str(path))} {inside}")
    within = f"cd {shlex.quote(workdir)} && exec {shlex.join(command)}"
    steps.append(f"exec chroot --userspec={user} --groups= {at} /bin/sh -c {shlex.quote(within)}")
    return ["unshare", "--mount", "/bin/sh", "-c", "\n".join(steps)]


def outside() -> tuple[dict[str, str], Mounts]:
    """How this machine reaches the package index, for a command in a root: variables, and files that they name, such as
    certificates. What lies in folders of this machine is left out."""
    said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    found = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    for key, value in re.findall(r"^(?:global|:env:|install)\.([\w-]+)='(.*)'$", said, re.MULTILINE):
        # Whether pip compiles is a matter of the image, and not of the way to the index.
        if key != "compile" and "file:" not in value and not Path(value).is_dir():
            found["PIP_" + key.upper().replace("-", "_")] = value.replace("\\n", " ")
    files = {name: Path(value) for name, value in found.items() if Path(value).is_file()}
    return found | {name: f"/mnt{path}" for name, path in files.items()}, Mounts(beside=sorted(set(files.values())))
