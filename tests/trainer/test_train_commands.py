"""`penstock train` says what is wrong, and what it could do, before it loads anything heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fakes.mistakes import tells

pytestmark = pytest.mark.slow

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-train`")

ROOT = Path(__file__).parents[2]
KINDS = ("grpo", "sft", "dpo")
TOLD = """
import sys
from penstock.console.main import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    print(ended.code, file=sys.stderr)
loaded = {"torch", "transformers", "peft", "numpy", "pydantic", "aiohttp"} & sys.modules.keys()
print(sorted(loaded), file=sys.stderr)
"""


def penstock(*words: str) -> tuple[str, list[str]]:
    """(what it has printed, the lines on stderr): the exit code where it failed, and last what it has loaded."""
    done = subprocess.run([sys.executable, "-c", TOLD, *words], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout, done.stderr.splitlines()


@pytest.mark.parametrize("words", [(), *((kind,) for kind in KINDS)])
def test_help_loads_nothing(words: tuple[str, ...]) -> None:
    shown, told = penstock("train", *words, "--help")
    assert told == ["[]"]
    assert all(one in shown for one in (("--release", "--gateway", "CONFIG") if words else KINDS))


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_configuration_names_the_key(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text('[model]\npath = "model"\n[data]\nheld_out = 1.0\nallow = ["no_rewards"]\n[dpo]\nmargin = -1.0\n')
    _, (message, code, loaded) = penstock("train", kind, str(path))
    assert code == "2"
    assert tells(message, "data.allow: 'no_rewards'", "there are", "data.held_out: 1.0", "dpo.margin: -1.0")
    assert "torch" not in loaded
    _, (message, code, _) = penstock("train", kind, str(path), "--release", "soon")
    assert code == "2"
    assert "--release" in message
