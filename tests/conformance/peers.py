"""What the suite finds behind other proxies for MCP: `python -m conformance.peers` prints the table of docs/mcp.md.

The proxies are those of `python -m bench.mcp`, which also installs them. In front of the same server each gets the
server's side of the suite, and what differs from the same without a proxy is counted by name: a check that fails in
place of passing is one difference, and one that is never reached is one too.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from conformance import suite
from conformance.suite import REVISIONS, Check

from bench.mcp_peers import PEERS
from bench.peers import BUILD, Peer
from bench.programs import Cores, Gateway


def named(direct: Iterable[Check], through: Iterable[Check]) -> dict[str, list[str]]:
    """The checks that differ, by scenario."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for line in suite.differences(direct, through):
        scenario, _, rest = line.partition(": ")
        found[scenario].add(rest.partition(" is ")[0])
    return {scenario: sorted(checks) for scenario, checks in sorted(found.items())}


async def behind(peer: Peer, revision: str, folder: Path) -> list[Check]:
    """The checks of a server behind this proxy."""
    async with suite.everything() as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        proxy = Gateway(peer, port, Cores.choose())
        try:
            await asyncio.to_thread(proxy.wait_ready)
            path = peer.path.replace("{r}", "suite")
            return await suite.server_leg(f"http://127.0.0.1:{proxy.start.port}{path}", revision, folder)
        finally:
            await asyncio.to_thread(proxy.close)


async def compare(revision: str, peers: list[Peer], folder: Path) -> None:
    """Prints a line for each proxy, and the checks by name below it."""
    async with suite.everything() as url:
        direct = await suite.server_leg(url, revision, folder / "direct")
    print(f"{revision} directly: {len(direct)} checks, {len(suite.failed(direct))} failed", flush=True)
    for peer in peers:
        through = await behind(peer, revision, folder / peer.name)
        found = named(direct, through)
        differing = sum(len(checks) for checks in found.values())
        print(f"{revision} {peer.name}: {len(through)} checks, {len(suite.failed(through))} failed, ", end="")
        print(f"{differing} differ, in {len(found)} scenarios", flush=True)
        for scenario, checks in found.items():
            print(f"  {scenario}: {', '.join(checks)}", flush=True)


async def main() -> None:
    """All that are installed but the yardstick, or those that are named."""
    BUILD.mkdir(exist_ok=True)
    wanted = sys.argv[1:] or [peer.name for peer in PEERS if peer.name != "bare"]
    peers = [peer for peer in PEERS if peer.name in wanted and peer.installed()]
    with tempfile.TemporaryDirectory() as folder:
        for revision in REVISIONS:
            await compare(revision, peers, Path(folder, revision))


if __name__ == "__main__":
    asyncio.run(main())
