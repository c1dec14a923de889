"""The commands of `penstock sidecar`: run, serve, bind, release, iptables, check."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.gateway.client.console import FLAT, LOCAL, PORT, PORT_OR_ANY, CommandError, Url, note

if TYPE_CHECKING:
    from penstock.sidecar.intercept.rules import InterceptPolicy
    from penstock.sidecar.intercept.session import AgentIdentity

Hosts = Annotated[
    list[str] | None,
    Parameter(
        negative="",
        help="A host besides the known ones whose calls go through the gateway, as HOST or HOST:PORT. The gateway "
        "needs an upstream on it.",
    ),
]
Unknown = Annotated[Literal["tunnel", "deny"], Parameter(help="What becomes of connections to all other hosts.")]
Fail = Annotated[
    Literal["closed", "open"],
    Parameter(
        help="What becomes of calls while the gateway cannot be reached: refused (closed), or sent straight to their "
        "host and not recorded (open)."
    ),
]
Admin = Annotated[str, Parameter(help="Where the sidecar listens for rollouts: HOST:PORT, or the path of a socket.")]
Mode = Literal["env", "transparent"]
ADMIN: Final = "127.0.0.1:8099"
FirstPort = Annotated[
    int,
    Parameter(validator=PORT_OR_ANY, help="The port of the first agent; the others follow. 0 takes free ones."),
]
Port = Annotated[int, Parameter(validator=PORT)]
USUAL_PORT: Final = 8100
UID: Final = 10001
"""The user of our container images."""


@FLAT
@dataclass(frozen=True)
class ConnectionOptions:
    """Options for an agent's connections: which are intercepted, and what happens to unknown hosts and after
    failures."""

    intercept: Hosts = None
    on_unknown: Unknown = "tunnel"
    fail: Fail = "closed"


CONNECTION_DEFAULTS: Final = ConnectionOptions()


@FLAT
@dataclass(frozen=True)
class InterceptOptions:
    """Options for the way of an agent's connections to the sidecar, and for the engine that ends their TLS."""

    mode: Annotated[
        Mode,
        Parameter(
            help="How connections get to the sidecar: by a proxy in the agent's environment (env), or in a network of "
            "the agent's own out of which nothing else leads (transparent), for agents that use no proxy. It needs "
            "Linux, nft and ip."
        ),
    ] = "env"
    socket: Annotated[
        bool,
        Parameter(
            negative="",
            help="Clients that can use a Unix socket to their model host get one: Claude Code, without a certificate "
            "or a proxy.",
        ),
    ] = False
    engine: Annotated[
        Literal["own", "mitmproxy"],
        Parameter(
            help="What ends the agent's TLS. `mitmproxy` is for agents that speak nothing but HTTP/2; "
            "PENSTOCK_MITMDUMP, or the PATH, says where its mitmdump is."
        ),
    ] = "own"


INTERCEPT_DEFAULTS: Final = InterceptOptions()


