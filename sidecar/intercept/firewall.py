"""Applies the kernel's rules (`rules`) with the programs that this machine has."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from typing import Final, Literal

from penstock.sidecar.intercept import rules

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
        return [RuleCommand(("nft", "-f", "-"), rules.nft_removal() if wanted is None else rules.nft(*wanted))]
    made: list[RuleCommand] = []
    for program in _PROGRAMS["iptables"]:
        command = (program, "--noflush")
        made.append(RuleCommand(command, rules.iptables_removal(), may_fail=True))
        if wanted is not None:
            made.append(RuleCommand(command, rules.iptables(*wanted, six=program == "ip6tables-restore")))
    return made


def run(todo: list[RuleCommand]) -> None:
    """Run the steps in order; raises `RedirectError` at the first that fails."""
    for step in todo:
        done = subprocess.run(step.command, input=step.text, capture_output=True, text=True)
        if done.returncode != 0 and not step.may_fail:
            said = " ".join((done.stderr or done.stdout).split())[:300]
            raise RedirectError(f"{step.command[0]} failed: {said or f'it ended with {done.returncode}'}; {_NEEDED}")
