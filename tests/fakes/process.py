"""A gateway as its users run it: a process of its own, on a free port, with a data directory of its own.

    async with running(tmp_path, upstreams(openai=provider.openai_url)) as gateway:
        gateway.openai("r1", "a1")  # the base URL of an agent

It is ready when it has printed its address and answers `/readyz`. Nothing here sleeps: output, exit and readiness are
awaited.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import ssl
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from fakes.preloaded import penstock
from fakes.waiting import PATIENCE_S

PATIENCE = PATIENCE_S
ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
"""`PYTHONPATH` of a process that imports Penstock and these fakes."""
ORDINARY = (str(ROOT / ".ci" / "ordinary"),)
"""What runs a command with an ordinary user's rights to files, whoever runs the tests."""


def upstreams(openai: str | None = None, anthropic: str | None = None, key_env: str | None = None) -> str:
    """Configuration text for upstreams of these base URLs."""
    found = {"openai": openai, "anthropic": anthropic}
    return "".join(upstream(f"fake-{name}", url, name, key_env) for name, url in found.items() if url)


def upstream(name: str, base_url: str, dialect: str, key_env: str | None = None) -> str:
    """Configuration text for one upstream."""
    lines = [f'name = "{name}"', f'base_url = "{base_url}"', f'dialect = "{dialect}"']
    return "\n".join(["[[upstream]]", *lines, *([f'key_env = "{key_env}"'] if key_env else []), "", ""])


def vllms(*urls: str, train: str | None = "true") -> str:
    """Configuration text for upstreams of these base URLs: `vllm`, `vllm-2` and so on. Calls to the model `policy` go
    to the first one; `train` is what their route says of training, None: there is no such route."""
    names = ["vllm", *(f"vllm-{number}" for number in range(2, len(urls) + 1))]
    made = "".join(upstream(name, url, "openai") for name, url in zip(names, urls, strict=True))
    route = f'[[route]]\nmodel = "policy"\nupstream = "vllm"\ntrain = {train}\n'
    return made if train is None else made + route


def memory_of(pid: int, what: str = "VmRSS") -> int:
    """Resident memory of a process; bytes. `what`: the field of its status, `VmHWM` for the most there has been."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition(f"{what}:")[2].split()[0])


def forget_peak(pid: int) -> None:
    """The most memory that a process has had (`VmHWM`) is what it has now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def child(pid: int, word: bytes) -> int:
    """The process that another one has started with this word in its command; words end with a zero."""
    (found,) = [one for one in children(pid) if word in command(one)]
    return found


def command(pid: int) -> bytes:
    """The words of a process, each with a zero at its end; none where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def limit_files(pid: int, most: int | None) -> None:
    """Makes every write of a process beyond so many bytes fail, as a full disk would. None: there is room again."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    _ = resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if most is None else most, hard))


def children(pid: int) -> list[int]:
    """Processes that this one has started and that have not ended; none where it has ended itself."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def below(pid: int) -> list[int]:
    """Processes that this one has started, and theirs."""
    return [found for one in children(pid) for found in (one, *below(one))]


async def gone(pid: int) -> None:
    """Comes back when the process has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(fd, ended.set)
    try:
        async with asyncio.timeout(PATIENCE):
            await ended.wait()
    except TimeoutError:
        raise AssertionError(f"process {pid} is still there: {command(pid)!r}") from None
    finally:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)


def nobody_reads(pipe: int) -> bool:
    """True if the reading end of this pipe is closed. `pipe`: its writing end, which does not block."""
    try:
        os.write(pipe, b"late")
    except (BrokenPipeError, BlockingIOError) as error:
        return isinstance(error, BrokenPipeError)
    return False


def alive(pid: int) -> bool:
    """Whether a process has not ended; whoever has started it may yet have to hear of that."""
    return state(pid) not in ("Z", "X", "")


