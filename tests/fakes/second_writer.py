"""A second process that writes tapes: `python second_writer.py`. It does one order a line from stdin, and answers each
with a line. `tape PATH` opens one, whoever holds its lock. `open NAME` and `call NAME` write a call of this rollout,
running or finished, `end NAME` ends one that it has open, `version NAME` registers one of this prompt, `seen NAME`
notes a sign of life of its attempt, of which the log does not tell: the answer is its cursor. `Second` is that process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fakes.entries import call, finish, running
from fakes.process import PATHS

from penstock.gateway.app import open_store
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.releases.operations import ReleaseOperations
from penstock.gateway.store import Store, records
from penstock.gateway.store.operation import Task
from penstock.gateway.store.records import Entry
from penstock.gateway.store.transaction import Transaction


class Second:
    """The other process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": PATHS},
        )

    def does(self, what: str, name: str | Path) -> str:
        """Its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what} {name}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.communicate()


def _see(transaction: Transaction, name: str) -> None:
    live = transaction.attempt(Entry(name, "a1"))
    live.values[records.ATTEMPT.index("last_seen_ns")] += 1
    transaction.touch(live)


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
        if what == "version":
            new = NewVersion(kind="prompt", content={"text": "Be brief."})
            task = Task(
                lambda transaction, name=name, new=new: ReleaseOperations(transaction).add_version(name, new, 0)
            )
            print(store.write([task]), flush=True)
            continue
        if what == "seen":
            print(store.write([Task(lambda transaction, name=name: _see(transaction, name))]), flush=True)
            continue
        if what == "open":
            entry = under_way[name] = running(name, request=name.encode() * 50)
        else:
            entry = finish(under_way.pop(name)) if what == "end" else call(name, request=name.encode() * 50)
        print(store.write([entry]), flush=True)


if __name__ == "__main__":
    main()
