"""The state of the index, for readers."""

from __future__ import annotations

from penstock.console.views.noun import NounSelection, NounView, only_row
from penstock.console.views.text import size
from penstock.gateway.model.index import IndexView


def index(view: IndexView, now_ns: int = 0) -> str:
    """The state of the index and how far it has read, in a few lines."""
    lines = [f"{view.status}: {view.reason}"]
    if view.status in ("ready", "reading"):
        share = 100 * view.cursor // view.newest if view.newest else 100
        lines.append(f"changes   {view.cursor:,} of {view.newest:,} ({share} %)")
        lines.append(f"files     {view.files:,}, {size(view.bytes)}; {view.unsealed:,} spans in memory")
        if view.forgotten:
            lines.append(f"forgotten {view.forgotten:,} rollouts are being taken out of its files")
    return "\n".join(lines)


INDEX = NounView[NounSelection, IndexView](
    "index", IndexView, only_row(lambda client: client.index()), lambda _: "index", whole=index, every_s=5.0
)
