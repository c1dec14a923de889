"""A Dockerfile as a test sees it: its stages and instructions, and an image made by running them in a chroot.

No daemon and no registry. What a build would take from the registry is a folder with a Debian (`fakes.debian`). Only
the instructions that ours has are known; any other is an error.

    image = Builder(read(ROOT / "Dockerfile"), context=ROOT, base=debian, home=tmp_path).image("gateway")
    process = image.start("--port", "4800", mounts=image.mounts(tmp_path / "volumes"), log=tmp_path / "log")
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fakes.debian import Mounts, entered, outside

_FLAG = re.compile(r"--([a-z-]+)=(\S+)\s+")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_CONFIGURES = ("ENV", "WORKDIR", "USER", "VOLUME", "EXPOSE", "LABEL", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD")
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One of them: `COPY --from=build a b` has the flags {"from": "build"} and the text "a b"."""

    line: int
    name: str
    flags: Mapping[str, str]
    text: str

    def form(self) -> list[str]:
        """Its exec form: a list of words."""
        made = json.loads(self.text)
        assert isinstance(made, list), f"line {self.line}: {self.name} is not in exec form"
        return [str(word) for word in made]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


@dataclass(slots=True)
class Stage:
    """What stands between one FROM and the next."""

    name: str
    base: str
    instructions: list[Instruction] = field(default_factory=list[Instruction])


@dataclass(slots=True)
class Dockerfile:
    """A whole one."""

    arguments: dict[str, str]
    """Those in front of the first stage, with their defaults."""
    stages: dict[str, Stage]


def read(path: Path) -> Dockerfile:
    """Its stages by their names."""
    found = Dockerfile({}, {})
    stage: Stage | None = None
    for one in _instructions(path.read_text(encoding="utf-8")):
        if one.name == "FROM":
            base, _, name = one.text.split()
            stage = found.stages[name] = Stage(name, base)
        elif stage is not None:
            stage.instructions.append(one)
        else:
            assert one.name == "ARG", f"line {one.line}: {one.name} in front of the first FROM"
            name, _, value = one.text.partition("=")
            found.arguments[name] = value
    return found


def _instructions(text: str) -> list[Instruction]:
    """With lines joined that end with a backslash; lines that are comments are no part of any."""
    found: list[Instruction] = []
    begun, line = "", 0
    for number, written in enumerate(text.splitlines(), 1):
        if written.lstrip().startswith("#") or not written.strip():
            continue
        line = line if begun else number
        begun += written.strip().removesuffix("\\")
        if written.endswith("\\"):
            continue
        name, _, rest = begun.partition(" ")
        rest, flags, begun = rest.strip(), dict[str, str](), ""
        while (flag := _FLAG.match(rest)) is not None:
            flags[flag[1]] = flag[2]
            rest = rest[flag.end() :]
        found.append(Instruction(line, name, flags, rest))
    return found


