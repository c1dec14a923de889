"""Outputs that pages show: compared with what was printed, less what differs from run to run.

`UPDATE_GOLDENS=1` writes them anew; read the difference before committing it.
"""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser

from fakes.pages import Block

UNSTEADY = {
    r"\b\d[\d,]*(\.\d+)? (µs|ms|s|m|h|d)\b( \d+ (s|m|h)\b)?( ago\b)?|\bnow[ \t]*$": "TIME",
    r"[ \t]+": " ",
    r" $": "",
}
"""What differs from run to run, and what stands in its place when outputs are compared."""
LEFT_OUT = re.compile(r"^…\n", re.MULTILINE)
"""A line of a shown output that stands for any number of lines."""


def steady(text: str) -> str:
    """An output without what differs from run to run."""
    for pattern, instead in UNSTEADY.items():
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text.strip("\n") + "\n"


def show_anew(block: Block, printed: str) -> None:
    """Write what was printed into the page, where that is another text."""
    if steady(printed) == steady(block.text):
        return
    text, shown = block.page.read_text(encoding="utf-8"), f"```\n{block.text}```\n"
    assert text.count(shown) == 1, f"{block.place} is not the only block with this text"
    lines = [line.rstrip() + "\n" for line in printed.strip("\n").splitlines()]
    block.page.write_text(text.replace(shown, f"```\n{''.join(lines)}```\n"), encoding="utf-8")


def compare(block: Block, printed: str) -> None:
    """A page shows what was printed."""
    pieces = LEFT_OUT.split(steady(block.text))
    if os.environ.get("UPDATE_GOLDENS") and len(pieces) == 1:
        show_anew(block, printed)
    elif len(pieces) == 1:
        assert steady(printed) == steady(block.text), f"{block.place} shows something else than: {printed}"
    else:
        shown = "(?:.*\n)*".join(map(re.escape, pieces))
        assert re.fullmatch(shown, steady(printed)), f"{block.place} does not show this: {printed}"


class Outline(HTMLParser):
    """Tags with their attributes' names, and the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[str]]] = []
        self.said: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, [name for name, _ in attrs]))

    def handle_data(self, data: str) -> None:
        self.said.append(data)