def run(
    *command: str,
    gateway: Url = LOCAL,
    rollout: str | None = None,
    attempt: str | None = None,
    passing: ConnectionOptions = CONNECTION_DEFAULTS,
    getting: InterceptOptions = INTERCEPT_DEFAULTS,
    keys: Literal["pass", "surrogate"] = "pass",
    conversations: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Run an agent that knows nothing of Penstock: its calls of model hosts go through the gateway.

    The agent gets a proxy and a certificate authority in its environment, for a few hosts and this run only. Its base
    URLs and keys stay as they are, and so do the bytes that its model host gets.

    Parameters
    ----------
    command
        The agent and its arguments, after `--`.
    rollout
        The rollout of its calls; else PENSTOCK_ROLLOUT_ID or PENSTOCK_TOKEN says, else it is new and printed first.
    attempt
        The attempt; else PENSTOCK_ATTEMPT_ID says.
    keys
        With `surrogate` the agent has its agent token (PENSTOCK_TOKEN) for a key; the gateway replaces it by its own.
    conversations
        Each conversation, or session of a coding agent, is a rollout of its own: for a server that does many tasks.
    """
    import asyncio

    from penstock.sidecar.intercept import mitm, session
    from penstock.sidecar.intercept.namespace import NamespaceError

    if not command:
        raise CommandError("no command was given: put the agent and its arguments after --", 2)
    transparent = getting.mode == "transparent"
    if getting.engine == "mitmproxy" and transparent:
        raise CommandError("--engine mitmproxy stands before agents that use a proxy: leave --mode transparent out", 2)
    if keys == "surrogate" and not os.environ.get("PENSTOCK_TOKEN"):
        raise CommandError(
            "--keys surrogate needs the agent's token in PENSTOCK_TOKEN: `penstock token ROLLOUT` makes one", 2
        )
    wanted = session.SessionOptions(
        _gateway(gateway),
        _policy(passing),
        _run_identity(rollout, attempt, conversations),
        getting.socket,
        keys == "surrogate",
        transparent,
        getting.engine,
    )
    try:
        code, problems = asyncio.run(session.run(wanted, command))
    except NamespaceError as error:
        raise CommandError(f"--mode transparent: {error}") from None
    except mitm.MitmproxyError as error:
        raise CommandError(f"--engine mitmproxy: {error}") from None
    for problem in problems:
        note(f"penstock: {problem}")
    sys.exit(code)


def serve(
    folder: Path,
    /,
    *,
    gateway: Url = LOCAL,
    mode: Mode = "env",
    agents: Annotated[int, Parameter(validator=Number(gte=1, lte=1000))] = 1,
    port: FirstPort = USUAL_PORT,
    admin: Admin = ADMIN,
    passing: ConnectionOptions = CONNECTION_DEFAULTS,
) -> None:
    """Stand before agents that are started by others, and take their rollouts later.

    Each agent has a port of its own, and its calls wait until `penstock sidecar bind` has given the port a rollout. The
    variable PENSTOCK_SIDECAR_TOKEN has the token that binding needs; agents must not have it. A single agent has its
    rollout from the beginning where PENSTOCK_ROLLOUT_ID says it (its attempt: PENSTOCK_ATTEMPT_ID, its token:
    PENSTOCK_TOKEN).

    Parameters
    ----------
    folder
        Where the files are put that agents need: certificates, and each one's variables as agent-N.env.
    mode
        How connections of the agents get here: by variables in their environment (env), or by rules of the kernel
        (transparent), which `penstock sidecar iptables` makes, for one agent that has no proxy.
    agents
        How many agents there are.
    """
    import asyncio

    from penstock.sidecar.intercept.service import SHORTEST, TOKEN, SidecarService
    from penstock.sidecar.intercept.service import serve as serve_sidecar

    token = os.environ.pop(TOKEN, "")
    if len(token) < SHORTEST or not token.isascii():
        raise CommandError(f"{TOKEN}: set it to a secret of {SHORTEST} characters or more, which binding needs", 2)
    if port > 65536 - agents:
        raise CommandError(f"--agents {agents}, --port {port}: there is no room for so many ports below 65536", 2)
    _check_admin(admin)
    whose = _identity()
    if agents > 1 and (mode == "transparent" or whose.rollout):
        one = "--mode transparent takes" if mode == "transparent" else "PENSTOCK_ROLLOUT_ID is for"
        raise CommandError(f"--agents {agents}: {one} one agent", 2)
    service = SidecarService(_gateway(gateway), _policy(passing), folder.absolute(), mode)
    ports = [port and port + number for number in range(agents)]
    try:
        problems = asyncio.run(serve_sidecar(service, ports, admin, token, whose if whose.rollout else None))
    except OSError as error:
        raise CommandError(f"the sidecar cannot listen: {error}") from None
    for problem in problems:
        note(f"penstock: {problem}")


def bind(port: Port, /, *, rollout: str, attempt: str | None = None, admin: Admin = ADMIN) -> None:
    """Give the agent on a port of a sidecar its rollout: from now on its calls pass.

    The rollout's agent token comes from PENSTOCK_TOKEN, the sidecar's from PENSTOCK_SIDECAR_TOKEN.

    Parameters
    ----------
    port
        The port of the agent.
    rollout
        The rollout of its calls.
    attempt
        The attempt.
    """
    said = {"rollout": rollout, "attempt": attempt, "token": os.environ.get("PENSTOCK_TOKEN")}
    _ask("PUT", port, admin, {name: value for name, value in said.items() if value is not None})


def release(port: Port, /, *, admin: Admin = ADMIN) -> None:
    """Take its rollout from the agent on a port of a sidecar: its connections end, and calls wait for the next one.

    The sidecar's token comes from PENSTOCK_SIDECAR_TOKEN.

    Parameters
    ----------
    port
        The port of the agent.
    """
    _ask("DELETE", port, admin, None)


def iptables(
    *,
    print_: Annotated[bool, Parameter("--print", negative="")] = False,
    apply: Annotated[bool, Parameter(negative="")] = False,
    remove: Annotated[bool, Parameter(negative="")] = False,
    port: Port = USUAL_PORT,
    uid: Annotated[int, Parameter(validator=Number(gte=0, lt=1 << 32))] = UID,
    tool: Literal["nft", "iptables"] | None = None,
) -> None:
    """Redirect connections of agents to a sidecar in transparent mode, by rules of the kernel for this network.

    All TCP goes to the sidecar's port but its own; HTTP/3 (UDP 443) is refused. While no sidecar runs, connections are
    refused. Needs the right to it (CAP_NET_ADMIN), and nft or iptables.

    Parameters
    ----------
    print_
        Print the rules, and change nothing.
    apply
        Make the rules; those of an earlier call are replaced.
    remove
        Remove them.
    port
        The port of the sidecar.
    uid
        The user that the sidecar runs as, whose connections are left alone. Agents must be other users.
    tool
        The program that makes the rules; nft where there is one, else iptables and ip6tables.
    """
    from penstock.sidecar.intercept import rules

    if print_ + apply + remove != 1:
        raise CommandError("say one of --print, --apply and --remove", 2)
    try:
        # Rules may be printed here and be made elsewhere.
        chosen = (tool or "nft") if print_ else rules.choose_tool(tool)
        steps = rules.rule_commands(chosen, None if remove else (port, uid))
        if print_:
            print("\n".join(f"# {' '.join(step.command)}\n{step.text}" for step in steps), end="")
        else:
            rules.run(steps)
            print("removed" if remove else f"connections go to port {port}, but those of user {uid}")
    except rules.RedirectError as error:
        raise CommandError(str(error)) from None


def check(
    *,
    gateway: Url = LOCAL,
    rollout: str | None = None,
    here: Annotated[bool, Parameter(negative="")] = False,
    socket: Annotated[bool, Parameter(negative="")] = False,
    passing: ConnectionOptions = CONNECTION_DEFAULTS,
) -> None:
    """Say of each family of clients whether its calls get to the gateway, and else which variable is missing.

    It starts a sidecar as `penstock sidecar run` does, and looks at what an agent would be given. No model is called.

    Parameters
    ----------
    rollout
        The rollout that calls would be of; else PENSTOCK_ROLLOUT_ID says.
    here
        Look at the environment of this command, which has its sidecar already, as in an agent's container.
    socket
        Look at the Unix socket as well that `penstock sidecar run --socket` gives.
    """
    import asyncio

    from penstock.sidecar.intercept import session
    from penstock.sidecar.intercept.environment_check import EnvironmentCheck

    async def walked() -> EnvironmentCheck:
        if here:
            found = EnvironmentCheck(os.environ)
            await found.run()
            return found
        wanted = session.SessionOptions(_gateway(gateway), _policy(passing), _identity(rollout), socket)
        with session.folder_for_sockets() as folder:
            async with session.open_session(wanted, Path(folder)) as front:
                found = EnvironmentCheck(os.environ | front.variables)
                await found.run()
        return found

    found = asyncio.run(walked())
    for line in found.lines():
        print(line)
    if not found.good:
        sys.exit(1)


def _ask(method: str, port: int, admin: str, said: dict[str, str] | None) -> None:
    import asyncio

    from penstock.sidecar.intercept.service import request_admin

    _check_admin(admin)
    status, words = asyncio.run(request_admin(method, f"/agents/{port}", admin, said))
    if status != 200:
        raise CommandError(f"the sidecar at {admin} answered {status}: {words}" if status else words)
    print(words)


def _check_admin(admin: str) -> None:
    port = admin.rpartition(":")[2]
    if "/" not in admin and not (port.isdecimal() and int(port) < 65536):
        raise CommandError(f"--admin {admin!r} is no HOST:PORT and no path of a socket; ports go up to 65535", 2)


def _gateway(url: str) -> str:
    from penstock.gateway.client.connection import ClientError, check_url
    from penstock.gateway.client.opener import client_context

    if url.startswith("unix:"):
        raise CommandError(f"a sidecar reaches no gateway at {url!r}: give its http:// or https:// URL", 2)
    try:
        check_url(url)
        if url.startswith("https:"):
            _ = client_context()
    except (ClientError, OSError) as error:
        raise CommandError(str(error), 2) from None
    return url.rstrip("/")


def _identity(rollout: str | None = None, attempt: str | None = None) -> AgentIdentity:
    """The agent's rollout; what the options leave out comes from the variables. All parts are valid as headers."""
    from penstock.gateway.client.opener import fits_a_header
    from penstock.gateway.model.base import ID_PATTERN
    from penstock.sidecar.intercept.session import AgentIdentity

    given = os.environ.get
    rollout, attempt = rollout or given("PENSTOCK_ROLLOUT_ID"), attempt or given("PENSTOCK_ATTEMPT_ID")
    for what, value in (("a rollout", rollout), ("an attempt", attempt)):
        if value and (not re.fullmatch(ID_PATTERN, value) or value in (".", "..")):
            raise CommandError(f"{value!r} is not the id of {what}: up to 128 letters, digits and . _ -", 2)
    token = given("PENSTOCK_TOKEN")
    if token and not fits_a_header(token):
        raise CommandError("PENSTOCK_TOKEN has a character that no token has, such as the end of a line", 2)
    return AgentIdentity(rollout, attempt, token)


def _run_identity(rollout: str | None, attempt: str | None, conversations: bool) -> AgentIdentity:
    """The rollout of a run: a new one, unless something names it or its conversations are to be told apart."""
    import secrets
    from dataclasses import replace

    whose = _identity(rollout, attempt)
    if conversations and (whose.rollout or whose.token):
        named = "a rollout" if whose.rollout else "the rollout of PENSTOCK_TOKEN"
        raise CommandError(f"--conversations makes a rollout of each conversation, and {named} was given for all", 2)
    if conversations or whose.rollout or whose.token:
        return whose
    made = replace(whose, rollout=f"sidecar-{secrets.token_hex(4)}")
    note(f"penstock: this run is rollout {made.rollout}: `penstock show {made.rollout}`")
    return made


def _policy(passing: ConnectionOptions) -> InterceptPolicy:
    from penstock.sidecar.intercept import egress
    from penstock.sidecar.intercept.rules import InterceptPolicy, intercepted_hosts

    try:
        egress.check_environment()
        return InterceptPolicy(intercepted_hosts(passing.intercept or ()), passing.on_unknown, passing.fail)
    except ValueError as error:
        raise CommandError(str(error), 2) from None
