"""The command `penstock release rehearse`: runs an agent for a release, as `penstock run` does for the queue.

The runs come from the release (`RunnerSettings.release`). It hands them out after its recorded calls were replayed, and
plays the agent's tools itself. Several such commands may share the work. The command ends when the release has left its
rehearsal, and prints the result.

Exit codes: 0 when the release went on; 1 when it did not, or the gateway cannot be reached; 2 wrongly called; 130
killed by a second signal.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

from penstock.gateway.client.console import FLAT, LOCAL, CommandError, Url
from penstock.sidecar.run.commands import check, run_locally
from penstock.sidecar.run.options import Command, RehearseOptions

DEFAULT = RehearseOptions()


def rehearse(
    release: str,
    /,
    *command: Command,
    gateway: Url = LOCAL,
    options: Annotated[RehearseOptions, FLAT] = DEFAULT,
) -> None:
    """Run an agent on recorded tasks for a release that rehearses, until it has seen enough.

    The agent is run as penstock run does it, and finds its task in the same places. It runs no tools: the gateway plays
    them with recorded results.

    Parameters
    ----------
    release
        A release, or a resource: its newest release.
    command
        The agent and its arguments, after `--`.
    """
    import asyncio

    from penstock.gateway.client.client import ClientError
    from penstock.sidecar.run.engines.local import LocalEngine
    from penstock.sidecar.run.settings import RunnerError

    try:
        settings = options.settings(gateway, command, release)
        check(settings, "here")
        name = asyncio.run(_named(settings.gateway, settings.key, release))
        tally = asyncio.run(run_locally(replace(settings, release=name), LocalEngine(settings)))
        print(tally)
        if tally.ends["returned"]:
            sys.exit(130)
        asyncio.run(_report(settings.gateway, settings.key, name))
    except (RunnerError, ClientError) as e:
        raise CommandError(str(e), e.code if isinstance(e, RunnerError) else 1) from None


async def _named(url: str, key: str | None, name: str) -> str:
    """The release of this name, or the newest of the resource of this name."""
    from penstock.gateway.client.client import Client

    async with Client(url, key) as client:
        every = await client.releases()
    found = [one.id for one in every if one.id == name] or [one.id for one in every if one.resource == name]
    if not found:
        hint = "`penstock release list` lists them"
        raise CommandError(f"there is no release {name!r}, nor one of a resource of that name; {hint}")
    return found[0]


async def _report(url: str, key: str | None, name: str) -> None:
    """Print the result of the rehearsal; raise `CommandError` when it was not good."""
    from penstock.gateway.client.client import Client

    async with Client(url, key) as client:
        release, audit = (await client.release(name)).release, await client.audit(name)
    last = next((entry for entry in reversed(audit) if "rehearsal" in entry.evidence), None)
    said = f"{name} is {release.stage.replace('_', ' ')}: {release.reason if last is None else last.why}"
    if last is None or last.evidence.get("ok") is False:
        raise CommandError(said)
    print(said)
