"""The pictures of simulated releases."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from bench.releases import SHOWN, Ending, Tried, plots

OTHERS = {peer: 500 for peer in SHOWN.values() if peer is not None}


def test_each_picture_has_its_lines_and_its_axes(tmp_path: Path) -> None:
    beside = Tried([Ending("roll_back", 1000, 100, OTHERS), Ending("hold", 6000, 3000, OTHERS)])
    whole = Tried([Ending("promote", 2000, 1000), Ending("roll_back", 900, 90)])
    names = ("beside, equal", "beside, rewards drift by -30 %", "drop of 10 %")
    plots({**dict.fromkeys(names, beside), "whole, equal": whole, "whole, worse by the margin, 10 %": whole}, tmp_path)
    found = {path.stem: path.read_text() for path in tmp_path.iterdir()}
    assert found.keys() == {"canary-peers", "canary-drops", "canary-outcomes"}
    for made in found.values():
        said = [
            "".join(one.itertext()) for one in ElementTree.fromstring(made).iter("{http://www.w3.org/2000/svg}text")
        ]
        assert {"0 %", "100 %"} <= set(said)
    assert all(made.count(f">{name}<") == 2 for made in [found["canary-peers"]] for name in SHOWN)
    assert ">equal<" in found["canary-outcomes"]
    assert ">10 %<" in found["canary-outcomes"]
    share = {float(x): y for x, y in beside.curve()}
    assert (share[950.0], share[1000.0]) == (0.0, 0.5)
