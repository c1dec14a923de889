"""A pod: an agent of one user, a sidecar of another in transparent mode, and rules of the kernel in between.

    python -m fakes.redirected_pod TOOL ...

`pod` is the network it runs in, as root; `world` is another one, at the end of a cable, with the model host and another
one. Prints what came of it with each tool, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from fakes.alone import know, loopback_up
from fakes.process import PATHS, PATIENCE, Gateway, running
from fakes.shell import PENSTOCK, Shell
from fakes.tape import Tape
from fakes.tls_host import TlsHost

from penstock.sidecar.intercept.certificate_store import CertificateStore

FOUR, SIX = "10.78.0.1", "fd78::1"
POWERLESS = ("setpriv", "--inh-caps=-all", "--bounding-set=-all")
AGENT = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *POWERLESS[1:])
SECRET = "a-secret-of-the-runner"
CHAT = ("-d", '{"model":"m","messages":[]}', "https://llm.test/v1/chat/completions")
CABLE = (
    "link add pod type veth peer name world netns {world}",
    "address add 10.78.0.2/24 dev pod",
    "-6 address add fd78::2/64 dev pod nodad",
    "link set pod up",
    "route add default via 10.78.0.1",
    "-6 route add default via fd78::1",
)
FAR_END = ("address add 10.78.0.1/24 dev world", "-6 address add fd78::1/64 dev world nodad", "link set world up")


async def world(folder: Path) -> None:
    """The other network. Each line that it is sent is answered with what it was asked since the last one."""
    authority = CertificateStore.create_in_process(["llm.test", "other.test"])
    (folder / "host-ca.pem").write_text(authority.pem)
    host, packets = TlsHost(), list[str]()

    class Datagrams(asyncio.DatagramProtocol):
        def datagram_received(self, data: bytes, addr: object) -> None:
            packets.append(data.decode())

    loop = asyncio.get_running_loop()
    context = authority.context("llm.test")
    context.sni_callback = lambda made, name, _: setattr(made, "context", authority.context(name or "llm.test"))
    for address in ("0.0.0.0", "::"):
        _ = await asyncio.start_server(host.serve, address, 443, ssl=context)
    _ = await loop.create_datagram_endpoint(Datagrams, ("0.0.0.0", 443))
    print("up", flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps({"asked": [one.decode("latin-1") for one in host.asked], "packets": packets}), flush=True)
        host.asked.clear()
        packets.clear()


class Pod:
    """What is in it."""

    def __init__(self, folder: Path, other: asyncio.subprocess.Process, gateway: Gateway) -> None:
        self.folder, self.other, self.gateway = folder, other, gateway
        self.shell = Shell(gateway.url, folder, (*POWERLESS, *PENSTOCK))
        self.rights = Shell(gateway.url, folder, PENSTOCK)
        self.files = folder / "files"

    async def told(self) -> dict[str, list[str]]:
        """What the world was asked."""
        assert self.other.stdin is not None
        assert self.other.stdout is not None
        self.other.stdin.write(b"\n")
        return json.loads(await self.other.stdout.readline())

    async def curl(self, *words: str, ca: Path | None = None) -> dict[str, Any]:
        """The agent calls somebody."""
        ca = ca or self.files / "ca-bundle.pem"
        command = (*AGENT, "curl", "-sS", "--cacert", str(ca), *words)
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE)
        return {"code": process.returncode, "out": out.decode(), "err": err.decode(), **await self.told()}

    async def rules(self, *words: str) -> dict[str, Any]:
        """`penstock sidecar iptables`."""
        done = await self.rights.run("sidecar", "iptables", *words)
        return {"code": done.code, "out": done.text, "err": done.err}

    async def sidecar(self, *words: str, **env: str) -> asyncio.subprocess.Process:
        """It serves, without any rights."""
        where = ("--port", "8100", "--admin", "127.0.0.1:8099", "--mode", "transparent", "--intercept", "llm.test")
        given = {"PENSTOCK_SIDECAR_TOKEN": SECRET, "SSL_CERT_FILE": str(self.folder / "host-ca.pem")} | env
        process = await self.shell.start("sidecar", "serve", str(self.files), *where, *words, **given)
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), PATIENCE)
        assert b"agents on 8100" in line, (line, await process.communicate())
        return process

    async def ready(self) -> dict[str, Any]:
        """What a probe is answered."""
        async with aiohttp.ClientSession() as http, http.get("http://127.0.0.1:8099/ready") as answer:
            return {"status": answer.status, "text": await answer.text()}

    async def tape(self) -> dict[str, Any]:
        """Calls and events, when there are some."""
        async with aiohttp.ClientSession() as http:
            tape = Tape(self.gateway.url, http)
            spans = await tape.when("r1", "a1", lambda spans: any(span.kind == "event" for span in spans))
        events = [dict(span.attributes or {}) for span in spans if span.kind == "event"]
        return {"calls": [span.status.value for span in spans if span.kind == "llm"], "egress": events}


async def tried(pod: Pod, tool: str) -> dict[str, Any]:
    """The life of a pod: what depends on its rules."""
    host_ca = pod.folder / "host-ca.pem"
    found: dict[str, Any] = {"direct": await pod.curl(*CHAT, ca=host_ca)}
    found["powerless"] = await pod.shell.run("sidecar", "iptables", "--apply", "--tool", tool)
    found["powerless"] = {"code": found["powerless"].code, "err": found["powerless"].err}
    found["printed"] = await pod.rules("--print", "--uid", "0", "--tool", tool)
    for _ in range(2):  # again is the same
        found["applied"] = await pod.rules("--apply", "--uid", "0", "--tool", tool)
    found["nobody there"] = await pod.curl(*CHAT, ca=host_ca)
    serving = await pod.sidecar(PENSTOCK_ROLLOUT_ID="r1")
    found["ready"] = await pod.ready()
    found["behind"] = await pod.curl(*CHAT)
    found["six"] = await pod.curl("-6", *CHAT)
    await datagram(AGENT)
    await datagram(())
    found["quic"] = await pod.told()
    if tool == "nft":
        found |= await served(pod)
        serving.terminate()
        _ = await serving.communicate()
        found |= await pod.tape()
        serving = await pod.sidecar("--on-unknown", "deny", PENSTOCK_ROLLOUT_ID="r2")
        found["denied"] = await pod.curl("https://other.test/", ca=host_ca)
    serving.kill()
    _ = await serving.communicate()
    found["killed"] = await pod.curl(*CHAT)
    found |= await wrong_user(pod, tool)
    found["after"] = await pod.curl(*CHAT, ca=host_ca)
    return found


async def served(pod: Pod) -> dict[str, Any]:
    """What a sidecar answers, whoever has made the rules."""
    return {
        "check": await pod.curl("https://192.0.2.1/"),
        "other": await pod.curl("https://other.test/", ca=pod.folder / "host-ca.pem"),
        "address": await pod.curl("-k", f"https://{FOUR}/"),
        "not redirected": await pod.curl("--resolve", "llm.test:8100:127.0.0.1", "https://llm.test:8100/"),
    }


async def wrong_user(pod: Pod, tool: str) -> dict[str, Any]:
    """Rules that do not leave the sidecar alone, and then none."""
    _ = await pod.rules("--apply", "--uid", "4242", "--tool", tool)
    serving = await pod.sidecar(PENSTOCK_ROLLOUT_ID="r3")
    found: dict[str, Any] = {"wrong user": await pod.curl("https://other.test/", ca=pod.folder / "host-ca.pem")}
    found["wrong user"]["ready"] = await pod.ready()
    found["removed"] = [await pod.rules("--remove", "--tool", tool) for _ in range(2)]
    found["no rules"] = await pod.ready()
    serving.terminate()
    _ = await serving.communicate()
    return found


async def datagram(user: tuple[str, ...]) -> None:
    """Somebody speaks UDP to port 443."""
    words = f"echo {'agent' if user else 'sidecar'} > /dev/udp/{FOUR}/443"
    process = await asyncio.create_subprocess_exec(*user, "bash", "-c", words, stderr=subprocess.DEVNULL)
    _ = await process.wait()


def lay_cable(far: int) -> None:
    """Between this network and that of a process."""
    for line in CABLE:
        _ = subprocess.run(["ip", *line.format(world=far).split()], check=True)
    for line in FAR_END:
        _ = subprocess.run(["nsenter", "--net", "--target", str(far), "ip", *line.split()], check=True)


async def main(folder: Path, tools: list[str]) -> dict[str, Any]:
    """In the pod's network."""
    command = ("unshare", "--net", "--", sys.executable, "-m", "fakes.redirected_pod", "world", str(folder))
    other = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": PATHS}
    )
    try:
        assert other.stdout is not None
        assert await other.stdout.readline() == b"up\n"
        lay_cable(other.pid)
        trust = folder / "host-ca.pem"
        text = f'[[upstream]]\nname = "host"\nbase_url = "https://llm.test/v1"\nca_file = "{trust}"\n'
        async with running(folder, text) as gateway:
            pod = Pod(folder, other, gateway)
            return {tool: await tried(pod, tool) for tool in tools}
    finally:
        with suppress(ProcessLookupError):
            other.kill()
        _ = await other.wait()


if __name__ == "__main__":
    loopback_up()
    if sys.argv[1] == "world":
        asyncio.run(world(Path(sys.argv[2])))
    else:
        with tempfile.TemporaryDirectory(prefix="penstock-pod-") as made:
            Path(made).chmod(0o755)
            know(Path(made), f"{FOUR} llm.test other.test\n{SIX} llm.test\n")
            print(json.dumps(asyncio.run(main(Path(made), sys.argv[1:]))))
