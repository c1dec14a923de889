"""Training that was killed goes on as if it had not been, and a disk that is full costs nothing that was there."""

from __future__ import annotations

import resource
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

import torch
from fakes.interrupted_training import run, settings, step
from fakes.lives import fork
from fakes.tiny_model import config

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.engines import CheckpointError
from penstock.trainer.engines.checkpoint import Checkpoints, write_directory
from penstock.trainer.engines.local import TrainingEngine

# The process that others are forked from imports torch first.
pytestmark = pytest.mark.timeout(300)


def killed(model: Path, directory: Path) -> None:
    """A training in a process of its own, killed while it saves step 3."""
    with fork(run, model, directory) as (_, says):
        assert [says.recv() for _ in range(2)] == ["saved", "renaming"]


def test_it_goes_on_exactly_after_kill_9(model: Path, tmp_path: Path) -> None:
    whole = TrainingEngine(settings(model))
    reports = [step(whole) for _ in range(5)]
    killed(model, tmp_path)
    assert [one.name for one in sorted(tmp_path.iterdir())] == [".step-00000003.partial", "step-00000002"]
    checkpoints = Checkpoints(tmp_path, 2)
    found = checkpoints.latest()
    assert found is not None
    assert (found[0], found[1]["place"]) == (2, {"tasks": 7})
    resumed = TrainingEngine(settings(model))
    resumed.restore(found[1]["engine"])
    assert [step(resumed) for _ in range(3)] == reports[2:]
    for name, one in whole.model.trained.items():
        assert torch.equal(resumed.model.trained[name], one), name
    # What the dead process had begun is in nobody's way.
    checkpoints.save(3, {"engine": resumed.state()})
    assert [one.name for one in sorted(tmp_path.iterdir())] == ["step-00000002", "step-00000003"]


@contextmanager
def small_disk(size: int) -> Generator[None]:
    """No file of this process may grow beyond `size` bytes: writing fails as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_leaves_the_last_good_checkpoint_and_says_so(model: Path, tmp_path: Path) -> None:
    engine = TrainingEngine(settings(model))
    checkpoints = Checkpoints(tmp_path, 2)
    with (
        small_disk(4096),
        pytest.raises(CheckpointError, match=r"step-00000001 could not .*there is no earlier checkpoint"),
    ):
        checkpoints.save(1, {"engine": engine.state()})
    checkpoints.save(1, {"engine": engine.state()})
    step(engine)
    with small_disk(4096), pytest.raises(CheckpointError, match=r"the last good checkpoint is .*step-00000001"):
        checkpoints.save(2, {"engine": engine.state()})
    assert checkpoints.steps() == [1]
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000001"]
    found = checkpoints.latest()
    assert found is not None
    TrainingEngine(settings(model)).restore(found[1]["engine"])
    with small_disk(4096), pytest.raises(CheckpointError, match="adapter could not be written"):
        engine.save_adapter(tmp_path / "adapter")
    with small_disk(4096), pytest.raises(CheckpointError, match="model could not be written"):
        engine.save_model(tmp_path / "model")
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000001"]
    engine.save_adapter(tmp_path / "adapter")


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "new", 2)
    assert checkpoints.latest() is None
    for number in (1, 2, 10):
        checkpoints.save(number, {"number": number})
    assert checkpoints.steps() == [2, 10]
    assert checkpoints.latest() == (10, {"number": 10})


def test_a_checkpoint_of_another_adapter_is_refused(model: Path) -> None:
    state = TrainingEngine(config(model)).state()
    with pytest.raises(ConfigError, match=r"model: the checkpoint is of another model, adapter or rank: .*lora_A"):
        TrainingEngine(config(model, model={"rank": 2})).restore(state)
    with pytest.raises(ConfigError, match="does not fit"):
        TrainingEngine(config(model, model={"weights": "full"})).restore(state)


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    (checkpoints.save(3, {"number": 3}) / "state.pt").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"step-00000003/state\.pt cannot be read .*remove .*step-00000003 to go"):
        checkpoints.latest()


def test_a_directory_is_whole_or_not_there(tmp_path: Path) -> None:
    def fill(directory: Path) -> None:
        (directory / "one").write_text("1")
        assert not (tmp_path / "made").exists()
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"made could not be written: .*No space left on device"):
        write_directory(tmp_path / "made", fill)
    assert list(tmp_path.iterdir()) == []
