"""How a run ends: what the machine refuses is a sentence too."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.trainer.runs.supervision import RunError, keep_running, run_blocking


def test_a_log_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    log = tmp_path / "gone" / "runner.log"
    with pytest.raises(RunError, match=rf"No such file or directory: {log}; the same command goes on"):
        run_blocking(keep_running([], "http://127.0.0.1:1", None, log))
