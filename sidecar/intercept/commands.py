"""The command `penstock sidecar`."""

from __future__ import annotations

import os
import re
import sys
from typing import Annotated, Final, Literal

from cyclopts import Parameter

from penstock.gateway.client.console import LOCAL, Failure, Url, note

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")


def sidecar(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    gateway: Url = LOCAL,
    rollout: str | None = None,
    attempt: str | None = None,
    intercept: Annotated[list[str] | None, Parameter(negative="")] = None,
    on_unknown: Literal["tunnel", "deny"] = "tunnel",
) -> None:
    """Run an agent that knows nothing of Penstock: its calls of model hosts go through the gateway.

    The agent gets a proxy and a certificate authority in its environment, for a few hosts and this run only. Its base
    URLs and keys stay as they are, and so do the bytes that its model host gets.

    Parameters
    ----------
    command
        The agent and its arguments, after `--`.
    rollout
        The rollout of its calls. Without it PENSTOCK_ROLLOUT_ID says, or the conversation.
    attempt
        The attempt; else PENSTOCK_ATTEMPT_ID says.
    intercept
        A host besides the known ones whose calls go through the gateway, as HOST or HOST:PORT. The gateway needs an
        upstream on it.
    on_unknown
        What becomes of connections to all other hosts.
    """
    import asyncio

    from penstock.sidecar.intercept.policy import HOSTS, Policy
    from penstock.sidecar.intercept.session import Wanted, Whose, run

    if not command:
        raise Failure("no command was given: put the agent and its arguments after --", 2)
    hosts = frozenset(_host(one) for one in (*HOSTS, *(intercept or ())))
    given = os.environ.get
    ids = rollout or given("PENSTOCK_ROLLOUT_ID"), attempt or given("PENSTOCK_ATTEMPT_ID")
    whose = Whose(*ids, given("PENSTOCK_TOKEN"))
    code, problems = asyncio.run(run(Wanted(gateway.rstrip("/"), command, Policy(hosts, on_unknown), whose)))
    for problem in problems:
        note(f"penstock: {problem}")
    sys.exit(code)


def _host(value: str) -> tuple[str, int]:
    host, _, port = value.rpartition(":") if re.search(r"[^:]:[0-9]*$|]:[0-9]*$", value) else (value, "", "443")
    if _NAME.fullmatch(host) is None or not port.isdigit() or not 0 < int(port) < 65536:
        raise Failure(f"--intercept {value!r} is no HOST or HOST:PORT", 2)
    return host.lower().strip("[]"), int(port)
