"""The agents: how each is started for a session in which it uses its shell twice and then answers, and in which modes.

Their installation is `.venv-clients` (`make install-clients`): the coding agents by their lock file, with a Node.js of
their own, and the SDKs that the tests' own environment does not have.
"""

from __future__ import annotations

import base64
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from fakes import environments

ROOT = Path(__file__).parents[2]
HOME = environments.folder("clients")
MODULES = HOME / "node_modules"
PYTHON = HOME / "python" / "bin" / "python"
HERE = Path(__file__).parent
NOWHERE = "this agent is not here: `make install-clients` installs it, `make test-clients` runs this"
ASK = "Use your shell to run `echo 1`, then `echo 2`, one after the other, and say when you are done."
_CPU = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
NODE = MODULES / f"node-linux-{_CPU}" / "bin" / "node"


@dataclass(frozen=True)
class Profile:
    """An agent in a mode."""

    client: str
    mode: str
    command: tuple[str, ...]
    installed: Callable[[], bool]
    version: Callable[[], str]
    env: dict[str, str] = field(default_factory=dict[str, str])
    files: dict[str, str] = field(default_factory=dict[str, str])
    """Below its home, those that begin with a dot; else where it works."""
    pinned: bool = True
    """Whether this is always the same version."""
    sidecar: tuple[str, ...] = ()
    """Options of the sidecar."""

    @property
    def id(self) -> str:
        """For a test."""
        return f"{self.client}, {self.mode}".replace(" ", "-").replace(",", "").lower()


def _npm(package: str) -> tuple[Callable[[], bool], Callable[[], str]]:
    manifest = MODULES / package / "package.json"

    def installed() -> bool:
        return environments.installed("clients") and manifest.is_file()

    return installed, lambda: json.loads(manifest.read_text())["version"]


def _native(package: str, program: str) -> tuple[str, ...]:
    """A program that an npm package brings along for this machine."""
    return (str(MODULES / f"{package}-linux-{_CPU}" / program),)


def _claude(
    mode: str, env: dict[str, str], *words: str, files: dict[str, str] | None = None, sidecar: tuple[str, ...] = ()
) -> Profile:
    program = _native("@anthropic-ai/claude-code", "claude")
    command = (*program, "-p", ASK, "--allowedTools", "Bash", *words)
    return Profile("Claude Code", mode, command, *_npm("@anthropic-ai/claude-code"), env, files or {}, sidecar=sidecar)


def _codex(mode: str, login: dict[str, Any]) -> Profile:
    machine = f"vendor/{platform.machine()}-unknown-linux-musl/bin/codex"
    words = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASK)
    command = (*_native("@openai/codex", machine), *words)
    files = {".codex/auth.json": json.dumps(login)}
    return Profile("Codex", mode, command, *_npm("@openai/codex"), {}, files)


def _opencode(mode: str, model: str, env: dict[str, str]) -> Profile:
    command = (*_native("opencode", "bin/opencode"), "run", "--model", model, ASK)
    settings = {"$schema": "https://opencode.ai/config.json", "autoupdate": False, "permission": {"bash": "allow"}}
    files = {".config/opencode/opencode.json": json.dumps(settings)}
    return Profile("opencode", mode, command, *_npm("opencode-ai"), env, files)


def _gemini() -> Profile:
    command = (str(NODE), str(MODULES / "@google/gemini-cli/bundle/gemini.js"), "-p", ASK, "--yolo", "--skip-trust")
    settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}, "general": {"enableAutoUpdate": False}}
    files = {".gemini/settings.json": json.dumps(settings)}
    env = {"GEMINI_API_KEY": "AIza-not-real"}
    return Profile("Gemini CLI", "API key", command, *_npm("@google/gemini-cli"), env, files)


def _python(package: str, module: str, env: dict[str, str]) -> Profile:
    """An SDK, in whichever of the two environments it is."""
    own = find_spec(module) is not None
    python = sys.executable if own else str(PYTHON)
    folder = next((PYTHON.parents[1] / "lib").glob("python3*/site-packages"), None) if PYTHON.exists() else None

    def installed() -> bool:
        if own or folder is None or not environments.installed("clients"):
            return own
        return folder.joinpath(*module.split(".")).is_dir()

    def version() -> str:
        from importlib.metadata import distributions, version

        if own:
            return version(package)
        found = distributions(name=package, path=[str(folder)])
        return next(iter(found)).version

    script = str(HERE / "scripts" / f"agent_{package.replace('-', '_')}.py")
    return Profile(f"`{package}`", "API key", (python, script), installed, version, env, pinned=False)


