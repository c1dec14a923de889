"""Writes a lake until it is killed: `python -m fakes.lake_writer TAPE TO`; says `step` for each chunk, then `done`."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.gateway.followers.lake.lake import Lake
from penstock.gateway.followers.lake.location import LakeLocation
from penstock.gateway.model.prices import Prices
from penstock.gateway.tape.store import Store


def main() -> None:
    with Store(Path(sys.argv[1]), readonly=True) as store:
        lake = Lake(store, LakeLocation(sys.argv[2]), Prices(), bodies=True, rows=20)
        while lake.step() is not None:
            print("step", flush=True)
        print("done", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
