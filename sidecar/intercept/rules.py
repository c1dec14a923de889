"""The kernel's rules that redirect connections to a sidecar without their agent's knowledge: as text, for `nft` or for
`iptables-restore`. Pure.

Each TCP connection of IPv4 and IPv6 goes to the sidecar's port. HTTP/3 (UDP 443) is refused, so that clients use TCP.
The sidecar's own connections, told by its user, and those within the machine are exempt. A sidecar in another network
than its agent has no connections there; then `uid` is None, and only loopback is exempt. While no sidecar runs,
connections are refused: no rule lets them through. `CHECK` leads to the sidecar for every user, so that its answer
proves the rules.
"""

from __future__ import annotations

from typing import Final

from penstock.sidecar.intercept.policy import CHECK

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
