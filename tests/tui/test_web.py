"""The page of the TUI lets in who has its link, once, and nobody else; its processes end with their tabs."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from fakes.process import PATIENCE, ROOT, command, gone
from fakes.tui_page import Served, served
from yarl import URL

from penstock.tui.web import MOST_TABS, STRANGER, USED

pytestmark = pytest.mark.slow

WS = "/ws?width=100&height=30"


@pytest.fixture
async def page() -> AsyncGenerator[Served]:
    async with served() as found:
        yield found


@pytest.fixture
async def browser() -> AsyncGenerator[aiohttp.ClientSession]:
    """Keeps cookies, also of an address."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as found:
        yield found


@asynccontextmanager
async def tab(browser: aiohttp.ClientSession, page: Served) -> AsyncGenerator[aiohttp.ClientWebSocketResponse]:
    """A tab, once the screen is there."""
    async with browser.ws_connect(page.url + WS, origin=page.url) as socket:
        await heard(socket, b"Overview")
        yield socket


async def heard(socket: aiohttp.ClientWebSocketResponse, wanted: bytes) -> None:
    """Waits until the screen says something."""
    told = b""
    async with asyncio.timeout(PATIENCE):
        while wanted not in told:
            message = await socket.receive()
            assert message.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT), message
            told += message.data if isinstance(message.data, bytes) else b""


async def test_the_link_works_once_and_the_cookie_from_then_on(page: Served, browser: aiohttp.ClientSession) -> None:
    async with browser.get(page.link) as answer:
        assert (answer.status, answer.url) == (200, URL(page.url + "/"))
        assert "textual-terminal" in await answer.text()
        assert "fonts.googleapis" not in await answer.text()
        assert '<link rel="icon" href="data:image/svg+xml,' in await answer.text()
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    cookie = next(iter(browser.cookie_jar))
    assert (cookie["httponly"], cookie["samesite"]) == (True, "Strict")
    assert cookie.value not in page.link
    async with browser.get(page.url + "/static/js/textual.js") as answer:
        assert answer.status == 200
    async with aiohttp.ClientSession() as another, another.get(page.link) as answer:
        assert (answer.status, await answer.text()) == (403, f"{USED}\n")


@pytest.mark.parametrize("path", ["/", "/?token=guessed", "/static/js/textual.js", "/download/x", WS, "/nothing"])
async def test_nothing_opens_without_the_cookie(page: Served, path: str) -> None:
    async with aiohttp.ClientSession() as stranger, stranger.get(page.url + path) as answer:
        assert (answer.status, await answer.text()) == (403, f"{STRANGER}\n")
    assert page.tabs() == []


async def test_looking_at_the_link_and_odd_bytes_do_no_harm(page: Served) -> None:
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as stranger:
        async with stranger.head(page.link) as answer:
            assert answer.status == 403
        for path, cookie in (("/", "\udcff"), ("/?token=%FF%00", "x"), ("/?token=%F0%9F%94%91", "x")):
            headers = {"Cookie": f"penstock_tui_{URL(page.url).port}={cookie}"}
            async with stranger.get(URL(page.url + path, encoded=True), headers=headers) as answer:
                assert (answer.status, await answer.text()) == (403, f"{STRANGER}\n")
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        async with stranger.get(page.link, allow_redirects=False) as answer:
            assert answer.status == 303, "the link still works"


async def test_other_names_origins_and_methods_are_refused(page: Served, browser: aiohttp.ClientSession) -> None:
    async with browser.get(page.link):
        pass
    port = URL(page.url).port
    for host in (f"evil.example:{port}", f"localhost:{port}", "127.0.0.1"):
        async with browser.get(page.url, headers={"Host": host}) as answer:
            assert answer.status == 421
    async with browser.post(page.url) as answer:
        assert answer.status == 405
    for origin in (None, "http://evil.example", f"http://localhost:{port}"):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await browser.ws_connect(page.url + WS, origin=origin)
        assert refused.value.status == 403
    assert page.tabs() == []


async def test_a_tab_is_a_process_that_changes_nothing_and_ends_with_it(
    page: Served, browser: aiohttp.ClientSession
) -> None:
    async with browser.get(page.link):
        pass
    async with tab(browser, page) as socket:
        tabs = page.tabs()
        assert any(b"--read-only" in command(pid) for pid in tabs)
        await socket.send_json(["stdin", "?"])
        await heard(socket, b"one row up")
    for pid in tabs:
        await gone(pid)


async def test_only_so_many_tabs_are_open_at_a_time(page: Served, browser: aiohttp.ClientSession) -> None:
    async with browser.get(page.link):
        pass
    sockets = [await browser.ws_connect(page.url + WS, origin=page.url) for _ in range(MOST_TABS)]
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await browser.ws_connect(page.url + WS, origin=page.url)
    assert refused.value.status == 503
    for socket in sockets:
        await socket.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_tabs_end_with_the_server_however_it_ends(number: signal.Signals) -> None:
    async with served() as page, aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
        async with browser.get(page.link):
            pass
        async with tab(browser, page):
            tabs = page.tabs()
            assert tabs
            page.process.send_signal(number)
            await page.process.wait()
            for pid in tabs:
                await gone(pid)


async def test_the_key_is_in_no_command_and_in_nothing_that_is_said() -> None:
    async with served(PENSTOCK_ADMIN_KEY="the-secret-key") as page:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
            async with browser.get(page.link) as answer:
                assert "the-secret-key" not in await answer.text()
            async with tab(browser, page):
                assert not any(b"the-secret-key" in command(pid) for pid in page.tabs())
        page.process.terminate()
        told, complained = await page.process.communicate()
    assert b"the-secret-key" not in told + complained
    assert page.link.encode() not in told + complained, "it is printed once"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "70000", "--web"], 'Invalid value "70000" for --port. Must be <= 65535.'),
        (["--writes"], "--writes goes with --web"),
        (["--web", "--plain"], "--web does not go with --plain"),
        (["--web", "no-such-screen"], "there is no screen 'no-such-screen'"),
    ],
)
def test_what_does_not_go_together_is_said(options: list[str], said: str) -> None:
    started = [sys.executable, "-m", "penstock", "tui", *options]
    done = subprocess.run(started, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
