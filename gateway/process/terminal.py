"""The terminal of `penstock serve`: the lines that lead an agent to the gateway, then a line for each call.

Both are printed only when stdout is a terminal, the log is text without lines of calls, and `--quiet` is not given. So
services, containers and pipes get the one line that says where the gateway listens.

The recorder's thread hands over each call that is on the tape. A thread prints a few lines a second and counts the
other calls, so that neither many calls nor a terminal that is stopped (Ctrl-S) delays any. No line holds a body, a key
or a query: names are masked as on the tape.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from select import select
from textwrap import wrap
from typing import Final

from penstock.gateway.client.environment import CONFIG_FILE, LOCAL, configured_gateway
from penstock.gateway.config import GatewayConfig
from penstock.gateway.model.base import CALLS
from penstock.gateway.model.foreign_text import visible_name
from penstock.gateway.model.settings import EVERYWHERE
from penstock.gateway.model.toml import ConfigError, pluralized
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.wire.dialects.family import ANTHROPIC, OPENAI
from penstock.gateway.wire.http.redaction import plain_text

LINES_A_SECOND: Final = 20
"""Most lines of calls a second, of all workers together."""
_LOOKED_AT: Final = 2_000
"""Characters of a name that are looked at."""
_CLOSE_S: Final = 0.5
"""Seconds that the last lines may take when the gateway ends."""
_STDOUT: Final = 1
_CLIENTS: Final = (
    (OPENAI, "OPENAI", "/v1", "OpenAI's SDK, and all that speak its API"),
    (ANTHROPIC, "ANTHROPIC", "", "Claude Code, and Anthropic's SDK"),
)
_ROW: Final = "{:<8} {:<13} {:<18} {:<10} {:>13} {:>6} {:>6}"
_HEAD: Final = _ROW.format("time", "rollout", "model or tool", "status", "tokens in+out", "took", "first")
_MARGIN: Final = " " * 9
WAYS_OUT: Final = {
    "http_404": "upstream {upstream} knows no such model or path: compare the model's name and base_url",
    "http_429": "upstream {upstream} limits calls; max_concurrent of its [[upstream]] has them wait here instead",
    "connect": "nobody listens at upstream {upstream}: is it running? Compare its base_url",
    "connect_timeout": "upstream {upstream} cannot be reached: a firewall, or a wrong base_url",
    "timeout": "upstream {upstream} sent nothing for its read_timeout: raise it for models that think longer",
    "upstream_closed": "upstream {upstream} closed the connection within its answer: its own log says why",
    "upstream_protocol": "upstream {upstream} does not answer in HTTP/1.1: must its base_url be https://?",
    "upstream": "no upstream is for this model or path: add an [[upstream]], or a [[route]] for the model",
    "credential": "the agent's key is another provider's: give it a key of this one, or [[upstream]] a key_env",
    "auth": "the gateway has no credentials for upstream {upstream}: penstock upstreams says why",
    "token": "the agent's API key is no token of this rollout: penstock token {rollout} makes one",
    "tape": "the tape cannot be written: the log says why",
    "budget": "a budget has no room left: penstock budgets",
}
"""Advice on a failed call, by its error; docs/troubleshooting.md has all errors."""


def is_shown(config: GatewayConfig, quiet: bool) -> bool:
    """True if a person looks at stdout and has not asked for silence, or for the log's own lines of calls."""
    return not quiet and config.log.format == "text" and not config.log.calls and os.isatty(_STDOUT)


def gateway_url(config: GatewayConfig, host: str, port: int) -> str:
    """The URL for agents on this machine; with TLS by the first of `names`, which its certificate is for."""
    https = config.tls.certificate is not None
    name = config.names[0] if https and config.names else EVERYWHERE.get(host, host)
    return f"http{'s' if https else ''}://{f'[{name}]' if ':' in name else name}:{port}"


def welcome(config: GatewayConfig, url: str) -> str:
    """The lines that a person pastes where an agent is started, with a key where the agent's own would not do."""
    lines = [
        "",
        "Paste this where you start an agent, to record its calls as the rollout `first`",
        "(a name of your choice; without /rollout/first each conversation gets a name).",
    ]
    gateway = "" if url == LOCAL else f" --gateway {url}"
    for family, name, end, users in _CLIENTS:
        lines += ["", f"  # {users}", f"  export {name}_BASE_URL={url}/rollout/first{end}"]
        if config.token_required:
            lines.append(f"  export {name}_API_KEY=$(penstock token first{gateway})")
        elif all(one.has_key for one in config.upstreams() if one.dialect == family.name):
            lines.append(f"  export {name}_API_KEY=none-needed  # the gateway has the key")
    if url != _commands_ask():
        lines += ["", "  # Commands of another terminal ask this gateway after", f"  export PENSTOCK_GATEWAY={url}"]
    lines.append("")
    if config.token_required:
        lines.append("`penstock token` needs the gateway's PENSTOCK_ADMIN_KEY, if it has one.")
    if not config.loopback:
        lines.append("On other machines put the name of this one in the place of its address.")
    lines += ["Each call is shown here when it has ended; --quiet shows none.", "", _HEAD]
    return "\n".join(lines)


