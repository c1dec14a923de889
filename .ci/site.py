"""What the site of the documentation (`mkdocs.yml`) has otherwise than GitHub: links to files outside docs/; diagrams,
which would need a script from elsewhere; and what is in an item of a numbered list, which wants another indentation."""

from __future__ import annotations

import logging
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
LINK = re.compile(r"(?<=\]\()\.\./[^)#\s]+")
ITEM = re.compile(r"^```.*?^```$|^   (?=[^ ])", re.MULTILINE | re.DOTALL)
"""A fenced block, or the indentation of a line."""
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MOVE = re.compile(r"^ *(\S+) --> (\w+)(?:: (.+))?$", re.MULTILINE)
# Warnings of these loggers fail a strict build.
log = logging.getLogger("mkdocs.hooks.site")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page as mkdocs shall read it."""
    place: str = page.file.src_uri

    def outside(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(place), link[0]))
        if path.startswith("docs/"):
            return link[0]
        if not (ROOT / path).exists():
            log.warning("%s: there is no file %s", place, path)
        return f"{REPOSITORY}/blob/main/{path}"

    linked = DIAGRAM.sub(lambda found: moves(found[1]), LINK.sub(outside, markdown))
    return ITEM.sub(lambda found: "    " if found[0].isspace() else found[0], linked)


def moves(diagram: str) -> str:
    """A diagram of states as a table of its moves."""
    rows = [f"| {one if one != '[*]' else 'new'} | {other} | {why} |" for one, other, why in MOVE.findall(diagram)]
    return "\n".join(["| from | to | when |", "|---|---|---|", *rows])
