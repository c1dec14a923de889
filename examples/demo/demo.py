"""The demo: three unmodified agents, a small local model, a server of tools, and a gateway between them. No network, no
key.

`python -m examples.demo.demo` (or `make demo`) starts the model and the server of tools in this process and a
gateway in another, runs `examples/openai_agent.py`, `examples/anthropic_agent.py` and `examples/tools_agent.py` with
only their URLs changed, and shows what is on the tape. Everything it makes is in a temporary directory; everything it
starts is stopped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from aiohttp import web

from examples.demo import tools
from examples.demo.model import DemoAnswer, Json, chat, chat_events, decide, message, message_events
from penstock.gateway.model.codes import install_hint

PACE = 0.01
"""Seconds between the model's events, so that there are timings to see."""
NO_PROXY = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
PATIENCE = 60.0
"""Seconds within which a gateway must start."""

Format = tuple[Callable[[Json, DemoAnswer], Json], Callable[[Json, DemoAnswer], Iterator[bytes]]]
FORMATS: dict[str, Format] = {"/v1/chat/completions": (chat, chat_events), "/v1/messages": (message, message_events)}
AGENTS = {"openai": ("OPENAI", "/v1"), "anthropic": ("ANTHROPIC", "")}
"""For each agent the beginning of its environment variables, and the end of its base URL."""
SCRIPTS = {"openai": "openai", "anthropic": "anthropic", "tools": "openai"}
"""The agents, and the SDK of each."""
SERVER = "calculator"
"""Name of the server of tools in the gateway."""


class DemoError(Exception):
    """The demo cannot continue; the message says what to do."""


async def demo() -> None:
    """Runs the agents against a fresh gateway and shows what it has recorded."""
    scripts = example_scripts()
    say("Starting a local model and a gateway, which takes some seconds.")
    with TemporaryDirectory(prefix="penstock-demo-") as home:
        async with model() as model_url, gateway(Path(home), model_url) as url:
            say(f"A model and an MCP server at {model_url}, a gateway in front of both at {url}.")
            for name, script in scripts.items():
                await run_agent(name, script, url)
            say("What the gateway has recorded:")
            await run_cli(url, "rollouts")
            await run_cli(url, "show", "demo-tools")
    say(
        "Everything is stopped. `.venv/bin/penstock tui --demo` shows a recorded gateway with more on it; "
        "`penstock tui` one that runs.\n`penstock serve --help` is where your own agents begin."
    )


def example_scripts() -> dict[str, Path]:
    """The scripts of the agents, by name; raises `DemoError` when they or their SDKs are missing."""
    missing = [name for name in AGENTS if find_spec(name) is None]
    if missing:
        raise DemoError(f"the demo's agents need {' and '.join(missing)}: {install_hint('demo')}")
    folder = Path(__file__).resolve().parents[2] / "examples"
    if folder.is_dir():
        return {name: folder / f"{name}_agent.py" for name in SCRIPTS}
    raise DemoError("the example agents are not here: run the demo from a checkout of penstock")


@asynccontextmanager
async def model() -> AsyncGenerator[str]:
    """Runs the local server of the model and of the tools; yields its address."""
    app = web.Application()
    app.add_routes([*(web.post(path, reply) for path in FORMATS), web.post(tools.PATH, tools.reply)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def reply(request: web.Request) -> web.StreamResponse:
    """Answers a model call, whole or as a stream of events."""
    plain, events = FORMATS[request.path]
    asked: Json = await request.json()
    answer = decide(asked)
    await asyncio.sleep(PACE)
    if not asked.get("stream"):
        return web.json_response(plain(asked, answer))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events(asked, answer):
        await asyncio.sleep(PACE)
        await response.write(event)
    return response


@asynccontextmanager
async def gateway(home: Path, model_url: str) -> AsyncGenerator[str]:
    """Runs a gateway process in front of the model; yields its address."""
    config = home / "penstock.toml"
    await asyncio.to_thread(config.write_text, configuration(model_url))
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


def configuration(model_url: str) -> str:
    """The gateway's configuration: the model speaks both APIs, and a server of tools is at the same address."""
    urls = {name: model_url + suffix for name, (_, suffix) in AGENTS.items()}
    upstreams = (f'[[upstream]]\nname = "{name}"\ndialect = "{name}"\nbase_url = "{url}"' for name, url in urls.items())
    return "\n".join((*upstreams, f'[mcp.servers.{SERVER}]\nurl = "{model_url}{tools.PATH}"'))


async def address(process: asyncio.subprocess.Process) -> str:
    """The address that the gateway prints when it is ready; raises `DemoError` after `PATIENCE`."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE):
            line = (await process.stdout.readline()).decode()
    except TimeoutError:
        raise DemoError(f"the gateway was not ready within {PATIENCE:.0f} s") from None
    if not line:
        raise DemoError("the gateway did not start; what it said is above")
    return line.split()[-1]


async def run_agent(name: str, script: Path, url: str) -> None:
    """Runs an agent through the gateway."""
    prefix, suffix = AGENTS[SCRIPTS[name]]
    address = f"{url}/rollout/demo-{name}/attempt/a1"
    urls = {f"{prefix}_BASE_URL": address + suffix}
    if name == "tools":
        urls["MCP_URL"] = f"{address}/mcp/{SERVER}"
    named = " \\\n  ".join(f"{variable}={value}" for variable, value in urls.items())
    say(f"$ {named} python examples/{script.name}")
    await run([str(script)], urls | {f"{prefix}_API_KEY": "none-needed"})


async def run_cli(url: str, *arguments: str) -> None:
    """Runs a `penstock` command against the gateway."""
    say(f"$ penstock {' '.join(arguments)}")
    await run(["-m", "penstock", *arguments], {"PENSTOCK_GATEWAY": url})


def environment(url: str) -> dict[str, str]:
    """Environment variables of a command that uses the gateway."""
    return dict(os.environ) | NO_PROXY | {"PENSTOCK_GATEWAY": url}


async def run(arguments: list[str], env: Mapping[str, str]) -> None:
    """Runs Python and shows its output; raises `DemoError` when it fails."""
    own = dict(os.environ) | NO_PROXY | dict(env)
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, env=own)
    if await process.wait() != 0:
        raise DemoError(f"{' '.join(arguments)} failed; what it said is above")


def say(text: str) -> None:
    """Prints a line between the outputs of other processes."""
    print(f"\n{text}", flush=True)


def main() -> int:
    """Runs the demo; returns the exit status."""
    try:
        asyncio.run(demo())
    except DemoError as error:
        print(f"penstock demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
