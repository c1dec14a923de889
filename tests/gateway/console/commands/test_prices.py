"""`penstock prices` and `penstock prices update`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes.local import locally
from fakes.shell import Shell

from penstock.gateway.model.prices import Prices

pytestmark = pytest.mark.slow

OWN = 'as_of = 2026-01-01\n[[price]]\nmodel = "mine"\ninput = 1.0\noutput = 2.0\n'
ENTRY = {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6, "litellm_provider": "openai", "mode": "chat"}


async def test_a_list_is_updated_and_ones_own_rows_stay(tmp_path: Path) -> None:
    shell, target = Shell("http://127.0.0.1:9", tmp_path), tmp_path / "prices.toml"
    (tmp_path / "list.json").write_text(json.dumps({"mine": ENTRY | {"input_cost_per_token": 9e-6}, "new-1": ENTRY}))
    unnamed = await shell.run("prices", "update", "list.json")
    assert (unnamed.code, "--to" in unnamed.err) == (2, True)
    (tmp_path / "penstock.toml").write_text('prices = "prices.toml"\n')
    target.write_text(OWN)
    dry = await shell.run("prices", "update", "list.json", "--dry-run", "--as-of", "2026-11-29", "--json")
    assert dry.code == 0, dry.err
    assert [(one["model"], one["what"]) for one in map(json.loads, dry.text.splitlines())] == [
        ("mine", "kept"), ("new-1", "new"),
    ]  # fmt: skip
    assert target.read_text() == OWN
    done = await shell.run("prices", "update", "list.json", "--as-of", "2026-11-29")
    assert (done.code, "new-1" in done.text) == (0, True), done.err
    found = Prices(target)
    assert [(one.model, one.input) for one in found.file.price] == [("mine", 1.0), ("new-1", 1.0)]
    assert str(found.file.as_of) == "2026-11-29"


async def test_nonsense_changes_nothing(tmp_path: Path) -> None:
    shell, target = Shell("http://127.0.0.1:9", tmp_path), tmp_path / "prices.toml"
    target.write_text(OWN)
    (tmp_path / "list.json").write_text(json.dumps({"m": ENTRY | {"output_cost_per_token": "free"}}))
    wrong = await shell.run("prices", "update", "list.json", "--to", "prices.toml")
    assert (wrong.code, "m: output_cost_per_token: 'free'" in wrong.err) == (2, True)
    none = await shell.run("prices", "update", "gone.json", "--to", "prices.toml")
    assert (none.code, "gone.json" in none.err) == (2, True)
    day = await shell.run("prices", "update", "list.json", "--to", "prices.toml", "--as-of", "yesterday")
    assert (day.code, "--as-of" in day.err) == (2, True)
    assert target.read_text() == OWN


async def test_an_old_list_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "prices.toml").write_text(OWN)
    async with locally(tmp_path, f'prices = "{tmp_path / "prices.toml"}"\n') as gateway:
        assert "the list of prices is of 2026-01-01" in caplog.text
        shell = Shell(gateway.url, tmp_path)
        for words in (("prices",), ("stats",), ("stats", "--by", "model")):
            shown = await shell.run(*words)
            assert (shown.code, "2026-01-01" in shown.text, "prices update" in shown.text) == (0, True, True), shown.err
