"""The command `penstock release rehearse`: runs an agent for a release, as `penstock run` does for the queue.

The runs come from the release (`Settings.release`). It hands them out after its recorded calls were replayed, and plays
the agent's tools itself. Several of these commands share the work. The command ends when the release has left the
stage, and says how.

Exit codes: 0 when the release went on; 1 when it did not, or the gateway cannot be reached; 2 wrongly called; 130
killed by a second signal.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter

from penstock.gateway.client.console import LOCAL, Failure, Url, admin_key
from penstock.sidecar.commands import Command, Words, check, here, worker_name


def rehearse(
    release: str,
    /,
    *command: Command,
    gateway: Url = LOCAL,
    workers: int = 1,
    arg: Words = None,
    stdin: bool = True,
    timeout: str | None = None,
    env: Words = None,
    echo: Annotated[bool, Parameter(negative="")] = False,
    lease: str = "30s",
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
    workers
        Agents at a time.
    arg
        An argument made of the task and put after the command, such as '{question}'; may be repeated.
    stdin
        Give agents the task on stdin.
    timeout
        Longest run of an agent, such as 90s, 10m or 1.5h.
    env
        NAME=VALUE, one more variable of agents; may be repeated.
    echo
        Show what agents print.
    lease
        How long a run stays this command's when nothing is heard of it.
    """
    import asyncio

    from penstock.gateway.client.client import ClientError
    from penstock.sidecar.engines.local import Here
    from penstock.sidecar.settings import Agents, RunnerError, Settings, seconds, variable

    try:
        lease_s = seconds("--lease", lease)
        agents = Agents(
            command=command,
            args=tuple(arg or ()),
            stdin=stdin,
            env=tuple(map(variable, env or ())),
            timeout_s=None if timeout is None else seconds("--timeout", timeout),
            grace_s=min(5.0, lease_s / 2),
        )
        url, key = gateway.rstrip("/"), admin_key()
        settings = Settings(
            gateway=url,
            name=worker_name(None),
            key=key,
            agents=agents,
            workers=workers,
            watch=True,
            release=release,
            lease_s=lease_s,
            echo=echo,
            keep_going=True,  # the release itself counts runs that fail, and ends
        )
        check(settings, "here")
        name = asyncio.run(_named(url, key, release))
        tally = asyncio.run(here(replace(settings, release=name), Here(settings)))
        print(tally)
        if tally.ends["returned"]:
            sys.exit(130)
        asyncio.run(_report(url, key, name))
    except (RunnerError, ClientError) as e:
        raise Failure(str(e), e.code if isinstance(e, RunnerError) else 1) from None


async def _named(url: str, key: str | None, name: str) -> str:
    """The release of this name, or the newest of the resource of this name."""
    from penstock.gateway.client.client import Client

    async with Client(url, key) as client:
        every = await client.releases()
    found = [one.id for one in every if one.id == name] or [one.id for one in every if one.resource == name]
    if not found:
        hint = "`penstock release list` lists them"
        raise Failure(f"there is no release {name!r}, nor one of a resource of that name; {hint}")
    return found[0]


async def _report(url: str, key: str | None, name: str) -> None:
    """Says what the rehearsal has come to."""
    from penstock.gateway.client.client import Client

    async with Client(url, key) as client:
        release, audit = (await client.release(name)).release, await client.audit(name)
    last = next((entry for entry in reversed(audit) if "rehearsal" in entry.evidence), None)
    said = f"{name} is {release.stage.replace('_', ' ')}: {release.reason if last is None else last.why}"
    if last is None or last.evidence.get("ok") is False:
        raise Failure(said)
    print(said)
