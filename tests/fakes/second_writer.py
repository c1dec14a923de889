"""A second process that writes tapes (`Second`), order by order. `tape PATH` opens one, whoever holds its lock.
`open NAME` and `call NAME` write a call of this rollout, running or finished, `end NAME` ends one that it has open,
`version NAME` registers one of this prompt, `seen NAME` notes a sign of life of its attempt, of which the log does not
tell: the answer is its cursor."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

from fakes.entries import call, finish, running
from fakes.forkserver import forking

from penstock.gateway.app import open_store
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.releases.operations import ReleaseOperations
from penstock.gateway.tape.store import Store, records
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import QueuedOperation, Transaction


class Second:
    """The other process."""

    def __init__(self) -> None:
        forks = forking("fakes.second_writer", "fakes.crashing", "fakes.forked")
        self._orders, orders = forks.Pipe()
        self._process = forks.Process(target=serve, args=(orders,))
        self._process.start()
        orders.close()

    @property
    def ended(self) -> bool:
        """Whether it was killed."""
        return self._process.exitcode is not None

    def does(self, what: str, name: str | Path) -> str:
        """Its answer."""
        self._orders.send((what, str(name)))
        return self._orders.recv()

    def end(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.join()
        self._orders.close()


def _see(transaction: Transaction, name: str) -> None:
    live = transaction.attempt(SpanEntry(name, "a1"))
    live.values[records.ATTEMPT.index("last_seen_ns")] += 1
    transaction.touch(live)


def serve(orders: Connection) -> None:
    """Until it is killed."""
    under_way: dict[str, SpanEntry] = {}
    store: Store | None = None
    while True:
        what, name = orders.recv()
        if what == "tape":
            if store is not None:
                store.close()
            under_way.clear()
            store = open_store(Path(name), lock=os.open(os.devnull, os.O_RDONLY))
            orders.send("ready")
            continue
        assert store is not None
        if what == "version":
            new = NewVersion(kind="prompt", content={"text": "Be brief."})
            task = QueuedOperation(
                lambda transaction, name=name, new=new: ReleaseOperations(transaction).add_version(name, new, 0)
            )
            orders.send(str(store.write([task])))
            continue
        if what == "seen":
            orders.send(str(store.write([QueuedOperation(lambda transaction, name=name: _see(transaction, name))])))
            continue
        if what == "open":
            entry = under_way[name] = running(name, request=name.encode() * 50)
        else:
            entry = finish(under_way.pop(name)) if what == "end" else call(name, request=name.encode() * 50)
        orders.send(str(store.write([entry])))
