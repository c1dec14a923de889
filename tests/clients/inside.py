"""A session of an agent: without anything, behind a plain HTTPS proxy, and behind `penstock sidecar`. The names of its
hosts are ours.

    python -m clients.inside ID

runs itself anew in namespaces of its own (user, network, files): there is no network but this machine's, names are
looked up in a hosts file, and port 443 may be listened on. No rights are needed for it. It prints what came, as JSON.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from clients.hosts import ADDRESS, Asked, Hosts, first_party, names, plain_proxy
from clients.profiles import PROFILES, Profile
from fakes import alone
from fakes.process import PATHS, Gateway, running
from fakes.tape import Tape

from penstock.sidecar.intercept import session
from penstock.sidecar.intercept.rules import HINTS, HOSTS

_PATIENCE = 120.0


class SessionError(Exception):
    """A session that failed."""


def measure(profile: Profile, path: str) -> dict[str, Any]:
    """The requests of the sessions `direct`, `proxied` and `behind`, and `calls`: what the tape has of the last;
    `lost`: what the doctor says of Claude Code behind the sidecar, and with a base URL. `path`: where programs are."""
    return alone.run("clients.inside", str(PROFILES.index(profile)), PATH=path)


@dataclass
class Session:
    """A place for sessions."""

    profile: Profile
    folder: Path
    hosts: Hosts
    gateway: Gateway
    proxy: int
    """Port of a proxy that looks at nothing."""

    async def run(self, how: str) -> list[Asked]:
        """One session; what the model hosts were asked."""
        home, work = self.folder / "home", self.folder / "work"
        for place in (home, work):
            shutil.rmtree(place, ignore_errors=True)
        for name, text in {"note.txt": "a note\n", **self.profile.files}.items():
            place = (home if name.startswith(".") else work) / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        home.mkdir(exist_ok=True)
        command, bundle, own = self.profile.command, *session.write(self.folder, self.hosts.authority.pem)
        env = self._env(home)
        if how == "behind":
            place = (sys.executable, "-m", "penstock", "sidecar", "--gateway", self.gateway.url)
            command = (*place, "--rollout", "r1", *self.profile.sidecar, "--", *command)
            env |= {"SSL_CERT_FILE": str(bundle)}  # as a machine has it that trusts the hosts
        else:
            env |= session.variables(bundle, own, self.proxy, ())
        if how == "based":
            env |= {"ANTHROPIC_BASE_URL": self.gateway.address("b1")}
        if how in ("direct", "based"):
            env = {name: value for name, value in env.items() if "proxy" not in name.lower()}
        self.hosts.asked = []
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=work,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), _PATIENCE)
        said = out.decode(errors="replace") + err.decode(errors="replace")
        if process.returncode != 0 or "All is done" not in said:
            asked = "\n".join(f"{one.host} {one.head[:80]!r}" for one in self.hosts.asked)
            raise SessionError(f"{how}: it ended with {process.returncode} and {said[-3000:]}\n{asked}")
        return [one for one in self.hosts.asked if one.host in HOSTS]

    def _env(self, home: Path) -> dict[str, str]:
        path = os.environ.get("PATH", os.defpath)
        own = {"HOME": str(home), "PATH": path, "LANG": "C.UTF-8", "PYTHONPATH": PATHS, "TZ": "UTC", **HINTS}
        return own | {"TMPDIR": str(self.folder)} | self.profile.env


def _config(authority: Path) -> str:
    made = {"openai": ("api.openai.com/v1", "openai"), "anthropic": ("api.anthropic.com", "anthropic")}
    made |= {
        "google": ("generativelanguage.googleapis.com", "gemini"),
        "chatgpt": ("chatgpt.com/backend-api/codex", "chatgpt"),
    }
    return "".join(
        f'[[upstream]]\nname = "{name}"\nbase_url = "https://{url}"\ndialect = "{dialect}"\nca_file = "{authority}"\n'
        for name, (url, dialect) in made.items()
    )


async def sessions(profile: Profile, folder: Path) -> dict[str, Any]:
    """Both, in the namespaces."""
    authority = folder / "first-party.pem"
    async with first_party(authority) as hosts, plain_proxy() as proxy, running(folder, _config(authority)) as gateway:
        session = Session(profile, folder, hosts, gateway, proxy)
        found: dict[str, Any] = {how: _shown(await session.run(how)) for how in ("direct", "proxied", "behind")}
        lost: dict[str, list[str]] = {}
        async with aiohttp.ClientSession() as http:
            tape = Tape(gateway.url, http)
            await tape.written()
            spans = await tape.when("r1", "a1", lambda spans: len(spans) > 0)
            if profile.client == "Claude Code" and not profile.sidecar:
                _ = await session.run("based")
                _ = await tape.when("b1", "a1", lambda spans: len(spans) > 2)
                lost = {rollout: await _lost(tape, rollout) for rollout in ("r1", "b1")}
    return found | {"calls": [str(span.dialect) for span in spans if span.kind == "llm"], "lost": lost}


async def _lost(tape: Tape, rollout: str) -> list[str]:
    """What the doctor says that the agent has lost to a base URL."""
    told = await tape.get(f"/api/rollouts/{rollout}/diagnosis")
    codes = [one["code"] for attempt in told["attempts"] for one in attempt["findings"]]
    return [code for code in codes if code in ("base_url", "inlined_tools", "no_websocket")]


def _shown(asked: list[Asked]) -> list[dict[str, str]]:
    return [
        {"host": one.host, "head": one.head.decode("latin-1"), "body": base64.b64encode(one.body).decode()}
        for one in asked
    ]


def _inside(profile: Profile) -> None:
    alone.loopback_up()
    alone.take(ADDRESS)
    with tempfile.TemporaryDirectory(prefix="penstock-clients-") as folder:
        alone.know(Path(folder), names())
        found = asyncio.run(sessions(profile, Path(folder)))
    print(json.dumps(found))


if __name__ == "__main__":
    _inside(PROFILES[int(sys.argv[1])])
