"""The gateways that are compared: how each is installed, started, checked for readiness, and called.

`bare` is the yardstick and needs nothing. Peers from other registries live under bench/.build, each in a place of its
own and in the version named here; they are installed only on request. Every peer runs in one process (with its own
children) on one core, with logging of calls off; Penstock alone records, in its default settings.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE / ".build"
LITELLM, NEWEST_LITELLM = "1.106.2", "1.110.2"
SMG = "1.13.0"
PORTKEY = "1.15.2"
HONO_NODE_SERVER = "1.13.8"
"""From 1.14 on Portkey 1.15.2 answers every stream with 500."""
KEY = "sk-local-benchmark"


@dataclass(frozen=True)
class Start:
    """The arguments of a peer's start."""

    port: int
    upstream: int
    """Port of the mock."""
    scratch: Path
    """Empty directory of its own."""


@dataclass(frozen=True)
class Peer:
    """A gateway that is compared."""

    name: str
    command: Callable[[Start], list[str]]
    """Writes the configuration into scratch and returns the command line."""
    version: str = ""
    """Shown beside its name."""
    ready: str = "/readyz"
    """Path that answers 200 as soon as calls are served."""
    path: str = "/v1/chat/completions"
    """Path of calls; `{r}` is the rollout's id."""
    headers: Callable[[int], list[str]] = field(default=lambda _: [f"Authorization: Bearer {KEY}"])
    """Request headers, given the mock's port."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    warm_seconds: float = 1.0
    """Seconds of load before the measurement."""
    exact: bool = True
    """True if answers must pass through with their length unchanged."""
    installed: Callable[[], bool] = field(default=lambda: True)
    install: Callable[[], None] | None = None
    counter: str | None = None
    """Prometheus counter at /metrics of durably recorded calls."""


# Installation.


def sh(*command: str | Path, cwd: Path = BUILD) -> str:
    """Run a command and return its stdout; raise RuntimeError with the end of its output when it fails."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip()[-400:])
    return done.stdout


def install(folder: str, *packages: str) -> None:
    """Install packages into a virtual environment of their own."""
    shutil.rmtree(BUILD / folder, ignore_errors=True)
    BUILD.mkdir(exist_ok=True)
    sh(sys.executable, "-m", "venv", BUILD / folder)
    sh(BUILD / folder / "bin/pip", "install", "--quiet", *packages)


PROXY_NEEDS = """
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for one in map(Requirement, requires("litellm")):
    if one.marker and one.marker.evaluate({"extra": "proxy"}) and not one.marker.evaluate({"extra": ""}):
        if one.name != "litellm-proxy":
            extras = f"[{','.join(one.extras)}]" if one.extras else ""
            print(one.name + extras + ("" if one.name.startswith("litellm-") else str(one.specifier)))
"""
"""Prints the requirements of LiteLLM's proxy without those of its extra `proxy` that cannot be met: a package that no
registry has to have and that the proxy, which is in the wheel, runs without, and versions of two others that are newer
than it."""


def install_newest_litellm() -> None:
    """Install the wheel, then the requirements of its proxy."""
    install("litellm-newest", f"litellm=={NEWEST_LITELLM}")
    python = BUILD / "litellm-newest/bin/python"
    sh(python, "-m", "pip", "install", "--quiet", *sh(python, "-c", PROXY_NEEDS).split("\n")[:-1])


def install_portkey() -> None:
    """Install it with npm, with a pinned HTTP server."""
    if not shutil.which("npm"):
        raise RuntimeError("npm is not installed")
    folder = BUILD / "portkey"
    folder.mkdir(parents=True, exist_ok=True)
    package = {"private": True, "dependencies": {"@portkey-ai/gateway": PORTKEY}}
    pinned = {"overrides": {"@hono/node-server": HONO_NODE_SERVER}}
    (folder / "package.json").write_text(json.dumps(package | pinned))
    sh("npm", "install", "--no-audit", "--no-fund", cwd=folder)


# Configuration and command lines.

NGINX = """\
worker_processes 1; daemon off; pid {scratch}/nginx.pid; error_log stderr error;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {scratch}/body; proxy_temp_path {scratch}/proxy;
  fastcgi_temp_path {scratch}/f; uwsgi_temp_path {scratch}/u; scgi_temp_path {scratch}/s;
  keepalive_requests 1000000000; tcp_nodelay on; client_max_body_size 1g; client_body_buffer_size 1m;
  upstream mock {{ server 127.0.0.1:{upstream}; keepalive 256; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://mock; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering off;
    }}
  }}
}}
"""

