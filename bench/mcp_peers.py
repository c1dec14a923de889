"""Proxies for MCP: how each is installed and started. `bare` is the yardstick of the other benches.

The others rebuild every message with an SDK; they live in virtual environments of their own under bench/.build, in the
version named here, and are installed only when asked for. Logging of calls is off. Penstock alone records.
"""

from __future__ import annotations

from functools import partial

from bench.peers import BUILD, Peer, Start, bare, install, penstock_program

FASTMCP = "4.1.2"
MCP_PROXY = "0.13.0"

PENSTOCK = """\
[mcp.servers.echo]
url = "http://127.0.0.1:{upstream}/mcp"
"""
PROXY = """\
from fastmcp.server import create_proxy
from starlette.responses import PlainTextResponse

proxy = create_proxy("http://127.0.0.1:{upstream}/mcp", name="proxy")


@proxy.custom_route("/readyz", methods=["GET"])
async def ready(request):
    return PlainTextResponse("ok")


settings = {{"access_log": False}}
proxy.run(
    transport="http", host="127.0.0.1", port={port}, show_banner=False, log_level="ERROR", uvicorn_config=settings
)
"""


def penstock(start: Start) -> list[str]:
    """Return Penstock's command: recording on and durable, which is the default."""
    file = start.scratch / "penstock.toml"
    file.write_text(PENSTOCK.format(upstream=start.upstream))
    serve = [str(penstock_program()), "serve", "--config", str(file)]
    return [*serve, "--data", str(start.scratch / "data"), "--port", str(start.port)]


def fastmcp(start: Start) -> list[str]:
    """Return FastMCP's command: its proxy with its defaults, on uvicorn."""
    file = start.scratch / "proxy.py"
    file.write_text(PROXY.format(upstream=start.upstream, port=start.port))
    return [str(BUILD / "fastmcp/bin/python"), str(file)]


def mcp_proxy(start: Start) -> list[str]:
    """Return mcp-proxy's command. It translates between stdio and HTTP, so that two in a row are a proxy for HTTP."""
    program = str(BUILD / "mcp-proxy/bin/mcp-proxy")
    quiet = [program, "--log-level", "ERROR"]
    behind = [*quiet, "--transport", "streamablehttp", f"http://127.0.0.1:{start.upstream}/mcp"]
    return [*quiet, "--host", "127.0.0.1", "--port", str(start.port), "--", *behind]


PEERS = [
    Peer("bare", bare, ready="/", path="/mcp"),
    Peer(
        "penstock",
        penstock,
        path="/rollout/{r}/attempt/a1/mcp/echo",
        installed=lambda: penstock_program().exists(),
        counter="penstock_commit_spans_total",
    ),
    Peer(
        "fastmcp",
        fastmcp,
        path="/mcp",
        exact=False,
        installed=(BUILD / "fastmcp/bin/fastmcp").exists,
        install=partial(install, "fastmcp", f"fastmcp=={FASTMCP}"),
    ),
    Peer(
        "mcp-proxy",
        mcp_proxy,
        ready="/status",
        path="/mcp",
        exact=False,
        installed=(BUILD / "mcp-proxy/bin/mcp-proxy").exists,
        install=partial(install, "mcp-proxy", f"mcp-proxy=={MCP_PROXY}"),
    ),
]
