"""`penstock sidecar run --mode transparent`, tried in namespaces of the test's own.

    python -m fakes.redirected_run PATH PATH

The model host `llm.test` has an address that is none of loopback, and port 443. Each PATH has another tool for
rules of the kernel. Prints what came of it with each, as JSON; with the second, only of what depends on the rules.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
from fakes.alone import know, loopback_up, take
from fakes.process import PATIENCE, Gateway, running
from fakes.shell import PENSTOCK, Done, Shell
from fakes.tape import Tape
from fakes.tls_host import TlsHost

from penstock.sidecar.intercept.certificate_store import CertificateStore

ADDRESS = "10.77.0.1"
PYTHON = """
import json, urllib.request
def ask(**more):
    body = json.dumps({"model": "m", "messages": [], **more}).encode()
    return urllib.request.urlopen("https://llm.test/v1/chat/completions", body)
print(json.load(ask())["choices"][0]["message"]["content"])
said = [json.loads(line[6:]) for line in ask(stream=True) if line.startswith(b"data: {")]
print("".join(chunk["choices"][0]["delta"]["content"] for chunk in said))
"""
KILLED = """
import os, signal, ssl, sys, time, urllib.request
os.kill(os.getppid(), signal.SIGKILL)
while os.getppid() == int(sys.argv[1]): pass
try: urllib.request.urlopen("https://llm.test/v1/chat/completions", b"{}")
except OSError as error: print(error)
"""
ASK = ("curl", "-sS", "-d", '{"model":"m","messages":[]}', "https://llm.test/v1/chat/completions")


class World:
    """A host, a gateway, a shell."""

    def __init__(self, host: TlsHost, gateway: Gateway, folder: Path, rollout: str, path: str) -> None:
        self.host, self.gateway, self.rollout = host, gateway, rollout
        self.shell = Shell(gateway.url, folder, PENSTOCK)
        self.shell.env |= {"SSL_CERT_FILE": str(host.trust), "PATH": path}

    async def run(self, *command: str, options: tuple[str, ...] = ()) -> Done:
        """An agent in a network of its own."""
        own = ("sidecar", "run", "--mode", "transparent", "--rollout", self.rollout, "--intercept", "llm.test")
        return await self.shell.run(*own, *options, "--", *command)

    async def asked(self) -> list[str]:
        """What the host was asked since the last time."""
        found, self.host.asked = self.host.asked, []
        return [one.decode("latin-1") for one in found]


async def tried(world: World, rules: bool) -> dict[str, Any]:
    """What comes of each."""
    found: dict[str, Any] = {}
    direct = await asyncio.create_subprocess_exec(*ASK, "--cacert", str(world.host.trust), stdout=subprocess.PIPE)
    _ = await direct.communicate()
    found["direct"] = await world.asked()
    quic = "for n in 1 2 3; do echo hello > /dev/udp/10.77.0.1/443 || exit 1; done"
    commands = {"curl": ASK, "quic": ("bash", "-c", quic)}
    others = {
        "python": (sys.executable, "-c", PYTHON),
        "user": ("sh", "-c", "id -u; ip link set lo down && echo down; kill -TERM $$"),
        "check": ("curl", "-sS", "https://192.0.2.1/"),
        "unknown": ("curl", "-sS", "https://nowhere.test/"),
        "absent": ("no-such-command",),
    }
    for name, command in (commands if rules else commands | others).items():
        done = await world.run(*command)
        found[name] = {"code": done.code, "out": done.text, "err": done.err, "asked": await world.asked()}
    if not rules:
        done = await world.run("curl", "-sS", "https://nowhere.test/", options=("--on-unknown", "deny"))
        found["deny"] = {"code": done.code, "out": done.text, "err": done.err}
    found["killed"] = await killed(world)
    async with aiohttp.ClientSession() as http:
        wanted = 1 if rules else 5
        spans = await Tape(world.gateway.url, http).when(world.rollout, "a1", lambda spans: len(spans) >= wanted)
    found["spans"] = [span.model_dump(mode="json", include={"kind", "status", "attributes"}) for span in spans]
    return found


async def killed(world: World) -> dict[str, Any]:
    """An agent that kills its sidecar, and then calls its model."""
    script = f"exec {sys.executable} -c '{KILLED}' $PPID"
    process = await world.shell.start(
        *("sidecar", "run", "--mode", "transparent", "--intercept", "llm.test", "--", "sh", "-c", script),
    )
    out, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
    return {"code": process.returncode, "out": out.decode(), "asked": await world.asked()}


async def main(folder: Path) -> list[dict[str, Any]]:
    """In the namespaces."""
    authority, host = CertificateStore.create_in_process(["llm.test"]), TlsHost()
    host.trust = folder / "host-ca.pem"
    host.trust.write_text(authority.pem)
    server = await asyncio.start_server(host.serve, ADDRESS, 443, ssl=authority.context("llm.test"))
    text = f'[[upstream]]\nname = "host"\nbase_url = "https://llm.test/v1"\nca_file = "{host.trust}"\n'
    async with running(folder, text) as gateway:
        worlds = [World(host, gateway, folder, f"r{n}", path) for n, path in enumerate(sys.argv[1:], 1)]
        found = [await tried(world, world is not worlds[0]) for world in worlds]
    server.close()
    return found


if __name__ == "__main__":
    loopback_up()
    take(ADDRESS)
    with tempfile.TemporaryDirectory(prefix="penstock-run-") as made:
        know(Path(made), f"{ADDRESS} llm.test\n")
        print(json.dumps(asyncio.run(main(Path(made)))))
