"""A real vLLM on a CPU, in a virtual environment of its own (`make install-vllm`), serving a tiny model made here.

One server for all tests of this folder: it takes half a minute to start. Without the environment they are skipped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from fakes import environments
from fakes.ports import steady_ports

from penstock.gateway.releases.adapter_server import VllmClient

ROOT = Path(__file__).parents[2]
PYTHON = environments.python("vllm")
START_S, STOP_S = 480.0, 30.0
SLOTS, RANK = 3, 8

FLAGS: dict[str, str | int] = {
    "served-model-name": "base", "host": "127.0.0.1", "dtype": "float32", "max-model-len": 1024, "max-num-seqs": 32,
    "tool-call-parser": "hermes",
}  # fmt: skip
LORA = ("--enable-lora", f"--max-loras={SLOTS}", f"--max-lora-rank={RANK}")
SWITCHES = ("--enforce-eager", "--enable-auto-tool-choice", "--enable-scale-out")
ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Without it the first answer waits 15 s for a compiler.
    "TORCHDYNAMO_DISABLE": "1",
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "vllm: needs `make install-vllm`")


@dataclass(slots=True)
class Vllm:
    """A vLLM process."""

    home: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    model: Path | None = None
    """What it serves; `base` in its home where that is None."""
    flags: Mapping[str, str | int] = field(default_factory=dict[str, "str | int"])
    """Besides `FLAGS`, or instead."""
    lora: bool = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def adapter(self, name: str) -> str:
        """The path of an adapter on the server."""
        return str(self.home / name)

    def start(self) -> None:
        """Starts it and waits until it is healthy."""
        flags = [f"--{name}={value}" for name, value in (FLAGS | dict(self.flags)).items()]
        flags += [f"--model={self.model or self.home / 'base'}", *(LORA if self.lora else ())]
        # The `vllm` command asks for a package of that name; the one for CPUs has another.
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *SWITCHES, *flags]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, f"--port={self.port}"],
                env=inherited | ENVIRONMENT, cwd=self.home, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        for _ in range(int(START_S * 5)):
            if self._healthy():
                return
            try:
                # It says nothing when it is ready; this waits for its end while it starts.
                self.process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            break
        log = self._log.read_text()
        self.stop()
        raise AssertionError(f"vLLM did not start:\n{log[-5000:]}")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        """Stops it with everything that it has started."""
        process, self.process = self.process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def _log(self) -> Path:
        return self.home / "vllm.log"


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """A vLLM that serves `base`, with adapters on its disk and none loaded."""
    if not environments.installed("vllm"):
        pytest.skip("there is no vLLM here: `make install-vllm` installs it (3.4 GB), `make test-vllm` runs this")
    home = tmp_path_factory.mktemp("vllm")
    subprocess.run([PYTHON, Path(__file__).with_name("make_model.py"), home], check=True, capture_output=True)
    made = Vllm(home, steady_ports(1)[0])
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def engine(vllm: Vllm, http: aiohttp.ClientSession) -> VllmClient:
    """The gateway's side of it."""
    return VllmClient(http, vllm.url + "/v1")
