"""Rules of the kernel that bring connections to a sidecar which their agent knows nothing of: as text, for `nft` or for
`iptables-restore`. Pure.

Each TCP connection goes to the sidecar's port, of IPv4 and IPv6. HTTP/3 (UDP 443) is refused, so that clients take TCP.
Left alone are the sidecar's own connections, by its user, and those within the machine. A sidecar in another network
than its agent has no connections there; `uid` is None then, and only loopback is left alone. If the sidecar is not
there, connections are refused: no rule lets them through. Whoever asks, `CHECK` leads to the sidecar, which so proves
the rules.
"""

from __future__ import annotations

from typing import Final

from penstock.sidecar.intercept.policy import CHECK

NAME: Final = "penstock"
_CHAIN: Final = "PENSTOCK"


def nft(port: int, uid: int | None) -> str:
    """For `nft -f -`. Applied again it takes the place of what was there."""
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
    """Takes them away, also where there are none."""
    return f"table inet {NAME} {{}}\ndelete table inet {NAME}\n"


def iptables(port: int, uid: int | None, six: bool) -> str:
    """For `iptables-restore --noflush`, or `ip6tables-restore` (`six`), where they are not there yet."""
    check = [] if six else [f"-A {_CHAIN} -d {CHECK[0]}/32 -p tcp --dport {CHECK[1]} -j REDIRECT --to-ports {port}"]
    own = [f"-A {_CHAIN} -m owner --uid-owner {uid} -j RETURN", f"-A {_CHAIN} -o lo -j RETURN"]
    if uid is None:
        own = [f"-A {_CHAIN} -d {'::1/128' if six else '127.0.0.0/8'} -j RETURN"]
    nat = [*check, *own, f"-A {_CHAIN} -p tcp -j REDIRECT --to-ports {port}"]
    refused = [*own, f"-A {_CHAIN} -p udp -j REJECT"]
    return _tables(nat, refused, "-A OUTPUT -p tcp", "-A OUTPUT -p udp --dport 443")


def iptables_removal() -> str:
    """For the same program, where they are there."""
    gone = [f"-F {_CHAIN}", f"-X {_CHAIN}"]
    tables = _tables(gone, gone, "-D OUTPUT -p tcp", "-D OUTPUT -p udp --dport 443")
    return tables.replace(f":{_CHAIN} - [0:0]\n", "")


def _tables(nat: list[str], refused: list[str], *jumps: str) -> str:
    lines: list[str] = []
    for table, rules, jump in (("nat", nat, jumps[0]), ("filter", refused, jumps[1])):
        lines += [f"*{table}", f":{_CHAIN} - [0:0]", f"{jump} -j {_CHAIN}", *rules, "COMMIT"]
    return "\n".join([*lines, ""])
