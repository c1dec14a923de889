"""Files of `[tls]` and of upstreams that cannot be used, which change of them is taken and when, and clients that must
show a certificate of `client_ca`."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
from fakes.certificates import DAY, Authority, serial
from fakes.pages import blocks
from fakes.process import ROOT, running
from fakes.raw import connect, get
from fakes.rig import Within

from penstock.gateway.app import Gateway
from penstock.gateway.client.client import Client
from penstock.gateway.client.connection import ClientError
from penstock.gateway.config import ConfigError, GatewayConfig, UpstreamSettings
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.settings import TlsSettings
from penstock.gateway.process.listeners import ServerTls
from penstock.gateway.traffic.upstreams.pool import make_transport
from penstock.sidecar.intercept.egress import EgressConnector, ProxyTimeouts, RolloutBinding
from penstock.sidecar.run.agent.helper import EVENTS, _post


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def _as_the_page_says(folder: Path) -> None:
    made = next(block for block in blocks(ROOT / "docs" / "tls.md") if "openssl req" in block.text)
    subprocess.run(["bash", "-euc", made.text], cwd=folder, check=True, capture_output=True)


@pytest.mark.slow
async def test_the_authority_of_the_page_is_trusted_by_who_goes_by_the_letter(tmp_path: Path) -> None:
    """As Python does from 3.13 on."""
    await asyncio.to_thread(_as_the_page_says, tmp_path)
    strict = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    strict.verify_flags |= ssl.VERIFY_X509_STRICT
    files = f'certificate = "{tmp_path}/cert.pem"\nkey = "{tmp_path}/key.pem"\n'
    async with running(tmp_path / "gateway", f"[tls]\n{files}", tls=strict) as gateway:
        assert gateway.url.startswith("https://")


WRONG = [
    ("nowhere.pem", None, r"tls\.certificate '.*nowhere\.pem' cannot be read: No such file or directory"),
    ("", None, r"tls\.certificate '.*' cannot be read: Is a directory"),
    ("text", None, r"tls\.certificate '.*text' holds no certificate in PEM, which begins with -----BEGIN CERTIFICATE"),
    ("cut", "good", r"tls\.certificate '.*cut' with tls\.key '.*good' cannot be used: "),
    ("ca.pem", None, r"tls\.certificate '.*ca\.pem' holds no private key: name its file as tls\.key"),
    ("good", "nowhere", r"tls\.key '.*nowhere' cannot be read: No such file or directory"),
    ("good", "ca.pem", r"tls\.key '.*ca\.pem' holds no private key in PEM"),
    ("good", "other.pem", r"tls\.key '.*other\.pem': the private key does not belong to the certificate .*good"),
    ("good", "rsa.pem", r"tls\.key '.*rsa\.pem': the private key does not belong to the certificate .*good"),
    ("hidden.pem", None, r"tls\.certificate '.*hidden\.pem': the private key is encrypted, .* `openssl pkey -in KEY"),
]


@pytest.mark.parametrize(("certificate", "key", "why"), WRONG)
def test_files_that_cannot_be_used(
    authority: Authority, tmp_path: Path, certificate: str, key: str | None, why: str
) -> None:
    shutil.copy(authority.issue("mine"), tmp_path / "good")
    authority.issue("other")
    authority.issue("rsa", of_rsa=True)
    authority.issue("hidden", passphrase=b"open sesame")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "cut").write_bytes((tmp_path / "good").read_bytes()[:-200])
    tls: dict[str, object] = {"certificate": tmp_path / certificate}
    given = tls if key is None else tls | {"key": tmp_path / key}
    with pytest.raises(ConfigError, match=why) as caught:
        _ = Gateway(GatewayConfig.model_validate({"data": tmp_path / "data", "tls": given}))
    assert "PRIVATE KEY" not in str(caught.value)
    assert not (tmp_path / "data").exists()
    # An upstream's are looked at in the same way.
    shown = {"client_cert": str(tmp_path / certificate)} | ({} if key is None else {"client_key": str(tmp_path / key)})
    for ours, its in ((r"as tls\.key", "as client_key"), (r"tls\.certificate", "upstream 'up': client_cert")):
        why = why.replace(ours, its)
    with pytest.raises(ConfigError, match=why.replace(r"tls\.key", "upstream 'up': client_key")):
        _ = make_transport(UpstreamSettings.model_validate({"name": "up", "base_url": "https://localhost"} | shown))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"base_url": "http://h", "client_cert": ""}, "client_cert does nothing: base_url is not https://"),
        ({"base_url": "https://h", "client_key": ""}, "client_key does nothing: client_cert is missing"),
    ],
)
def test_a_certificate_that_nothing_shows_is_refused(authority: Authority, given: dict[str, str], why: str) -> None:
    pem = str(authority.issue("mine"))
    with pytest.raises(ConfigError, match=f"upstream 'up': {why}"):
        _ = make_transport(
            UpstreamSettings.model_validate({"name": "up", **{key: value or pem for key, value in given.items()}})
        )


@pytest.mark.parametrize(
    ("text", "why"), [("hello", "holds no certificate"), ("-----BEGIN CERTIFICATE-----\nMIIB\n", "cannot be used: ")]
)
def test_authorities_that_cannot_be_used(authority: Authority, tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "text").write_text(text)
    with pytest.raises(ConfigError, match=rf"tls\.client_ca '.*text' {why}"):
        _ = server(TlsSettings(certificate=authority.issue("mine"), client_ca=tmp_path / "text"))


def server(tls: TlsSettings, metrics: Metrics | None = None) -> ServerTls:
    assert tls.certificate is not None
    return ServerTls(tls, tls.certificate, metrics or Metrics())


@pytest.mark.parametrize(
    ("begins_in", "ends_in", "said"),
    [(-2 * DAY, -DAY, ["expired at 20"]), (DAY, 2 * DAY, ["is not valid before 20"]), (-DAY, DAY, [])],
)
def test_out_of_its_time(
    authority: Authority, begins_in: timedelta, ends_in: timedelta, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    pem, metrics = authority.issue("mine", begins_in=begins_in, ends_in=ends_in), Metrics()
    _ = server(TlsSettings(certificate=pem), metrics)
    assert metrics.certificate_expires_timestamp_seconds > 0
    assert [one for one in said if one in caplog.text] == said
    assert len(caplog.records) == len(said)


def test_which_change_is_taken(authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    mine, metrics = tmp_path / "mine", Metrics()
    shutil.copy(authority.issue("first"), mine)
    tls = server(TlsSettings(certificate=mine), metrics)
    first, until = tls._current, metrics.certificate_expires_timestamp_seconds
    tls._look()
    assert not caplog.records
    # Half of a file that is being written: the first look does not judge it.
    second = authority.issue("second", ends_in=7 * DAY).read_bytes()
    mine.write_bytes(second[:300])
    tls._look()
    mine.write_bytes(second)
    tls._look()
    assert tls._current is first
    assert not caplog.records
    tls._look()
    assert tls._current is not first
    assert metrics.certificate_expires_timestamp_seconds > until
    current = tls._current
    for wrong, why in (
        (None, "cannot be read: No such file"),
        (b"hello", "holds no certificate"),
        (authority.issue("old", ends_in=-DAY).read_bytes(), "expired at 20"),
    ):
        caplog.clear()
        mine.unlink(missing_ok=True)
        if wrong is not None:
            mine.write_bytes(wrong)
        for _ in range(4):
            tls._look()
        (one,) = caplog.messages
        assert "cannot be used; the old certificate stays: " in one
        assert why in one
        assert tls._current is current
    mine.write_bytes(second)
    tls._look()
    tls._look()
    assert tls._current is not current


async def test_clients_must_show_a_certificate(
    authority: Authority, tmp_path: Path, within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, by the event loop of asyncio."""
    ca = tmp_path / "clients.pem"
    shutil.copy(authority.file, ca)
    others = Authority(tmp_path, "others")
    stranger = others.issue("stranger")
    mine, old = authority.issue("mine"), authority.issue("old", ends_in=-DAY)
    pem = authority.issue("gateway")
    async with within(tls={"certificate": pem, "client_ca": ca}) as rig:
        url = rig.base.url.replace("http://127.0.0.1", "https://localhost")
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        for shown, why in (
            (None, "it asks for a client certificate; PENSTOCK_CLIENT_CERT names the PEM file"),
            (stranger, "alert unknown ca"),
            (old, "alert certificate expired"),
            (tmp_path / "none", "PENSTOCK_CLIENT_CERT '.*none': No such file or directory"),
            (authority.issue("hidden", passphrase=b"open sesame"), "PENSTOCK_CLIENT_CERT .*: the private key is encr"),
        ):
            monkeypatch.delenv("PENSTOCK_CLIENT_CERT", raising=False)
            if shown is not None:
                monkeypatch.setenv("PENSTOCK_CLIENT_CERT", str(shown))
            with pytest.raises(ClientError, match=why):
                await workers(url)
        monkeypatch.setenv("PENSTOCK_CLIENT_CERT", str(mine))
        await workers(url)
        # So do an agent's helper and a sidecar.
        home = (f"{url}/rollout/r1/attempt/a1", "")
        await asyncio.to_thread(_post, home, EVENTS, {"events": [{"name": "hello"}]})
        ways = EgressConnector(url, ProxyTimeouts(), set())
        ways.bind(RolloutBinding((("x-rollout-id", "r1"),)))
        port = rig.base.listener.getsockname()[1]
        assert await ways.problem("127.0.0.1", port) is None
        # The Unix socket, by which the gateway's own tools ask it, has no TLS.
        own = rig.gateway._listening.own_url
        assert own.startswith("unix:/")
        await workers(own)
        # What the port itself shows is the certificate; who is let in changes too.
        shutil.copy(others.file, ca)
        tls = rig.gateway._tls
        assert tls is not None
        tls._look()
        tls._look()
        with pytest.raises(ClientError, match="alert unknown ca"):
            await workers(url)
        async with connect(url, authority.client(stranger)) as client:
            assert client.transport.get_extra_info("peercert")["serialNumber"] == serial(pem)
            client.send(get("/readyz", host="localhost"))
            await client.until(b"HTTP/1.1 200 ")
    with pytest.raises(ClientError, match="nothing answers there"):
        await workers(own)


async def workers(url: str) -> None:
    async with Client(url) as client:
        assert await client.workers() == []
