"""Agents as their users install them send the same requests behind `penstock sidecar` as without it.

Each row of the table in docs/sidecar.md is one test here, so a version of an agent is in it only if it was measured.
`UPDATE_GOLDENS=1 make test-clients` writes the table anew.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import pytest
from clients.compare import difference
from clients.inside import measure
from clients.profiles import NOWHERE, PROFILES, ROOT, TRANSPARENT, Profile
from fakes import alone, netfilter

DOCS: Final = ROOT / "docs" / "sidecar.md"
HEAD: Final = "| agent | version | how | model calls | what differs |\n|---|---|---|---|---|\n"
SAME: Final = "nothing"
PROXIED: Final = "as behind any HTTPS proxy"
SOCKET: Final = PROXIED + "; no `/api/claude_cli/bootstrap`"
TO_A_SOCKET: Final = re.compile(r".* GET /api/claude_cli/bootstrap\?.*: 1 and 0 times")
"""What Claude Code does otherwise where it has a Unix socket."""
REACTIONS: Final = re.compile(
    r".*: headers: Connection: keep-alive, Connection: close|.* HEAD /api/hello: 1 and 0 times"
)
"""What Claude Code does otherwise where it is told of any proxy."""

pytestmark = [pytest.mark.clients, pytest.mark.xdist_group("clients"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A PATH with nft, which the transparent mode needs."""
    return netfilter.programs(tmp_path_factory.mktemp("netfilter")) or {}


def documented() -> dict[str, str]:
    """The rows of the table, by agent and how."""
    table = DOCS.read_text().partition(HEAD)[2].partition("\n\n")[0]
    return {key_of(row): row for row in table.splitlines()}


def key_of(row: str) -> str:
    cells = [cell.strip() for cell in row.split("|")]
    return f"{cells[1]}, {cells[3]}"


def without_version(row: str) -> str:
    return re.sub(r"^(\| [^|]+ \| )[^|]+", r"\1", row)


def write(row: str) -> None:
    """Puts a row into the table, in the order of the profiles."""
    text = DOCS.read_text()
    before, head, after = text.partition(HEAD)
    rows = documented() | {key_of(row): row}
    order = [f"{one.client}, {one.mode}" for one in PROFILES]
    table = "\n".join(sorted(rows.values(), key=lambda it: order.index(key_of(it))))
    _ = Path(DOCS).write_text(before + head + table + "\n\n" + after.partition("\n\n")[2])


@pytest.mark.parametrize("profile", PROFILES, ids=lambda it: it.id)
def test_behind_a_sidecar_an_agent_sends_what_it_sends_without(profile: Profile, tools: dict[str, str]) -> None:
    if not profile.installed():
        pytest.skip(NOWHERE)
    if profile.sidecar == TRANSPARENT and "nft" not in tools:
        pytest.skip(netfilter.NOWHERE)
    if not alone.possible():
        pytest.skip("this machine gives a process no namespaces of its own")
    transparent = profile.sidecar == TRANSPARENT
    path = tools["nft"] if transparent else os.environ["PATH"]
    found = measure(profile, path)
    socket = "--socket" in profile.sidecar
    changed = [] if transparent else difference(found["proxied"], found["behind"])
    assert [one for one in changed if not (socket and TO_A_SOCKET.fullmatch(one))] == []
    assert bool(changed) == socket
    own = REACTIONS if profile.client == "Claude Code" and not transparent else None
    changed = [one for one in difference(found["direct"], found["behind"]) if one not in changed]
    assert [one for one in changed if own is None or not own.fullmatch(one)] == []
    count = sum(dialect != "opaque" for dialect in found["calls"])
    assert count > 2, "its calls were not understood"
    assert found["lost"] in ({}, {"r1": [], "b1": ["base_url"]})
    assert bool(found["lost"]) == (profile.client == "Claude Code" and not profile.sidecar)
    differs = SOCKET if socket else PROXIED if changed else SAME
    row = f"| {profile.client} | {profile.version()} | {profile.mode} | {count} | {differs} |"
    if os.environ.get("UPDATE_GOLDENS"):
        write(row)
    known = documented()[key_of(row)]
    assert known == row if profile.pinned else without_version(known) == without_version(row)


def test_every_row_is_measured() -> None:
    assert list(documented()) == [f"{one.client}, {one.mode}" for one in PROFILES]