def _commands_ask() -> str | None:
    """URL of the gateway that commands in this directory ask; None if they have to be told."""
    if not os.path.exists(CONFIG_FILE):
        return LOCAL
    try:
        return configured_gateway(by_socket=False)
    except ConfigError:
        return None


class CallLines:
    """Prints a line for each call that has ended, on a thread of its own."""

    def __init__(self, config: GatewayConfig, most: int = LINES_A_SECOND, out: int = _STDOUT) -> None:
        """`most`: lines a second; `out`: descriptor of the terminal."""
        self._most, self._out = max(1, most), out
        self._keys = {one.name: None if one.auth is None else f'auth = "{one.auth}"' for one in config.upstreams()} | {
            one.name: f"{one.key_env} (its key_env)" for one in config.upstreams() if one.key_env is not None
        }
        self._coloured = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._lock, self._come = threading.Lock(), threading.Event()
        self._waiting: list[str] = []
        self._more = self._failed = 0
        self._said = ""
        """The last way out: one of many calls that fail alike is enough."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-terminal", daemon=True)
        self._thread.start()

    def add(self, entry: SpanEntry) -> None:
        """Show a call that has ended, or count it where there are too many; open calls and other spans are nothing.
        Called by the recorder's thread; never waits for the terminal."""
        if entry.status == "open" or entry.kind not in CALLS:
            return
        with self._lock:
            if len(self._waiting) < self._most:
                self._waiting.append(self._line(entry))
            else:
                self._more += 1
                self._failed += _failed(entry)
        if not self._come.is_set():
            self._come.set()

    def close(self) -> None:
        """Print what is left, unless the terminal takes nothing."""
        self._closing.set()
        self._come.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._come.wait()
                self._come.clear()
                # Twenty lines at once take a second's room, one line a twentieth of it.
                self._closing.wait(self._print() / self._most)
            self._print()
        except OSError:
            # The terminal has gone. Nobody reads lines any more, and calls are only counted.
            pass

    def _print(self) -> int:
        """Print the lines that wait, and return their number."""
        with self._lock:
            lines, more, failed = self._waiting, self._more, self._failed
            self._waiting, self._more, self._failed = [], 0, 0
        if more:
            told = f"... {pluralized(more, 'more call')}" + (f", {failed:,} of them failed" if failed else "")
            lines.append(self._red(told) if failed else told)
        left = memoryview("".join(f"{line}\n" for line in lines).encode(sys.stdout.encoding or "utf-8", "replace"))
        while left:
            try:
                left = left[os.write(self._out, left) :]
            except BlockingIOError:  # another program of this terminal has made it non-blocking
                _ = select([], [self._out], [])
        return min(len(lines), self._most)

    def _line(self, entry: SpanEntry) -> str:
        end_ns, usage = entry.end_ns or entry.start_ns, entry.usage
        counts = () if usage is None else (usage.input_tokens, usage.output_tokens)
        line = _ROW.format(
            time.strftime("%H:%M:%S", time.localtime(end_ns / 1e9)),
            _short(entry.rollout, 13),
            _short(entry.model or entry.name or f"{entry.method} {entry.path.partition('?')[0]}", 18),
            _short(entry.error or entry.status, 30) if _failed(entry) else entry.status,
            "+".join("?" if count is None else f"{count:,}" for count in counts),
            _seconds(end_ns - entry.start_ns),
            _seconds(entry.first_byte_ns),
        ).rstrip()
        way = self._way_out(entry) if _failed(entry) else ""
        if way and way != self._said:
            line = "\n".join([line, *wrap(way, 80, initial_indent=_MARGIN, subsequent_indent=_MARGIN)])
            self._said = way
        return self._red(line) if way else line

    def _way_out(self, entry: SpanEntry) -> str:
        """Return advice on a failed call, with the settings of its upstream."""
        error, upstream = entry.error or entry.status, entry.upstream
        if error in ("http_401", "http_403") and upstream is not None:
            own = self._keys.get(upstream)
            if own is not None:
                return f"upstream {upstream} refuses the key in {own}: give the gateway another"
            return f"upstream {upstream} refuses the agent's key: give the agent another, or [[upstream]] a key_env"
        way = WAYS_OUT.get(error, "`penstock show {rollout}` has the whole answer")
        return way.format(upstream=upstream or "of this call", rollout=entry.rollout)

    def _red(self, text: str) -> str:
        return f"\x1b[31m{text}\x1b[0m" if self._coloured else text


def _failed(entry: SpanEntry) -> bool:
    return entry.status in ("error", "interrupted")


def _short(name: str, most: int) -> str:
    """A name on one line, with secrets masked before it is cut. The recorder does not wait for the rest of a name."""
    shown = visible_name(plain_text(name[:_LOOKED_AT]))
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def _seconds(ns: int | None) -> str:
    if ns is None:
        return ""
    return f"{ns / 1e6:.0f}ms" if ns < 999_500_000 else f"{ns / 1e9:.1f}s"
