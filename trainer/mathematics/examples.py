"""The engine's input: a sequence of tokens, which of them count, and what each is worth.

An `Example` is a sample after credit was given. Samples of the tape become examples in `advantage`, chats in
`trainer.data.chat_template`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.adapters.samples import Sample

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
Owner = tuple[str, str]
"""(rollout, attempt): what weighs as much as any other."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence of P + R tokens. Nothing in it is ever cut."""

    owner: Owner
    """Whose it is; all examples of an owner together weigh as much as those of any other."""
    prompt: Ids
    """[P] Tokens that the model was given."""
    response: Ids
    """[R] Tokens that follow: the model's own, and in between what it was told."""
    mask: Flags
    """[R] True for tokens that are trained."""
    behaviour: Floats
    """[R] Log-probabilities of the engine that sampled; nan where it gave none."""
    advantages: Floats
    """[R] What each token is worth; counts only where the mask is true."""
    sequences: Ids
    """[R] Number of the call that a token was sampled in, from 0 within the example; -1 between calls."""

    @property
    def length(self) -> int:
        """Tokens, prompt and response together."""
        return len(self.prompt) + len(self.response)


def example(sample: Sample, worth: Sequence[float]) -> Example:
    """A sample whose n-th segment is worth `worth[n]` a token."""
    advantages = np.zeros(len(sample.response), np.float32)
    sequences = np.full(len(sample.response), -1, np.int32)
    for number, (segment, value) in enumerate(zip(sample.segments, worth, strict=True)):
        advantages[segment.start : segment.end] = value
        sequences[segment.start : segment.end] = number
    owner = (sample.rollout, sample.attempt)
    return Example(owner, sample.prompt, sample.response, sample.mask, sample.logprobs, advantages, sequences)