def _node(name: str) -> Profile:
    script = str(HERE / "scripts" / f"{name}.mjs")
    known = _npm(f"node-linux-{_CPU}")
    return Profile(f"Node.js, `{name}`", "API key", (str(NODE), script), *known, {"OPENAI_API_KEY": "sk-not-real"})


def _go() -> Profile:
    import subprocess

    program = HOME / "go-agent"

    def version() -> str:
        tool = PYTHON.with_name("go")
        return (
            subprocess.run([tool, "version", program], capture_output=True, text=True, check=True)
            .stdout.split("go")[-1]
            .strip()
        )

    return Profile("Go, `net/http`", "API key", (str(program),), program.is_file, version, _OPENAI, pinned=False)


def _curl() -> Profile:
    import subprocess

    def version() -> str:
        return subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout.split()[1]

    command = ("sh", str(HERE / "scripts" / "curl.sh"))
    return Profile("curl", "API key", command, lambda: which("curl") is not None, version, _OPENAI, pinned=False)


def _token(claims: dict[str, Any]) -> str:
    """A JSON Web Token that nobody checks."""
    parts = ({"alg": "none"}, claims)
    return ".".join(base64.urlsafe_b64encode(json.dumps(one).encode()).decode().rstrip("=") for one in parts) + ".c2ln"


def _servers() -> str:
    """Three servers of twelve tools each."""
    command = {"command": sys.executable, "args": [str(HERE / "scripts" / "twelve_tools.py")]}
    return json.dumps({"mcpServers": {name: command for name in ("one", "two", "three")}})


_AUTH = {"chatgpt_account_id": "account-1", "chatgpt_plan_type": "plus", "chatgpt_user_id": "user-1"}
_LOGIN = _token({"email": "a@b.c", "exp": 4_000_000_000, "https://api.openai.com/auth": _AUTH})
_OPENAI = {"OPENAI_API_KEY": "sk-not-real", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
_ANTHROPIC = {"ANTHROPIC_API_KEY": "sk-ant-api03-not-real"}
CHATGPT: dict[str, Any] = {
    "auth_mode": "chatgpt",
    "OPENAI_API_KEY": None,
    "tokens": {"id_token": _LOGIN, "access_token": _LOGIN, "refresh_token": "r", "account_id": "account-1"},
    "last_refresh": "2099-01-01T00:00:00Z",
}
_ONES = (
    _claude("API key", _ANTHROPIC),
    _claude("OAuth", {"CLAUDE_CODE_OAUTH_TOKEN": "sk-ant-oat01-not-real"}),
    _claude("API key, 36 MCP tools", _ANTHROPIC, "--mcp-config", "mcp.json", files={"mcp.json": _servers()}),
    _claude("API key, Unix socket", _ANTHROPIC, sidecar=("--socket",)),
    _codex("API key", {"auth_mode": "apikey", "OPENAI_API_KEY": "sk-not-real"}),
    _codex("ChatGPT login", CHATGPT),
    _opencode("Anthropic", "anthropic/claude-sonnet-4-5", _ANTHROPIC),
    _opencode("OpenAI", "openai/gpt-5", _OPENAI),
    _gemini(),
    _python("openai", "openai", _OPENAI),
    _python("anthropic", "anthropic", _ANTHROPIC),
    _python("openai-agents", "agents", _OPENAI),
    _python("langchain-openai", "langchain_openai", _OPENAI),
    _python("google-genai", "google.genai", {"GEMINI_API_KEY": "AIza-not-real"}),
    _python("pydantic-ai-slim", "pydantic_ai", _OPENAI),
    _node("fetch"),
    _node("https"),
    _go(),
    _curl(),
)
TRANSPARENT = ("--mode", "transparent")
_REDIRECTED = (
    *("Claude Code, API key", "Codex, API key", "opencode, Anthropic", "Gemini CLI, API key", "`openai`, API key"),
    *("Node.js, `https`, API key", "Go, `net/http`, API key"),
)
PROFILES = (
    *_ONES,
    *(
        replace(one, mode=f"{one.mode}, transparent", sidecar=TRANSPARENT)
        for one in _ONES
        if f"{one.client}, {one.mode}" in _REDIRECTED
    ),
)
