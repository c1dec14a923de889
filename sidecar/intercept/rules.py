"""The kernel's rules that redirect connections to a sidecar without their agent's knowledge: as text, for `nft` or for
`iptables-restore`. Pure.

Each TCP connection of IPv4 and IPv6 goes to the sidecar's port. HTTP/3 (UDP 443) is refused, so that clients use TCP.
The sidecar's own connections, told by its user, and those within the machine are exempt. A sidecar in another network
than its agent has no connections there; then `uid` is None, and only loopback is exempt. While no sidecar runs,
connections are refused: no rule lets them through. `CHECK` leads to the sidecar for every user, so that its answer
proves the rules.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

KEYS: Final = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY", "HOSTED_VLLM_API_KEY")
"""Variables from which model clients read their API keys."""
LOGINS: Final = ("ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN")
"""Variables that their clients prefer to a key."""
HINTS: Final = {"CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1"}
"""Variables with which coding agents say in headers what each call is for. An agent that has one already keeps it."""

# Decides the fate of each connection that an agent opens. Pure.

ConnectionAction = Literal["intercept", "tunnel", "deny", "unrecorded", "check"]
"""The treatment of a connection. `unrecorded`: of an intercepted host, but sent straight to it, because the gateway was
away and the run may go past it. `check`: answered by the sidecar itself.
"""
CHECK: Final = ("192.0.2.1", 443)
"""An address for documentation (RFC 5737), which no host has: an answer of the sidecar there proves that connections
reach it.
"""
HOSTS: Final = (
    "api.openai.com",
    "api.anthropic.com",
    "generativelanguage.googleapis.com",
    "chatgpt.com",
)
"""The well-known model hosts."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")


@dataclass(frozen=True, slots=True)
class InterceptPolicy:
    """The rules of a run for its connections."""

    hosts: frozenset[tuple[str, int]]
    """Hosts and ports whose calls go through the gateway; their TLS ends here."""
    unknown: Literal["tunnel", "deny"] = "tunnel"
    """The fate of connections to all other hosts."""
    fail: Literal["closed", "open"] = "closed"
    """Calls while the gateway cannot be reached: refused (closed), or sent straight to their host (open)."""

    def action_for(self, host: str, port: int) -> ConnectionAction:
        """The fate of a connection to a host."""
        if (host, port) == CHECK:
            return "check"
        return "intercept" if (host, port) in self.hosts else self.unknown

    @property
    def names(self) -> list[str]:
        """The names of all hosts that need certificates."""
        return sorted({host for host, _ in self.hosts} | {CHECK[0]})


def intercepted_hosts(more: Iterable[str] = ()) -> frozenset[tuple[str, int]]:
    """The known model hosts, and more hosts given as `HOST` or `HOST:PORT`; raises `ValueError`."""
    return frozenset(map(_address, (*HOSTS, *more)))


def _address(value: str) -> tuple[str, int]:
    host, _, port = value.rpartition(":") if re.search(r"[^:]:[0-9]*$|]:[0-9]*$", value) else (value, "", "443")
    if _NAME.fullmatch(host) is None or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"--intercept {value!r} is no HOST or HOST:PORT")
    return host.lower().strip("[]"), int(port)


NAME: Final = "penstock"
_CHAIN: Final = "PENSTOCK"


def nft(port: int, uid: int | None) -> str:
    """Rules for `nft -f -`. Applied again, they replace the rules before."""
    alone = [f"meta skuid {uid} accept", 'oif "lo" accept']
    own = "\n        ".join(alone if uid is not None else ["ip daddr 127.0.0.0/8 accept", "ip6 daddr ::1 accept"])
    return f"""{nft_removal()}table inet {NAME} {{
    chain redirected {{
        type nat hook output priority -100; policy accept;
        ip daddr {CHECK[0]} tcp dport {CHECK[1]} redirect to :{port}
        {own}
        meta l4proto tcp redirect to :{port}
    }}
    chain refused {{
        type filter hook output priority 0; policy accept;
        {own}
        udp dport 443 reject
    }}
}}
"""


def nft_removal() -> str:
    """Rules that remove them; no error when there are none."""
    return f"table inet {NAME} {{}}\ndelete table inet {NAME}\n"


