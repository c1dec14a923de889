"""A training that is killed where it hurts most: its second checkpoint is complete on disk and has not its name yet.

    with fork(interrupted_training.run, model, directory) as (process, said): ...

trains three steps with a checkpoint after the second and the third, says `saved` after the first of these and
`renaming` when it is about to give the other its name, and waits to be killed.
"""

from __future__ import annotations

import os
import random
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from fakes.lives import as_its_own
from fakes.tiny_model import VOCABULARY, config
from fakes.training import random_examples

from penstock.trainer.config import TrainConfig
from penstock.trainer.engines.checkpoint import Checkpoints
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.mathematics.batch import micro_batches


def settings(model: Path) -> TrainConfig:
    """Everything that has a state: dropout, a schedule, momenta."""
    return config(model, optimiser={"schedule": "cosine", "warmup": 2}, run={"steps": 8})


def step(engine: TrainingEngine) -> dict[str, float]:
    """One step on examples that every source of random numbers has its part in."""
    examples = random_examples(4, VOCABULARY, seed=int(np.random.randint(1000)))
    random.shuffle(examples)
    return engine.step(micro_batches(examples, 64, "packed"), engine.policy_objective())


def run(says: Connection, model: Path, directory: Path) -> None:
    """In a process of its own."""
    as_its_own()
    engine = TrainingEngine(settings(model))
    checkpoints = Checkpoints(directory, 2)
    for _ in range(2):
        step(engine)
    checkpoints.save(2, {"engine": engine.state(), "place": {"tasks": 7}})
    says.send("saved")
    step(engine)

    def never(*_: Any) -> None:
        says.send("renaming")
        threading.Event().wait()

    os.rename = never
    checkpoints.save(3, {"engine": engine.state()})