@dataclass(slots=True)
class Image:
    """A root, and how it is to be run."""

    root: Path
    env: dict[str, str] = field(default_factory=lambda: {"PATH": _DEFAULT_PATH})
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list[str])
    command: list[str] = field(default_factory=list[str])
    healthcheck: list[str] | None = None
    volumes: list[str] = field(default_factory=list[str])
    ports: list[str] = field(default_factory=list[str])
    stopsignal: str = ""
    labels: dict[str, str] = field(default_factory=dict[str, str])

    def configure(self, one: Instruction) -> None:
        """What an instruction changes that runs nothing."""
        text = self.filled(one.text, {})
        match one.name:
            case "ENV":
                self.env |= dict(word.split("=", 1) for word in shlex.split(text))
            case "LABEL":
                self.labels |= dict(word.split("=", 1) for word in shlex.split(text))
            case "WORKDIR":
                self.workdir = text
                self.inside(text).mkdir(parents=True, exist_ok=True)
            case "USER":
                self.user = text
            case "STOPSIGNAL":
                self.stopsignal = text
            case "EXPOSE":
                self.ports += text.split()
            case "VOLUME":
                self.volumes += one.form()
            case "ENTRYPOINT":
                self.entrypoint = one.form()
            case "CMD":
                self.command = one.form()
            case _:
                assert one.name == "HEALTHCHECK", one
                how, _, words = one.text.partition(" ")
                self.healthcheck = None if how == "NONE" else Instruction(one.line, how, {}, words).form()

    def filled(self, text: str, arguments: Mapping[str, str]) -> str:
        """With variables of the image and arguments of the build put in."""
        known = {**arguments, **self.env}
        return _VARIABLE.sub(lambda found: known.get(found[1] or found[2], ""), text)

    def inside(self, path: str) -> Path:
        """A path in the image as one outside."""
        return self.root / path.lstrip("/")

    def run(self, *command: str, env: Mapping[str, str] | None = None, mounts: Mounts | None = None) -> str:
        """What a command prints as the image's user; AssertionError where it fails."""
        done = subprocess.run(
            entered(self.root, command, self.user, self.workdir, mounts or Mounts()),
            env=self.env | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, f"{shlex.join(command)}: {done.returncode}\n{done.stdout[-4000:]}"
        return done.stdout

    def mounts(self, volumes: Path, beside: Mapping[str, Path] | None = None) -> Mounts:
        """The image read-only, with its volumes as folders that hold at first what the image has there, and others
        beside them."""
        binds = dict(beside or {})
        for volume in self.volumes:
            at = volumes / volume.strip("/").replace("/", "-")
            if not at.exists():
                volumes.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "--archive", self.inside(volume), at], check=True)
            binds[volume] = at
        return Mounts(binds, read_only=True)

    def start(
        self, *command: str, mounts: Mounts, log: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Starts it as a container would: its entrypoint with its own command, and more words behind it. What it prints
        is to be read, what it complains of goes into the log."""
        words = [*self.entrypoint, *self.command, *command]
        with log.open("ab") as complaints:
            return subprocess.Popen(
                entered(self.root, words, self.user, self.workdir, mounts),
                env=self.env | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
            )


@dataclass(slots=True)
class Builder:
    """Makes images, each stage once."""

    dockerfile: Dockerfile
    context: Path
    base: Path
    """A root in place of what the registry has."""
    home: Path
    made: dict[str, Image] = field(default_factory=dict[str, Image])

    def image(self, name: str) -> Image:
        """The image of a stage, and of all that it needs."""
        if name in self.made:
            return self.made[name]
        stage = self.dockerfile.stages[name]
        image = self._begun(stage)
        arguments: dict[str, str] = {}
        for one in stage.instructions:
            match one.name:
                case "ARG":
                    argument, _, default = one.text.partition("=")
                    arguments[argument] = default
                case "RUN":
                    settings, mounts = outside()
                    image.run("/bin/sh", "-c", one.text, env={**settings, **arguments}, mounts=mounts)
                case "COPY":
                    self._copy(image, one)
                case _:
                    assert one.name in _CONFIGURES, f"line {one.line}: {one.name} is not known here"
                    image.configure(one)
        self.made[name] = image
        return image

    def _begun(self, stage: Stage) -> Image:
        """An image that is still what its FROM says."""
        root = self.home / stage.name
        if stage.base not in self.dockerfile.stages:
            filled = Image(self.base).filled(stage.base, self.dockerfile.arguments)
            assert filled.startswith("docker.io/library/debian:bookworm"), f"no folder stands for {filled}"
            _copied(self.base, root)
            return Image(root)
        under = self.image(stage.base)
        _copied(under.root, root)
        return Image(
            root,
            dict(under.env),
            under.workdir,
            under.user,
            list(under.entrypoint),
            list(under.command),
            under.healthcheck,
            list(under.volumes),
            list(under.ports),
            under.stopsignal,
            dict(under.labels),
        )

    def _copy(self, image: Image, one: Instruction) -> None:
        assert set(one.flags) <= {"from"}, f"line {one.line}: {one.flags}"
        top = self.image(one.flags["from"]).root if "from" in one.flags else self.context
        *sources, target = one.text.split()
        to = image.inside(os.path.join(image.workdir, target))
        for source in sources:
            path = top / source.lstrip("/")
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__") if "from" not in one.flags else None
                shutil.copytree(path, to, symlinks=True, ignore=ignored, dirs_exist_ok=True)
            else:
                named = to / path.name if target.endswith("/") else to
                named.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, named)


def _copied(root: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "--archive", "--reflink=auto", root, to], check=True)


def megabytes(root: Path) -> int:
    """What is in a root, links counted once."""
    said = subprocess.run(["du", "-sxm", root], capture_output=True, text=True, check=True).stdout
    return int(said.split()[0])
