"""A network of its own for one agent, made without privileges: all of the agent's connections reach the sidecar, and
there is no way past it (Linux: user_namespaces(7), network_namespaces(7)).

    python -m penstock.sidecar.intercept.namespace SOCKET RESOLV -- COMMAND...

makes the network, in which every address is this machine and the kernel redirects TCP, and becomes the command. The
sidecar's listening sockets are made here, because a socket belongs to the network that it was made in, and handed over
through the Unix socket SOCKET, an inherited file descriptor. The command runs as the user who started it, without
rights over the network. When the sidecar dies, nothing answers any more.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
from typing import Final

from penstock.sidecar.intercept import rules

_NEWNS, _NEWUSER, _NEWNET, _BIND = 0x00020000, 0x10000000, 0x40000000, 0x1000
_UP, _RUNNING, _SIOCSIFFLAGS = 0x1, 0x40, 0x8914
PORT: Final = 8100
"""Port of the sidecar in the network of the agent."""
BACKLOG: Final = 1024
"""The most connections that may wait to be accepted. The kernel tries one more again only a second later."""
FAMILIES: Final = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


class NamespaceError(Exception):
    """Raised when such a network cannot be made here; the text is the reason."""


def enter(resolv: str) -> list[socket.socket]:
    """Make the network for this process. Return the sockets for the sidecar: the one for DNS, then those for
    connections.
    """
    uid, gid = os.getuid(), os.getgid()
    _unshare(_NEWUSER | _NEWNET | _NEWNS)
    _become(0, 0, uid, gid)
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _UP | _RUNNING))
    sockets = [_listening(socket.AF_INET, "127.0.0.1", 53, socket.SOCK_DGRAM)]
    sockets += [_listening(family, host, PORT, socket.SOCK_STREAM) for family, host in FAMILIES if _route(family)]
    rules.run(rules.rule_commands(rules.choose_tool(None), (PORT, None)))
    _mount(resolv, os.path.realpath("/etc/resolv.conf"))
    # A second user namespace, in which the process has its own user again, without rights over this network.
    _unshare(_NEWUSER)
    _become(uid, gid, 0, 0)
    return sockets


def _unshare(flags: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        why = os.strerror(ctypes.get_errno())
        raise NamespaceError(f"this machine gives a process no network of its own (user namespaces): {why}")


def _become(uid: int, gid: int, outside_uid: int, outside_gid: int) -> None:
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {outside_uid} 1"),
        ("gid_map", f"{gid} {outside_gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _route(family: socket.AddressFamily) -> bool:
    """Make every address of a family lead to this machine. False when the machine lacks the family (IPv6)."""
    option = "-4" if family == socket.AF_INET else "-6"
    command = ["ip", option, "route", "add", "local", "default", "dev", "lo"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise NamespaceError("ip cannot be found: install iproute2") from None
    if done.returncode != 0 and family == socket.AF_INET:
        raise NamespaceError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.returncode == 0


def _listening(family: int, host: str, port: int, kind: int) -> socket.socket:
    made = socket.socket(family, kind)
    made.bind((host, port))
    if kind == socket.SOCK_STREAM:
        made.listen(BACKLOG)
    return made


def _mount(file: str, over: str) -> None:
    """Mount a file over another one."""
    if ctypes.CDLL(None, use_errno=True).mount(file.encode(), over.encode(), None, _BIND, None) != 0:
        raise NamespaceError(f"{over} cannot be replaced: {os.strerror(ctypes.get_errno())}")


def main(way: int, resolv: str, command: list[str]) -> None:
    """Hand over the sockets, or the reason why there are none; then become the command."""
    with socket.socket(fileno=way) as channel:
        try:
            sockets = enter(resolv)
        except (NamespaceError, rules.RedirectError, OSError) as error:
            channel.sendall(str(error).encode())
            sys.exit(1)
        _ = socket.send_fds(channel, [b"+"], [one.fileno() for one in sockets])
        for one in sockets:
            one.close()
        if channel.recv(1) != b"+":  # the sidecar is gone
            sys.exit(1)
    for one in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a command would inherit that
        signal.signal(one, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"penstock: {command[0]!r} could not be started: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[4:])
