"""Pins what images are made of: writes deploy/locks, each file with the hash of every file that may be installed.

`make locks` runs it; uv resolves. All files go together: an image installs `gateway.txt`, and beside it the file of
each extra that it is given, which has only what `gateway.txt` has not. The trainer installs `torch.txt` (or a torch of
its owner's choice) and `trainer.txt` beside. `build.txt` has what builds, `lock.txt` what resolves: they are
in no image.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCKS = ROOT / "deploy" / "locks"
EXTRAS = ("clouds", "index", "lake", "masking", "mcp", "parquet", "plots", "providers", "samples", "tui")
"""Those that an image of the gateway or the sidecar may be given; all of them can be installed together."""
APART = ("kubernetes",)
"""The same, but not beside `providers`: the two want different versions of one package."""
BUILD = ("hatchling", "cyclonedx-bom")
PYTHON = "3.11"
"""The oldest that may install them; what newer ones need beside is in the same files."""


def resolved(uv: str, source: str, *options: str) -> list[str]:
    """The packages that a file of requirements comes to: each with its version, marker and hashes."""
    command = [uv, "pip", "compile", source, "--universal", "--python-version", PYTHON, "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--quiet", *options]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout
    return re.split(r"\n(?=\S)", text.strip())


def pins(packages: list[str]) -> str:
    """Their first lines: versions and markers alone."""
    return "\n".join(one.partition(" \\\n")[0] for one in packages)


def write(name: str, what: str, packages: list[str]) -> None:
    """A file of packages, with what it is for in its first line."""
    (LOCKS / f"{name}.txt").write_text("\n".join([f"# {what} Made by `make locks`.", *packages, ""]), encoding="utf-8")


def main(uv: str) -> None:
    """Writes all files anew."""
    project = "pyproject.toml"
    with tempfile.TemporaryDirectory() as folder:
        together = Path(folder) / "together.txt"
        extras = [word for name in EXTRAS for word in ("--extra", name)]
        together.write_text(pins(resolved(uv, project, *extras)))
        bounds = ("--constraint", str(together))
        base = resolved(uv, project, *bounds)
        write("gateway", "What the gateway and the sidecar need.", base)
        for name in (*EXTRAS, *APART):
            bounds = bounds if name in EXTRAS else ("--constraint", str(LOCKS / "gateway.txt"))
            added = [one for one in resolved(uv, project, "--extra", name, *bounds) if one not in base]
            write(name, f"What the extra `{name}` adds to gateway.txt.", added)
        bounds = ("--constraint", str(LOCKS / "gateway.txt"))
        wanted = Path(folder) / "wanted.in"
        trainer = resolved(uv, project, "--extra", "train", *bounds)
        wanted.write_text("torch\n")
        of_trainer = Path(folder) / "trainer.txt"
        of_trainer.write_text(pins(trainer))
        torch = [one for one in resolved(uv, str(wanted), "--constraint", str(of_trainer)) if one not in base]
        write("torch", "What torch adds to gateway.txt.", torch)
        write("trainer", "What the trainer adds to both.", [one for one in trainer if one not in [*base, *torch]])
        wanted.write_text("\n".join(BUILD))
        write("build", "What builds the wheel and lists what is in an image.", resolved(uv, str(wanted)))
        wanted.write_text("uv\n")
        write("lock", "What makes these files.", resolved(uv, str(wanted)))


if __name__ == "__main__":
    main(sys.argv[1])
