"""An agent that has no base URL, before and behind `penstock sidecar`. No network, no key: `make demo-sidecar`.

A host in this process stands in for api.openai.com, with a certificate authority of its own. The agent gets to it by a
proxy, as from a company's network; so does the gateway (`proxy` and `ca_file` of its upstream). The agent is asked
twice: straight, then behind the sidecar. What the host got is compared, byte by byte.
"""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from examples.demo.demo import DemoError, address, run_cli, say
from examples.demo.model import chat, chat_events, decide
from penstock.sidecar.intercept import session
from penstock.sidecar.intercept.certificate_store import CertificateStore

HOST = "api.openai.com"
AGENT = "examples/openai_agent.py"
LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)
Asked = list[bytes]


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: Asked) -> None:
    """The model host: it keeps every request as it came, and answers."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            found = LENGTH.search(head)
            body = await reader.readexactly(int(found[1]) if found else 0)
            asked.append(head + body)
            wanted = json.loads(body)
            made = decide(wanted)
            if wanted.get("stream"):
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                for event in (*chat_events(wanted, made), b""):
                    writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            else:
                whole = json.dumps(chat(wanted, made)).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(whole), whole))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


@asynccontextmanager
async def internet(authority: CertificateStore, asked: Asked) -> AsyncGenerator[str]:
    """A proxy that leads to the host; yields its URL."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wanted = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        if wanted != f"{HOST}:443".encode():
            writer.write(b"HTTP/1.1 403 There is no network\r\nContent-Length: 0\r\n\r\n")
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await writer.start_tls(authority.context(HOST))
        await answer(reader, writer, asked)

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@asynccontextmanager
async def gateway(home: Path, proxy: str, authority: Path) -> AsyncGenerator[str]:
    """A gateway whose upstream is the host; yields its address."""
    config = home / "penstock.toml"
    upstream = f'[[upstream]]\nname = "openai"\nbase_url = "https://{HOST}/v1"\nproxy = "{proxy}"\n'
    await asyncio.to_thread(config.write_text, f'{upstream}ca_file = "{authority}"\n')
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", "serve", "--config", config, "--data", home / "data", "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield await address(process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        _ = await process.communicate()


async def run(*command: str, env: dict[str, str]) -> None:
    """Runs something to its end."""
    clean = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    own = clean | {"OPENAI_API_KEY": "sk-not-a-key"} | env
    _ = own.pop("OPENAI_BASE_URL", None)
    process = await asyncio.create_subprocess_exec(sys.executable, *command, env=own)
    if await process.wait() != 0:
        raise DemoError(f"{' '.join(command)} failed; what it said is above")


async def demo() -> None:
    """The whole demo."""
    authority, asked = CertificateStore.create_in_process([HOST]), Asked()
    say(f"Starting a host that stands in for {HOST}, and a gateway, which takes some seconds.")
    with TemporaryDirectory(prefix="penstock-demo-") as folder:
        home = Path(folder)
        known, _ = session.write(home, authority.pem)
        async with internet(authority, asked) as proxy, gateway(home, proxy, known) as url:
            say(f"$ python {AGENT}        # no base URL, no gateway")
            await run(AGENT, env={"HTTPS_PROXY": proxy, "SSL_CERT_FILE": str(known)})
            before = asked.copy()
            asked.clear()
            say(f"$ penstock sidecar --rollout demo-sidecar -- python {AGENT}")
            await run(
                *(
                    "-m",
                    "penstock",
                    "sidecar",
                    "--gateway",
                    url,
                    "--rollout",
                    "demo-sidecar",
                    "--",
                    sys.executable,
                    AGENT,
                ),
                env={"SSL_CERT_FILE": str(known)},
            )
            same = before == asked
            say(f"{HOST} got {len(before)} requests each time: {'the same bytes' if same else 'THEY DIFFER'}.")
            say("What the gateway has recorded:")
            await run_cli(url, "rollouts")
            await run_cli(url, "show", "demo-sidecar")
    if not same:
        raise DemoError("the agent's requests were not the same behind the sidecar")
    say("Everything is stopped. docs/sidecar.md is where your own agents begin.")


def main() -> int:
    """Run the demo; the exit status says whether it went well."""
    try:
        asyncio.run(demo())
    except DemoError as error:
        print(f"penstock demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