def state(pid: int) -> str:
    """A letter, as proc(5) has it; none where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@dataclass(slots=True)
class Gateway:
    """A gateway process."""

    config: Path
    data: Path
    log_path: Path
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    python: Path = Path(sys.executable)
    under: tuple[str, ...] = ()
    tls: ssl.SSLContext | None = None
    url: str = ""
    process: asyncio.subprocess.Process | None = None
    says_data: bool = True
    """Whether its command says where its tape is; else its configuration does."""

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def memory(self) -> int:
        """Resident memory; bytes."""
        return memory_of(self.pid)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def log(self) -> str:
        """What it has written to stderr so far."""
        return self.log_path.read_text() if self.log_path.exists() else ""

    def address(self, rollout: str, attempt: str = "a1") -> str:
        """The base URL of an Anthropic client."""
        return f"{self.url}/rollout/{rollout}/attempt/{attempt}"

    def openai(self, rollout: str, attempt: str = "a1") -> str:
        """The base URL of an OpenAI client."""
        return self.address(rollout, attempt) + "/v1"

    async def start(self, port: int = 0) -> None:
        """Start the process and wait until it is ready."""
        data = ("--data", self.data) if self.says_data else ()
        words = ["serve", "--config", self.config, *data, "--port", str(port), *self.flags]
        env = dict(os.environ) | {"PYTHONPATH": str(ROOT)} | dict(self.env)
        with self.log_path.open("ab") as log:
            if self.under or self.python != Path(sys.executable):
                self.process = await asyncio.create_subprocess_exec(
                    *(*self.under, self.python, "-m", "penstock", *words),
                    env=env,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                )
            else:
                self.process = await penstock(*words, env=env, stdout=asyncio.subprocess.PIPE, stderr=log)
        try:
            async with asyncio.timeout(PATIENCE):
                self.url = await self._address_line()
                await self._ready()
        except (TimeoutError, AssertionError) as error:
            await self.kill()
            raise AssertionError(f"the gateway did not start: {error}\n{self.log}") from None

    async def _address_line(self) -> str:
        output = self._running().stdout
        assert output is not None
        line = (await output.readline()).decode()
        scheme = "http" if self.tls is None else "https"
        assert line.startswith(f"penstock listening on {scheme}://"), f"its first line was {line!r}"
        return line.split()[-1]

    async def _ready(self) -> None:
        connector = aiohttp.TCPConnector(ssl=self.tls or True)
        async with aiohttp.ClientSession(connector=connector) as session:
            while True:
                async with session.get(self.url + "/readyz") as response:
                    if response.status == 200:
                        return

    async def terminate(self) -> int:
        """Ask it to stop, wait until it has, and return its exit status."""
        return await self._end("terminate")

    async def kill(self) -> int:
        """Kill it, as a crash would."""
        return await self._end("kill")

    async def _end(self, how: str) -> int:
        process = self._running()
        if process.returncode is None:
            getattr(process, how)()
        try:
            async with asyncio.timeout(PATIENCE):
                _ = await process.communicate()  # also closes the pipe
        except TimeoutError:
            process.kill()
            with suppress(TimeoutError):  # what it has started may have its pipe, and lives on
                async with asyncio.timeout(PATIENCE):
                    _ = await process.communicate()
            raise AssertionError(f"the gateway did not stop within {PATIENCE} s of {how}\n{self.log}") from None
        assert process.returncode is not None
        return process.returncode

    async def restart(self) -> None:
        """Stop it unless it is dead already, and start it again on the same port and data."""
        _ = await self.terminate()
        await self.start(self.port)

    async def reload(self) -> None:
        """Have it start another process that takes over; returns when that serves."""
        os.kill(self.pid, signal.SIGHUP)
        async with asyncio.timeout(PATIENCE):
            assert await self._address_line() == self.url

    def _running(self) -> asyncio.subprocess.Process:
        assert self.process is not None, "the gateway was not started"
        return self.process


def write_config(home: Path, config: str) -> Path:
    """The configuration as a file below `home`."""
    home.mkdir(parents=True, exist_ok=True)
    path = home / "penstock.toml"
    path.write_text(config)
    return path


@asynccontextmanager
async def running(
    home: Path,
    config: str,
    *flags: str,
    env: Mapping[str, str] | None = None,
    python: Path = Path(sys.executable),
    under: tuple[str, ...] = (),
    tls: ssl.SSLContext | None = None,
    port: int = 0,
) -> AsyncGenerator[Gateway]:
    """A gateway that keeps everything below `home`; what it wrote to stderr is printed at the end. `python`: of the
    environment that it runs in; `under`: a command that runs it, such as `.ci/ordinary`; `tls`: of its clients; `port`:
    one of `fakes.ports`, for one that is to be started there again."""
    made = Gateway(write_config(home, config), home / "data", home / "stderr", flags, env or {}, python, under, tls)
    try:
        await made.start(port)
        yield made
    finally:
        if made.process is not None:
            _ = await made.terminate()
        print(made.log)


def deep_folder(home: Path) -> str:
    """A directory for temporary files (TMPDIR) in which no socket has an address: it lies too deep."""
    made = home / ("deep" * 30)
    made.mkdir()
    return str(made)


@asynccontextmanager
async def beside_an_agent(home: Path) -> AsyncGenerator[Gateway]:
    """A gateway that was started in the folder of an agent, in which a package `penstock` of the agent's own lies."""
    folder = home / "agent"
    folder.mkdir()
    async with running(home, "", under=("env", "-C", str(folder))) as gateway:
        (folder / "penstock").mkdir()
        (folder / "penstock" / "__init__.py").write_text("raise SystemExit('the agent was run')")
        yield gateway