PENSTOCK = """\
[[upstream]]
name = "mock"
base_url = "http://127.0.0.1:{upstream}/v1"
dialect = "openai"
"""
INDEX = """
[index]
when = "{index}"
"""

GUARDED = """
[[upstream]]
name = "other"
base_url = "http://127.0.0.1:{upstream}/v1"
max_concurrent = 1000

[[route]]
model = "*"
upstream = {{ mock = 1, other = 1 }}

[[budget]]
name = "all"
unit = "tokens"
limit = 1_000_000_000_000
window = "1d"

[[budget]]
name = "loops"
per = "rollout"
unit = "calls"
limit = 1_000_000
window = "total"
"""

LITELLM_CONFIG = """\
model_list:
{models}
litellm_settings: {{num_retries: 0, telemetry: false, set_verbose: false}}
router_settings: {{disable_cooldowns: true, num_retries: 0}}
general_settings: {{master_key: {key}}}
"""
LITELLM_MODEL = """\
  - model_name: {model}
    litellm_params: {{model: openai/{model}, api_base: "http://127.0.0.1:{upstream}/v1", api_key: {key}}}
"""


def bare(start: Start) -> list[str]:
    return [sys.executable, "-m", "bench.bare", str(start.port), f"http://127.0.0.1:{start.upstream}"]


def nginx(start: Start) -> list[str]:
    """Return the command of the floor: a proxy in C that records nothing."""
    file = start.scratch / "nginx.conf"
    file.write_text(NGINX.format(scratch=start.scratch, port=start.port, upstream=start.upstream))
    return ["nginx", "-p", str(start.scratch), "-c", str(file)]


def penstock_program() -> Path:
    """Return the console script beside this interpreter."""
    return Path(sys.executable).parent / "penstock"


def penstock(start: Start, index: str = "never", more: str = "", workers: int = 1) -> list[str]:
    """Return Penstock's command: recording on and durable, which is the default."""
    settings = (PENSTOCK + INDEX + more).format(upstream=start.upstream, index=index)
    command = [str(penstock_program()), *serve(start, settings)]
    return command if workers == 1 else [*command, "--workers", str(workers)]


def serve(start: Start, settings: str) -> list[str]:
    """Return the arguments of Penstock's command, after writing its settings."""
    file = start.scratch / "penstock.toml"
    file.write_text(settings)
    return ["serve", "--config", str(file), "--data", str(start.scratch / "data"), "--port", str(start.port)]


def litellm(start: Start, folder: str = "litellm", *more: str) -> list[str]:
    """Return the command of LiteLLM's proxy: one worker, a master key and no database."""
    file = start.scratch / "litellm.yaml"
    names = ("bench-chat", "bench-burst", "bench-paced")
    models = "".join(LITELLM_MODEL.format(model=name, upstream=start.upstream, key=KEY) for name in names)
    file.write_text(LITELLM_CONFIG.format(models=models, key=KEY))
    program = [str(BUILD / folder / "bin/litellm"), "--config", str(file), "--num_workers", "1"]
    return [*program, "--host", "127.0.0.1", "--port", str(start.port), *more]


def native_litellm(start: Start) -> list[str]:
    """Return LiteLLM's command with its server in Rust (granian) and its other options for Rust."""
    return litellm(start, "litellm-newest", "--run_granian")


def smg(start: Start) -> list[str]:
    """Return the command of a router in Rust, in front of one endpoint with OpenAI's format."""
    upstream = ["--backend", "openai", "--worker-urls", f"http://127.0.0.1:{start.upstream}"]
    quiet = ["--log-level", "error", "--prometheus-port", str(start.port + 1)]
    return [str(BUILD / "smg/bin/smg"), "launch", *upstream, "--host", "127.0.0.1", "--port", str(start.port), *quiet]


def portkey(start: Start) -> list[str]:
    """Return the command of Portkey's gateway under node, without its console."""
    program = BUILD / "portkey/node_modules/@portkey-ai/gateway/build/start-server.js"
    return ["node", str(program), f"--port={start.port}", "--headless"]


def portkey_headers(upstream: int) -> list[str]:
    """Return the headers that name Portkey's upstream in every request."""
    host = f"x-portkey-custom-host: http://127.0.0.1:{upstream}/v1"
    return [f"Authorization: Bearer {KEY}", "x-portkey-provider: openai", host]


def on_path(program: str) -> bool:
    return shutil.which(program) is not None


