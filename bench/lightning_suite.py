"""Runs Agent Lightning 0.3's own store tests on a gateway: `python -m bench.lightning_suite SOURCE PYTHON [TEST]...`

SOURCE is a checkout of its tag v0.3.0, which is read and not kept; PYTHON an interpreter with `agentlightning==0.3.0`,
pytest, pytest-asyncio and portpicker. Each test gets an empty gateway of its own, and its store is Agent Lightning's
own client of it. The files are copied to a temporary directory, where the fixtures `store_fixture` and `server_client`
are replaced; nothing else is changed.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Final

from penstock.console.main import main as penstock

DEFAULT: Final = ("test_core.py",)
STORE: Final = '''

import socket as _socket, tempfile as _tempfile, time as _time, urllib.request as _request
import portpicker as _portpicker
from agentlightning.store.client_server import LightningStoreClient as _Client

@pytest.fixture
def gateway_url():
    """The address of an empty gateway."""
    port = _portpicker.pick_unused_port()
    with _tempfile.TemporaryDirectory() as data:
        with _socket.create_connection(("127.0.0.1", {port})) as gateway:
            gateway.sendall(f"{{port}} {{data}}\\n".encode())
            url = f"http://127.0.0.1:{{port}}"
            for _ in range(600):
                try:
                    _request.urlopen(url + "/readyz").read()
                    break
                except OSError:
                    _time.sleep(0.02)
            yield url
            gateway.shutdown(_socket.SHUT_WR)
            gateway.recv(1)

@pytest_asyncio.fixture
async def store_fixture(gateway_url):
    client = _Client(gateway_url, retry_delays=())
    yield client
    await client.close()
'''
CLIENT: Final = '''

class _Served:
    """Stands for the server: what a test asks of it is asked of the gateway, by a client."""

    def __init__(self, url):
        self.endpoint, self._client = url, LightningStoreClient(url, retry_delays=())

    def __getattr__(self, name):
        return getattr(self._client, name)

@pytest_asyncio.fixture
async def server_client({fixtures}):
    served, client = _Served(gateway_url), LightningStoreClient(gateway_url, retry_delays=())
    session = aiohttp.ClientSession() if {restful} else None
    yield (served, client, session, gateway_url + "/v1/agl") if {restful} else (served, client)
    if session is not None:
        await session.close()
    await client.close()
    await served.close()
'''


class GatewayStarter:
    """Starts a gateway for each connection, which names its port and its directory, and ends it with the connection.
    It forks, because importing takes ten times as long as starting."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def serve(self) -> None:
        """Start gateways, one at a time, until the process ends."""
        while True:
            client, _ = self._listener.accept()
            with client:
                port, data = client.makefile().readline().split()
                child = os.fork()
                if not child:
                    self._become(port, data)
                _ = client.recv(1)
                os.kill(child, signal.SIGTERM)
                _ = os.waitpid(child, 0)

    def _become(self, port: str, data: str) -> None:
        self._listener.close()
        os.chdir(data)
        log = os.open("log", os.O_CREAT | os.O_WRONLY)
        for stream in (1, 2):
            _ = os.dup2(log, stream)
        penstock(["serve", "--quiet", "--data", data, "--port", port])
        os._exit(0)


def prepare(source: Path, into: Path, tests: Sequence[str], port: int) -> None:
    """Copy the tests, with their fixtures replaced. `port`: of what starts gateways."""
    kept = into / "tests" / "store"
    shutil.copytree(source / "tests", into / "tests", ignore=shutil.ignore_patterns("assets", "__pycache__"))
    conftest = kept / "conftest.py"
    _ = conftest.write_text(conftest.read_text() + STORE.format(port=port))
    for name in tests:
        test = kept / name
        if "async def server_client(" in test.read_text():
            restful = "restful" in name
            replaced = CLIENT.format(fixtures="gateway_url", restful=restful)
            _ = test.write_text(test.read_text() + replaced)


def main(source: str, python: str, *tests: str) -> int:
    """Run the tests; return pytest's exit status."""
    with tempfile.TemporaryDirectory() as directory:
        wanted = [one for one in tests if one.endswith(".py")] or list(DEFAULT)
        options = [one for one in tests if not one.endswith(".py")]
        starter = GatewayStarter()
        prepare(Path(source), Path(directory), wanted, starter.port)
        paths = [f"tests/store/{name}" for name in wanted]
        settings = ["-p", "no:cacheprovider", "-q", "-rfEs", "--tb=line", "-o", "asyncio_mode=auto", *options]
        command = [python, "-m", "pytest", *settings, *paths]
        running = subprocess.Popen(command, cwd=directory)
        Thread(target=starter.serve, daemon=True).start()
        return running.wait()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
