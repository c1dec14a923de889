"""Starts the programs of bench.sidecar: a host with TLS, a gateway before it, and sidecars.

direct       no sidecar and no gateway
own          `penstock sidecar`, its own front; the gateway records
mitmproxy    `penstock sidecar --engine mitmproxy`: mitmproxy, then our front; the gateway records
mitmdump     mitmproxy alone, set up not to hold streams up; no recording
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import penstock.sidecar.intercept
from bench import procfs
from bench.peers import BUILD, HERE, Start, penstock_program
from bench.peers import Peer as Recorder
from bench.programs import Cores, Gateway, Mock, pin

MITMDUMP = HERE.parent / ".venv-mitmproxy" / "bin" / "mitmdump"
ADDON = Path(penstock.sidecar.intercept.__file__).with_name("mitm_addon.py")
SAYS = 'echo "$HTTPS_PROXY $SSL_CERT_FILE"; exec sleep 100000'
"""The agent's command: it prints its proxy and certificates."""
CONFIG = """\
[[upstream]]
name = "host"
base_url = "https://localhost:{upstream}/v1"
ca_file = "{trust}"
"""


@dataclass(frozen=True)
class Peer:
    """A way to the host."""

    name: str
    recorded: bool = True
    """True if its calls go through the gateway."""
    mitmproxy: bool = False
    """True if it needs mitmproxy."""


PEERS = [
    Peer("direct", recorded=False),
    Peer("own"),
    Peer("mitmproxy", mitmproxy=True),
    Peer("mitmdump", recorded=False, mitmproxy=True),
]


@dataclass(frozen=True)
class Running:
    """A way that is running."""

    port: int
    """Port of the proxy; 0 without one."""
    trust: Path
    pids: list[int] = field(default_factory=list[int])
    """Processes whose CPU counts."""


@dataclass
class Programs:
    """The running programs of the comparison."""

    host: Mock
    gateway: Gateway
    trust: Path
    cores: Cores
    running: dict[str, Running] = field(default_factory=dict[str, Running])

    @classmethod
    def start(cls, peers: list[Peer], cores: Cores, stack: ExitStack) -> Programs:
        """Start them one after the other; all end with the stack."""
        BUILD.mkdir(exist_ok=True)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sidecar-", dir=BUILD)))
        trust = folder / "host-ca.pem"
        command = [sys.executable, "-m", "bench.sidecar_host", str(folder)]
        host = _process(stack, command, cores.load)
        assert host.stdout is not None
        served = Mock(host.pid, int(host.stdout.readline()))

        def recorder(start: Start) -> list[str]:
            file = start.scratch / "penstock.toml"
            file.write_text(CONFIG.format(upstream=start.upstream, trust=trust))
            serve = [str(penstock_program()), "serve", "--config", str(file)]
            return [*serve, "--data", str(start.scratch / "data"), "--port", str(start.port)]

        gateway = Gateway(Recorder("penstock", recorder, counter="penstock_commit_spans_total"), served.port, cores)
        stack.callback(gateway.close)
        gateway.wait_ready()
        made = cls(served, gateway, trust, cores)
        for peer in peers:
            made.running[peer.name] = made._started(peer, folder, stack)
        return made

    def _started(self, peer: Peer, folder: Path, stack: ExitStack) -> Running:
        if peer.name == "direct":
            return Running(0, self.trust)
        if peer.name == "mitmdump":
            return self._alone(folder / "alone", stack)
        engine = "mitmproxy" if peer.mitmproxy else "own"
        url = f"http://127.0.0.1:{self.gateway.start.port}"
        command = [str(penstock_program()), "sidecar", "--engine", engine, "--gateway", url, "--rollout", peer.name]
        command += ["--intercept", f"localhost:{self.host.port}", "--", "sh", "-c", SAYS]
        process = _process(stack, command, self.cores.gateway)
        assert process.stdout is not None
        proxy, _, trust = process.stdout.readline().strip().partition(" ")
        if not trust:
            raise RuntimeError(f"{' '.join(command)} did not start")
        agents = {pid for pid in procfs.children(process.pid) if _name(pid) == "sleep"}
        stack.callback(lambda: [os.kill(pid, 9) for pid in agents])
        billed = [pid for pid in procfs.tree(process.pid) if pid not in agents]
        return Running(int(proxy.rpartition(":")[2]), Path(trust), billed)

    def _alone(self, home: Path, stack: ExitStack) -> Running:
        options = {
            "confdir": str(home),
            "listen_host": "127.0.0.1",
            "listen_port": "0",
            "ssl_verify_upstream_trusted_ca": str(self.trust),
            "connection_strategy": "lazy",
            "upstream_cert": "false",
            "flow_detail": "0",
            "termlog_verbosity": "error",
            "scripts": str(ADDON),
        }
        words = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
        process = _process(stack, [str(MITMDUMP), *words], self.cores.gateway)
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        return Running(port, home / "mitmproxy-ca-cert.pem", [process.pid])

    def answered(self) -> int:
        """Return the calls that the host has answered."""
        handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._context)
        opener = urllib.request.build_opener(*handlers)
        with opener.open(f"https://localhost:{self.host.port}/", timeout=5) as answer:
            return int(answer.read())

    def recorded(self) -> int:
        """Return the calls that are durably on the tape."""
        return self.gateway.recorded() or 0

    @property
    def _context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.trust))


def _name(pid: int) -> str:
    return (procfs.PROC / str(pid) / "comm").read_text().strip()


def _process(stack: ExitStack, command: list[str], core: int) -> subprocess.Popen[str]:
    """Start a process on a core, whose stdin ends with the stack."""
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=HERE.parent,
        env=environment | {"PENSTOCK_MITMDUMP": str(MITMDUMP)},
        preexec_fn=pin(core),
    )

    def end() -> None:
        process.terminate()
        process.communicate()

    stack.callback(end)
    return process
