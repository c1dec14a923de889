"""A run that goes on lets no agent begin before the weights are served."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="there is no torch here: `make install-train`, then `make test-train`")

from fakes.settings import Sections
from fakes.staging import RUNNER, staged

pytestmark = pytest.mark.timeout(300)


async def test_on_resume_no_attempt_begins_before_the_engine_is_ready(tmp_path: Path, model: Path) -> None:
    own: Sections = {"run": {"checkpoint_every": 1}, "model": {"rank": 4}, "rollouts": {"run": ["--lease=3s", *RUNNER]}}
    async with staged(tmp_path, model, 2, own) as stage:
        stage.hold(1)
        async with stage.life(own_runner=True) as life:
            await stage.in_step(life, 2)
            # Its runner would let the agents finish.
            os.kill(life.child(b"penstock\0run"), signal.SIGKILL)
            life.signal(signal.SIGKILL)
            _ = await life.ended()
        killed = time.time_ns()
        stage.let_go()
        # It takes longer to start than leases and a runner do.
        config = tmp_path / "train.toml"
        config.write_text(config.read_text().replace('hold"]', 'hold", "--slow=8"]'))
        async with stage.client as client:
            before = [one.id async for one in client.rollouts() if one.status not in ("succeeded", "failed")]
            await stage.to_the_end()
            served = [one.at_ns async for one in client.audit_log() if one.action == "open_upstream"]
            opened = min(at for at in served if at > killed)
            rollouts = [await client.rollout(name) for name in before]
    assert len(before) == 6
    begun = [attempt.created_ns for one in rollouts for attempt in one.attempts if attempt.created_ns > killed]
    assert len(begun) == len(before)
    assert min(begun) > opened
    assert [one.status for one in rollouts] == ["succeeded"] * len(before)