LITELLM_ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "DISABLE_ADMIN_UI": "True",
    "LITELLM_TELEMETRY": "False",
}

PEERS = [
    Peer("bare", bare),
    Peer("nginx", nginx, installed=partial(on_path, "nginx")),
    Peer(
        "penstock",
        penstock,
        path="/rollout/{r}/attempt/a1/v1/chat/completions",
        installed=lambda: penstock_program().exists(),
        counter="penstock_commit_spans_total",
    ),
    Peer(
        "indexed",
        partial(penstock, index="always"),
        path="/rollout/{r}/attempt/a1/v1/chat/completions",
        installed=lambda: penstock_program().exists() and find_spec("duckdb") is not None,
        counter="penstock_commit_spans_total",
    ),
    Peer(
        "guarded",
        partial(penstock, more=GUARDED),
        path="/rollout/{r}/attempt/a1/v1/chat/completions",
        installed=lambda: penstock_program().exists(),
        counter="penstock_commit_spans_total",
    ),
    Peer(
        "workers",
        partial(penstock, workers=2),
        path="/rollout/{r}/attempt/a1/v1/chat/completions",
        installed=lambda: penstock_program().exists(),
        counter="penstock_commit_spans_total",
    ),
    Peer(
        "implicit",
        penstock,
        installed=lambda: penstock_program().exists(),
        counter="penstock_commit_spans_total",
    ),
    Peer(
        "litellm",
        litellm,
        ready="/health/readiness",
        version=LITELLM,
        environment=LITELLM_ENVIRONMENT,
        exact=False,
        installed=(BUILD / "litellm/bin/litellm").exists,
        install=partial(install, "litellm", f"litellm[proxy]=={LITELLM}"),
    ),
    Peer(
        "litellm-newest",
        partial(litellm, folder="litellm-newest"),
        version=NEWEST_LITELLM,
        ready="/health/readiness",
        environment=LITELLM_ENVIRONMENT,
        exact=False,
        installed=(BUILD / "litellm-newest/bin/granian").exists,
        install=install_newest_litellm,
    ),
    Peer(
        "litellm-native",
        native_litellm,
        version=NEWEST_LITELLM,
        ready="/health/readiness",
        environment={**LITELLM_ENVIRONMENT, "LITELLM_RUST": "1"},
        exact=False,
        installed=(BUILD / "litellm-newest/bin/granian").exists,
        install=install_newest_litellm,
    ),
    Peer(
        "smg",
        smg,
        version=SMG,
        ready="/readiness",
        installed=(BUILD / "smg/bin/smg").exists,
        install=partial(install, "smg", f"smg=={SMG}"),
    ),
    Peer(
        "portkey",
        portkey,
        version=PORTKEY,
        ready="/",
        headers=portkey_headers,
        environment={"TRUSTED_CUSTOM_HOSTS": "127.0.0.1"},
        warm_seconds=6.0,  # its compiler needs some thousand calls
        installed=(BUILD / "portkey/node_modules/@portkey-ai/gateway").exists,
        install=install_portkey,
    ),
]

# Penstock at an earlier commit, with its defaults and in this environment's packages.

FORMER = "5bb4517"
FORMER_FILES = BUILD / f"penstock-{FORMER}"


def install_former() -> None:
    """Check the commit out of this repository's history; raise RuntimeError in a clone that does not have it."""
    try:
        sh("git", "cat-file", "-e", f"{FORMER}^{{commit}}", cwd=HERE)
    except RuntimeError:
        raise RuntimeError("this clone does not have the commit: git fetch --unshallow gets it") from None
    sh("git", "worktree", "add", "--force", "--detach", FORMER_FILES, FORMER, cwd=HERE)


def former(start: Start) -> list[str]:
    """Return the command of the earlier Penstock: recording on and durable, without the index that came later."""
    return [sys.executable, "-m", "gateway", *serve(start, PENSTOCK.format(upstream=start.upstream))]


PEERS.append(
    Peer(
        FORMER_FILES.name,
        former,
        path="/rollout/{r}/attempt/a1/v1/chat/completions",
        environment={"PYTHONPATH": str(FORMER_FILES), "PYTHONSAFEPATH": "1"},
        installed=(FORMER_FILES / "gateway").is_dir,
        install=install_former,
        counter="penstock_commit_spans_total",
    )
)


def environment(peer: Peer) -> dict[str, str]:
    """Return our environment without proxies, which would catch calls to loopback, plus the peer's own variables."""
    kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    return {**kept, **peer.environment}
