"""`penstock lake`: writes the tape as tables of Parquet, in a directory or a bucket."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Annotated

from cyclopts import Parameter

from penstock.console.commands.serve import config_file
from penstock.gateway.client.console import CommandError, note, seconds

Bodies = Annotated[bool, Parameter(negative="")]
_NEEDS = ("deltalake", "pyarrow")


def lake(*, to: str, every: str | None = None, bodies: Bodies = False, data: Path | None = None) -> None:
    """Append what is new on a tape to tables of Parquet (Delta Lake), in a directory or in S3.

    It reads the tape directly, whether a gateway runs or not. Without --every it ends when everything is written.

    Parameters
    ----------
    to
        A directory, or s3://BUCKET/PREFIX with credentials in the variables of AWS.
    every
        Go on until interrupted, and look for what is new so often: 5m, 1h; 1s at least.
    bodies
        Write the bytes of requests and answers, too. A lake that has them goes on having them.
    data
        Directory of the tape; the one that ./penstock.toml names if not given.
    """
    pause = None if every is None else seconds("--every", every)
    if pause is not None and pause < 1:
        raise CommandError(f"--every: {every!r} is less than 1s, which is the least", 2)
    if missing := [name for name in _NEEDS if find_spec(name) is None]:
        raise CommandError(f"a lake needs {', '.join(missing)}: pip install 'penstock-gateway[lake]'")
    _run(to, pause, bodies, data)


def _run(to: str, pause: float | None, bodies: bool, data: Path | None) -> None:
    from penstock.console.commands.lake_loop import follow, write
    from penstock.gateway.config import ConfigError, load
    from penstock.gateway.followers.lake.lake import Lake
    from penstock.gateway.followers.lake.location import LakeLocation, LakeUnreachableError, LakeUnusableError
    from penstock.gateway.model.prices import Prices
    from penstock.gateway.tape.store import Store
    from penstock.gateway.tape.store.directory import TapeError

    def say(line: str) -> None:
        print(line, flush=True)

    stop = Event()

    def end(number: int, frame: object) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    try:
        config = load(config_file(None), data=data)
        with Store(config.data, readonly=True) as store:
            lake = Lake(store, LakeLocation(to), Prices(config.prices), bodies=bodies)
            if pause is None:
                write(lake, say, stop)
            else:
                follow(lake, pause, say, note, stop)
    except (ConfigError, TapeError, LakeUnusableError, LakeUnreachableError) as error:
        raise CommandError(str(error)) from None
