"""The page of the TUI in a real browser: it shows the terminal, takes keys, and asks nobody but us."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from fakes import environments
from fakes.process import gone
from fakes.tui_page import served

BROWSER = environments.folder("browser")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not environments.installed("browser"), reason="needs a browser: `make install-browser`"),
]


def fonts(home: Path) -> Path:
    """Tells the browser where its package unpacks its font; the file of the package knows one folder of all users."""
    path = home / "fonts.conf"
    path.write_text(f"<fontconfig><dir>{home}/fonts</dir><cachedir>{home}/font-cache</cachedir></fontconfig>")
    return path


async def test_the_page_shows_the_terminal_and_takes_keys(tmp_path: Path) -> None:
    async with served("overview") as page:
        process = await asyncio.create_subprocess_exec(
            *("node", "look.mjs", page.link, "Health", "?", "one row up"),
            cwd=BROWSER,
            # Its package has the libraries that a bare machine lacks, and unpacks them where it takes it for Lambda.
            env=os.environ
            | {"TMPDIR": str(tmp_path), "HOME": str(tmp_path), "AWS_LAMBDA_JS_RUNTIME": "nodejs20.x"}
            | {"FONTCONFIG_FILE": str(fonts(tmp_path))},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(90):
            told, complained = await process.communicate()
        assert process.returncode == 0, complained.decode()
        seen = json.loads(told)
        assert seen["errors"] == []
        assert seen["drawn"], "the terminal has drawn nothing"
        assert seen["url"] == f"{page.url}/", "the token is not in the address any more"
        ours = (page.url, page.url.replace("http", "ws", 1), "data:", "blob:")
        assert [url for url in seen["asked"] if not url.startswith(ours)] == []
        assert any(url.startswith(ours[1]) for url in seen["asked"])
        for pid in page.tabs():
            await gone(pid)
