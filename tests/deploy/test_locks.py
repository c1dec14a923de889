"""What images install is pinned by hash, complete, of one version each, and what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from fakes.process import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCKS = ROOT / "deploy" / "locks"
NO_EXTRAS = {"gateway", "torch", "trainer", "build", "lock"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HERE = {"python_full_version": "3.11.2", "python_version": "3.11", "sys_platform": "linux", "extra": ""}
"""Debian bookworm, for which images are made; the rest of the markers is this machine's."""


class Pin(NamedTuple):
    """One package of a lock."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]


def pins(name: str) -> Iterator[Pin]:
    """All that a lock has; AssertionError where something is not pinned."""
    text = (LOCKS / f"{name}.txt").read_text().partition("\n")[2]
    for block in re.split(r"\n(?=\S)", text.strip()):
        head, *hashes = re.sub(r"\s*\\\n\s*", "\n", block).split("\n")
        found = re.fullmatch(r"([\w.-]+)==([^\s;]+)(?: ; (.*))?", head)
        assert found is not None, head
        assert hashes, head
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), head
        yield Pin(canonicalize_name(found[1]), found[2], found[3] or "", tuple(hashes))


def installed(*names: str) -> dict[str, str]:
    """Versions by name of what these locks install in an image."""
    found = [pin for name in names for pin in pins(name)]
    return {pin.name: pin.version for pin in found if not pin.marker or _holds(f"x; {pin.marker}")}


def _holds(requirement: str) -> bool:
    marker = Requirement(requirement).marker
    return marker is None or marker.evaluate(HERE)


def asked(*extras: str) -> list[Requirement]:
    """What the project and these extras of it ask for."""
    said = [*PROJECT["dependencies"], *(one for extra in extras for one in PROJECT["optional-dependencies"][extra])]
    found = [Requirement(one) for one in said]
    inner = [extra for one in found if one.name == PROJECT["name"] for extra in one.extras]
    own = [one for one in found if one.name != PROJECT["name"] and _holds(str(one))]
    return own + (asked(*inner) if inner else [])


def extras() -> list[str]:
    return sorted({path.stem for path in LOCKS.glob("*.txt")} - NO_EXTRAS)


@pytest.mark.parametrize("path", sorted(LOCKS.iterdir()), ids=lambda path: path.stem)
def test_every_package_is_pinned_with_its_hashes(path: Path) -> None:
    assert path.suffix == ".txt"
    assert len(list(pins(path.stem))) > 0


def wants() -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    of_extras = [(("gateway", extra), (extra,)) for extra in extras()]
    return [(("gateway",), ()), *of_extras, (("gateway", "torch", "trainer"), ("train",))]


@pytest.mark.parametrize(("locks", "of"), wants(), ids=lambda it: "+".join(it) or "base")
def test_a_lock_has_what_is_asked_for(locks: tuple[str, ...], of: tuple[str, ...]) -> None:
    found, missing = installed(*locks), list[str]()
    for one in asked(*of):
        version = found.get(canonicalize_name(one.name))
        if version is None or not one.specifier.contains(version):
            missing.append(f"{one}: {version}")
    assert missing == [], "run `make locks`"


def test_what_builds_is_what_the_project_is_built_with() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    found = installed("build")
    assert [one for one in map(Requirement, built) if not one.specifier.contains(found.get(one.name, "0"))] == []


def test_extras_are_those_of_the_project_and_go_together() -> None:
    """`kubernetes` and `providers` want different versions of one package, so they cannot."""
    assert set(extras()) <= set(PROJECT["optional-dependencies"])
    both = dict[str, set[str]]()
    for lock in ("gateway", *(extra for extra in extras() if extra != "kubernetes")):
        for name, version in installed(lock).items():
            both.setdefault(name, set()).add(version)
    assert {name: versions for name, versions in both.items() if len(versions) > 1} == {}


def test_litellm_is_the_release_that_is_trusted() -> None:
    (pin,) = [pin for pin in pins("providers") if pin.name == "litellm"]
    text = (ROOT / ".ci" / "litellm.txt").read_text()
    assert f"litellm=={pin.version} " in text
    assert set(re.findall(r"--hash=sha256:[0-9a-f]{64}", text)) <= set(pin.hashes)
