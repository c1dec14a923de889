"""A second process that writes tapes: `python second_writer.py`. It does one order a line from stdin, and answers each
with a line. `tape PATH` opens one, whoever holds its lock. `open NAME` and `call NAME` write a call of this rollout,
running or finished, `end NAME` ends one that it has open: the answer is its cursor.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fakes.entries import call, finish, running

from penstock.gateway.app import open_store
from penstock.gateway.store import Store
from penstock.gateway.store.records import Entry


def main() -> None:
    """Until stdin ends."""
    under_way: dict[str, Entry] = {}
    store: Store | None = None
    for line in sys.stdin:
        what, name = line.split()
        if what == "tape":
            if store is not None:
                store.close()
            under_way.clear()
            store = open_store(Path(name), lock=os.open(os.devnull, os.O_RDONLY))
            print("ready", flush=True)
            continue
        assert store is not None
        if what == "open":
            entry = under_way[name] = running(name, request=name.encode() * 50)
        else:
            entry = finish(under_way.pop(name)) if what == "end" else call(name, request=name.encode() * 50)
        print(store.write([entry]), flush=True)


if __name__ == "__main__":
    main()
