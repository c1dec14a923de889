"""The Dockerfile by its text: what a linter says, and what all of its images have in common, the trainer's too."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from fakes.commands import unparsed
from fakes.dockerfile import Instruction, read
from fakes.process import ROOT

FILE = ROOT / "Dockerfile"
DOCKERFILE = read(FILE)
TARGETS = ("gateway", "sidecar", "trainer")


def instructions(stage: str) -> list[Instruction]:
    """Those of a stage, behind those of the stages that it is made of."""
    found = DOCKERFILE.stages[stage]
    under = instructions(found.base) if found.base in DOCKERFILE.stages else []
    return under + found.instructions


def last(stage: str, name: str) -> str:
    return [one.text for one in instructions(stage) if one.name == name][-1]


def test_the_linter_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, FILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_every_image_is_an_ordinary_user_s_and_ends_when_it_is_told() -> None:
    for stage in TARGETS:
        assert last(stage, "USER") == "10001:10001"
        assert last(stage, "STOPSIGNAL") == "SIGTERM"
        assert last(stage, "ENTRYPOINT") == '["penstock"]'
        assert (last(stage, "HEALTHCHECK") == "NONE") == (stage == "trainer")
        assert [one.flags["from"] for one in instructions(stage) if "from" in one.flags] == [
            "build-trainer" if stage == "trainer" else "build"
        ]


def test_what_starts_by_itself_is_a_real_command() -> None:
    for stage in ("gateway", "sidecar"):
        assert unparsed(json.loads(last(stage, "CMD"))) == ""


def test_the_base_can_be_named_by_its_digest() -> None:
    assert set(DOCKERFILE.arguments) == {"BASE", "DIGEST"}
    assert {stage.base for stage in DOCKERFILE.stages.values()} - set(DOCKERFILE.stages) == {"${BASE}${DIGEST}"}


def test_only_what_is_copied_is_sent_to_the_builder() -> None:
    lines = (ROOT / ".dockerignore").read_text().split("\n")
    sent = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        source
        for stage in DOCKERFILE.stages.values()
        for one in stage.instructions
        if one.name == "COPY" and not one.flags
        for source in one.text.split()[:-1]
    }
    assert sent == copied
    assert all((ROOT / path).exists() for path in copied)


def test_the_wheel_s_parts_are_copied() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    copied = {
        word for one in DOCKERFILE.stages["build"].instructions if one.name == "COPY" for word in one.text.split()
    }
    assert {path.split("/")[0] for path in wheel} <= copied
    assert set(settings["project"]["license-files"]) <= copied


def test_the_trainer_installs_what_is_locked_or_the_torch_that_is_named() -> None:
    texts = [one.text for one in DOCKERFILE.stages["build-trainer"].instructions]
    assert texts[0] == "TORCH="
    assert re.search(r'if \[ -n "\$\{TORCH\}" \]; then set -- && .* install --no-cache-dir "\$\{TORCH\}"; fi', texts[1])
    assert re.search(r'--require-hashes --only-binary :all: "\$@" --requirement deploy/locks/trainer\.txt', texts[1])


def test_nothing_is_installed_without_its_hash() -> None:
    """But for the wheel that was just made, and a torch that a person names."""
    runs = [one.text for stage in DOCKERFILE.stages.values() for one in stage.instructions if one.name == "RUN"]
    installs = [part for text in runs for part in text.split("&&") if "bin/pip " in part and " install " in part]
    assert len(installs) == 5
    free = [part for part in installs if "--require-hashes" not in part]
    assert [re.sub(r".* install ", "", part).strip() for part in free] == [
        "--no-cache-dir --no-index --no-deps /wheels/*.whl",
        '--no-cache-dir "${TORCH}"; fi',
    ]
    assert sum("pip wheel" in text and "--no-build-isolation" in text for text in runs) == 1
