"""The steps of the Dockerfile, run in a clean Debian, and what they make, started as a container would start it.

No container engine is needed: see `fakes.dockerfile`. The trainer's steps are not run, because torch is large.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import time
import tomllib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import yaml
from deploy.test_locks import installed
from fakes.debian import Mounts, NoDebian, bookworm, entered, missing
from fakes.dockerfile import Builder, Image, megabytes, read
from fakes.ports import steady_ports
from fakes.process import ROOT, upstreams
from fakes.provider import Provider
from fakes.tls_host import tls_host
from packaging.utils import canonicalize_name

KEY = "an-admin-key-of-a-test-1"
SECRET = "a-secret-of-the-runner"
SLIMMEST = 200
"""Megabytes that an image may add to its base."""

AGENT = """
import json, sys, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "19 x 23?"}]}).encode()
ask = urllib.request.Request(sys.argv[1], body, {"Content-Type": "application/json", "Authorization": "Bearer none"})
print(json.load(urllib.request.urlopen(ask))["choices"][0]["message"]["content"])
"""

pytestmark = [pytest.mark.skipif(missing() is not None, reason=missing() or ""), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Makes images of what lies here."""
    try:
        debian = bookworm()
    except NoDebian as why:
        pytest.skip(f"Debian's packages cannot be had here: {why}")
    return Builder(read(ROOT / "Dockerfile"), ROOT, debian, tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def gateway(builder: Builder, say: Callable[[str], None]) -> Image:
    return made(builder, "gateway", say)


@pytest.fixture(scope="module")
def sidecar(builder: Builder, say: Callable[[str], None]) -> Image:
    return made(builder, "sidecar", say)


def made(builder: Builder, name: str, say: Callable[[str], None]) -> Image:
    began = time.monotonic()
    image = builder.image(name)
    size, added = megabytes(image.root), megabytes(image.root) - megabytes(builder.base)
    say(f"{name}: {size} MB, {added} MB above its base, made in {time.monotonic() - began:.0f} s")
    assert added < SLIMMEST
    return image


def env(port: int) -> dict[str, str]:
    return {
        "PENSTOCK_ADMIN_KEY": KEY,
        "PENSTOCK_SIDECAR_TOKEN": SECRET,
        "PENSTOCK_GATEWAY": f"http://127.0.0.1:{port}",
    }


@contextmanager
def started(image: Image, home: Path, mounts: Mounts, *words: str, env: Mapping[str, str]) -> Generator[str]:
    """The first line that it prints. At its end the signal that the image names has ended it well."""
    assert image.stopsignal == "SIGTERM"
    log = home / "log"
    process = image.start(*words, mounts=mounts, log=log, env=env)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, log.read_text()
        assert identity(process.pid) == {("10001",) * 4}
        yield line
    finally:
        process.terminate()
        code = process.wait(30)
        process.stdout.close()
    assert code == 0, log.read_text()


def identity(pid: int) -> set[tuple[str, ...]]:
    """Users and groups of a process, and one more where it has a capability."""
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    found = {tuple(status[key].split()) for key in ("Uid", "Gid")}
    return found if int(status["CapEff"], 16) == 0 else {*found, (status["CapEff"],)}


def healthy(image: Image, port: int, mounts: Mounts) -> str:
    """What the image's own check prints, for another port than the image's; AssertionError where it fails."""
    assert image.healthcheck is not None
    *words, _, path = image.healthcheck
    return image.run(*words, str(port), path, mounts=mounts)


async def test_a_gateway_serves_and_records_as_a_container(
    gateway: Image, provider: Provider, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    (port,) = steady_ports(1)
    config = tmp_path / "config"
    config.mkdir()
    (config / "penstock.toml").write_text(upstreams(openai=provider.openai_url))
    mounts = gateway.mounts(tmp_path / "volumes", {"/etc/penstock": config})
    with started(gateway, tmp_path, mounts, "--port", str(port), env=env(port)) as line:
        assert line == f"penstock listening on http://0.0.0.0:{port}\n"
        healthy(gateway, port, mounts)
        token = gateway.run("penstock", "token", "r1", env=env(port), mounts=mounts).split()[-1]
        url = f"http://127.0.0.1:{port}/rollout/r1/attempt/a1/v1/chat/completions"
        asked = {"model": "m", "messages": [{"role": "user", "content": "2 + 2?"}]}
        async with http.post(url, json=asked, headers={"Authorization": f"Bearer {token}"}) as answer:
            assert answer.status == 200
            await answer.read()
        assert "r1  running  1 model call" in gateway.run("penstock", "show", "r1", env=env(port), mounts=mounts)
    assert (tmp_path / "volumes" / "data" / "tape").is_dir()
    with pytest.raises(AssertionError, match=f"port {port}: "):
        healthy(gateway, port, mounts)


def test_a_gateway_without_its_key_does_not_start(gateway: Image, tmp_path: Path) -> None:
    process = gateway.start("--port", "0", mounts=gateway.mounts(tmp_path / "volumes"), log=tmp_path / "log")
    assert process.communicate(timeout=30) == ("", None)
    assert process.returncode != 0
    assert "PENSTOCK_ADMIN_KEY" in (tmp_path / "log").read_text()


def test_a_sidecar_serves_as_a_container(gateway: Image, sidecar: Image, tmp_path: Path) -> None:
    port, first, admin = steady_ports(3)
    volumes = tmp_path / "volumes"
    words = ("--port", str(first), "--admin", f"127.0.0.1:{admin}")
    with started(sidecar, tmp_path, sidecar.mounts(volumes), *words, env=env(port)) as line:
        assert line == f"agents on {first}; rollouts at 127.0.0.1:{admin}\n"
        with pytest.raises(AssertionError, match=r"503: the gateway .* cannot be reached"):
            healthy(sidecar, admin, sidecar.mounts(volumes))
        behind = started(gateway, tmp_path, gateway.mounts(volumes), "--port", str(port), env=env(port))
        with behind:
            healthy(sidecar, admin, sidecar.mounts(volumes))
    files = {path.name: oct(path.stat().st_mode)[-3:] for path in (volumes / "run-penstock").iterdir()}
    assert files == {"ca-bundle.pem": "644", "penstock-ca.pem": "644", "agent-1.env": "644"}


def test_a_sidecar_is_not_ready_while_nothing_is_redirected_to_it(sidecar: Image, tmp_path: Path) -> None:
    """The probe of the transparent mode, where the init container has not run: no agent may start."""
    first, admin = steady_ports(2)
    words = ("--mode", "transparent", "--fail", "open", "--port", str(first), "--admin", f"127.0.0.1:{admin}")
    mounts = sidecar.mounts(tmp_path / "volumes")
    with (
        started(sidecar, tmp_path, mounts, *words, env=env(first)),
        pytest.raises(AssertionError, match="503: connections of agents do not get here"),
    ):
        healthy(sidecar, admin, mounts)


def test_images_hold_what_they_need_and_no_tools(gateway: Image, sidecar: Image) -> None:
    for image in (gateway, sidecar):
        assert list(image.inside("/opt/penstock").glob("lib/*/site-packages/pip*")) == []
        assert not any(image.inside(f"/usr/bin/{tool}").exists() for tool in ("pip", "pip3", "gcc", "curl"))
        assert list(image.inside("/opt/penstock").rglob("penstock/gateway/__pycache__/app*.pyc")) != []
        assert (image.user, image.entrypoint) == ("10001:10001", ["penstock"])
        assert "org.opencontainers.image.title" in image.labels
        with pytest.raises(AssertionError, match="Read-only file system"):
            image.run("touch", "/opt/penstock/written", mounts=Mounts(read_only=True))
    assert not gateway.inside("/usr/sbin/nft").exists()
    assert sidecar.inside("/usr/sbin/nft").exists()
    assert gateway.ports == ["4747"]
    assert gateway.healthcheck is not None
    assert gateway.healthcheck[-2] == gateway.ports[0]


def test_an_image_lists_what_the_locks_have(gateway: Image, sidecar: Image) -> None:
    wanted = {
        **installed("gateway"),
        "penstock-gateway": tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"],
    }
    for image in (gateway, sidecar):
        bom = json.loads(image.inside("/opt/penstock/sbom.cdx.json").read_text())
        assert (bom["bomFormat"], bom["metadata"]["component"]["name"]) == ("CycloneDX", "penstock-gateway")
        listed = {
            canonicalize_name(one["name"]): one["version"] for one in [*bom["components"], bom["metadata"]["component"]]
        }
        assert listed == wanted


async def test_calls_of_an_agent_beside_its_sidecar_are_recorded(
    gateway: Image, sidecar: Image, tmp_path: Path
) -> None:
    """As compose.yaml and the manifests have it: three containers, the agent as a third one's user, who gets the files
    to read and none of the secrets."""
    port, first, admin = steady_ports(3)
    config = tmp_path / "config"
    config.mkdir()
    async with tls_host(config) as host:
        upstream = f'[[upstream]]\nname = "host"\nbase_url = "https://{host.name}/v1"\n'
        (config / "penstock.toml").write_text(upstream + f'ca_file = "/etc/penstock/{host.trust.name}"\n')
        served = gateway.mounts(tmp_path / "volumes", {"/etc/penstock": config})
        beside = sidecar.mounts(tmp_path / "volumes")
        place = (
            "--port",
            str(first),
            "--admin",
            f"127.0.0.1:{admin}",
            "--intercept",
            host.name,
            "--on-unknown",
            "deny",
        )
        with (
            started(gateway, tmp_path, served, "--port", str(port), env=env(port)),
            started(sidecar, tmp_path, beside, *place, env=env(port)),
        ):
            told = env(port)
            told["PENSTOCK_TOKEN"] = gateway.run("penstock", "token", "r1", env=told, mounts=served).strip()
            bind = ("penstock", "sidecar", "bind", str(first), "--rollout", "r1", "--admin", place[3])
            assert sidecar.run(*bind, env=told, mounts=beside) == f"port {first} has rollout r1\n"
            files = tmp_path / "volumes" / "run-penstock"
            variables = dict(line.split("=", 1) for line in (files / "agent-1.env").read_text().splitlines())
            agent = replace(sidecar, user="10002:10002")
            words = ("python3", "-c", AGENT, f"https://{host.name}/v1/chat/completions")
            assert await asyncio.to_thread(agent.run, *words, env=variables, mounts=beside) == "hello\n"
            assert "r1  running  1 model call" in gateway.run("penstock", "show", "r1", env=told, mounts=served)
    (asked,) = host.asked
    assert b"Authorization: Bearer none\r\n" in asked
    assert told["PENSTOCK_TOKEN"].encode() not in asked


def test_what_redirects_connections_needs_net_admin_and_no_more(sidecar: Image) -> None:
    """With the words and the rights of the overlay's init container, in a network of the test's own."""
    (job,) = yaml.safe_load_all((ROOT / "deploy/kubernetes/transparent/redirect.yaml").read_text())
    (redirect,) = job["spec"]["template"]["spec"]["initContainers"]
    assert redirect["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_ADMIN"]}
    words = ["penstock", *redirect["args"]]
    probe = redirected(sidecar, "-all,+net_admin", ["nft", "add", "table", "inet", "probe"])
    if probe.returncode != 0:
        pytest.skip(f"this kernel makes no tables of nftables: {probe.stdout}")
    assert "failed" in redirected(sidecar, "-all", words).stdout
    done = redirected(sidecar, "-all,+net_admin", words)
    assert done.returncode == 0, done.stdout
    assert "redirect to :8100" in done.stdout
    assert "meta skuid 10001 accept" in done.stdout


def redirected(image: Image, rights: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    """A command as root with these rights and none else, and the rules that there are after it."""
    limits = ["setpriv", "--bounding-set", rights, "--inh-caps", rights, "--no-new-privs"]
    inside = [*limits, "sh", "-c", f"{shlex.join(words)} && nft list ruleset"]
    command = ["unshare", "--net", *entered(image.root, inside, "0:0", "/", Mounts(read_only=True))]
    return subprocess.run(command, env=image.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