def iptables(port: int, uid: int | None, six: bool) -> str:
    """Rules for `iptables-restore --noflush`, or `ip6tables-restore` (`six`), when they are not applied yet."""
    check = [] if six else [f"-A {_CHAIN} -d {CHECK[0]}/32 -p tcp --dport {CHECK[1]} -j REDIRECT --to-ports {port}"]
    own = [f"-A {_CHAIN} -m owner --uid-owner {uid} -j RETURN", f"-A {_CHAIN} -o lo -j RETURN"]
    if uid is None:
        own = [f"-A {_CHAIN} -d {'::1/128' if six else '127.0.0.0/8'} -j RETURN"]
    nat = [*check, *own, f"-A {_CHAIN} -p tcp -j REDIRECT --to-ports {port}"]
    refused = [*own, f"-A {_CHAIN} -p udp -j REJECT"]
    return _tables(nat, refused, "-A OUTPUT -p tcp", "-A OUTPUT -p udp --dport 443")


def iptables_removal() -> str:
    """Rules for the same programs that remove them, when they are applied."""
    gone = [f"-F {_CHAIN}", f"-X {_CHAIN}"]
    tables = _tables(gone, gone, "-D OUTPUT -p tcp", "-D OUTPUT -p udp --dport 443")
    return tables.replace(f":{_CHAIN} - [0:0]\n", "")


def _tables(nat: list[str], refused: list[str], *jumps: str) -> str:
    lines: list[str] = []
    for table, rules, jump in (("nat", nat, jumps[0]), ("filter", refused, jumps[1])):
        lines += [f"*{table}", f":{_CHAIN} - [0:0]", f"{jump} -j {_CHAIN}", *rules, "COMMIT"]
    return "\n".join([*lines, ""])


# Applies the kernel's rules (`rules`) with the programs that this machine has.

Tool = Literal["nft", "iptables"]
_PROGRAMS: Final[dict[Tool, tuple[str, ...]]] = {
    "nft": ("nft",),
    "iptables": ("iptables-restore", "ip6tables-restore"),
}
_NEEDED: Final = "it needs the right to change rules of this network (CAP_NET_ADMIN), and the kernel's tables for them"


class RedirectError(Exception):
    """Raised when the rules cannot be applied; the text is the reason."""


@dataclass(frozen=True, slots=True)
class RuleCommand:
    """A program to run and its stdin."""

    command: tuple[str, ...]
    text: str
    may_fail: bool = False
    """True if a failure is ignored: there may be nothing to remove."""


def choose_tool(tool: Tool | None) -> Tool:
    """The requested program, else one that this machine has. Raises `RedirectError` when it is missing."""
    for one in ("nft", "iptables") if tool is None else (tool,):
        if all(map(shutil.which, _PROGRAMS[one])):
            return one
    if tool is not None:
        raise RedirectError(f"--tool {tool}: {' and '.join(_PROGRAMS[tool])} cannot be found")
    raise RedirectError("neither nft nor iptables-restore and ip6tables-restore can be found: install nftables")


def rule_commands(tool: Tool, wanted: tuple[int, int | None] | None) -> list[RuleCommand]:
    """The steps that apply the rules for (port, user id), or remove them when `wanted` is None."""
    if tool == "nft":
        return [RuleCommand(("nft", "-f", "-"), nft_removal() if wanted is None else nft(*wanted))]
    made: list[RuleCommand] = []
    for program in _PROGRAMS["iptables"]:
        command = (program, "--noflush")
        made.append(RuleCommand(command, iptables_removal(), may_fail=True))
        if wanted is not None:
            made.append(RuleCommand(command, iptables(*wanted, six=program == "ip6tables-restore")))
    return made


def run(todo: list[RuleCommand]) -> None:
    """Run the steps in order; raises `RedirectError` at the first that fails."""
    for step in todo:
        done = subprocess.run(step.command, input=step.text, capture_output=True, text=True)
        if done.returncode != 0 and not step.may_fail:
            said = " ".join((done.stderr or done.stdout).split())[:300]
            raise RedirectError(f"{step.command[0]} failed: {said or f'it ended with {done.returncode}'}; {_NEEDED}")
