"""Commands that need no running gateway: `serve`, which is one, and those that read a tape directly."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.gateway.client.console import Failure

DEFAULT_CONFIG = Path("penstock.toml")


def serve(
    *, config: Path | None = None, data: Path | None = None, host: str | None = None, port: int | None = None
) -> None:
    """Run the gateway.

    Parameters
    ----------
    config
        Configuration file; ./penstock.toml if there is one.
    data
        Directory of the tape; penstock-data if not configured.
    host
        Address to listen on; 127.0.0.1 if not configured.
    port
        Port to listen on; 4747 if not configured.
    """
    from penstock.gateway.app import run

    run(_config(config), data, host, port)


def check(*, data: Path | None = None) -> None:
    """Read every record of a tape and report what is not as it should be.

    Parameters
    ----------
    data
        Directory of the tape; the one that ./penstock.toml names if not given.
    """
    from penstock.gateway.cli.check import examine
    from penstock.gateway.config import ConfigError, load
    from penstock.gateway.store.directory import TapeError

    try:
        path = load(_config(None), data=data).data
        figures, problems = examine(path)
    except (ConfigError, TapeError, OSError) as e:
        raise Failure(str(e)) from None
    print(f"{path}: " + ", ".join(f"{name} {count:,}" for name, count in figures.items()))
    for problem in problems:
        print(problem)
    if problems:
        raise Failure(f"{path} is not clean: {len(problems):,} problems")
    print("clean")


def _config(given: Path | None) -> Path | None:
    """The configuration file: one that was named must exist, the default need not."""
    # Not Path.exists, which raises where this directory may not be read.
    return given or (DEFAULT_CONFIG if os.path.exists(DEFAULT_CONFIG) else None)
