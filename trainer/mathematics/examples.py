"""The engine's input: a sequence of tokens, with the trained tokens and their advantages.

A `TokenExample` is a sample after credit assignment. `advantage` makes examples of the tape's samples,
`trainer.data.chat_template` makes them of chats.
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
"""(rollout, attempt): the unit of weight in the loss."""


@dataclass(frozen=True, slots=True)
class TokenExample:
    """One sequence of P + R tokens. It is never truncated."""

    owner: Owner
    """Its rollout and attempt; all examples of an owner together weigh as much as those of any other."""
    prompt: Ids
    """[P] Tokens of the first prompt."""
    response: Ids
    """[R] Tokens that follow: the model's own, and in between the tokens of later prompts."""
    mask: Flags
    """[R] True for tokens that are trained."""
    behaviour: Floats
    """[R] Log-probabilities of the engine that sampled; nan where it gave none."""
    advantages: Floats
    """[R] Advantage of each token; counts only where the mask is true."""
    sequences: Ids
    """[R] Number of the call in which a token was sampled, from 0 within the example; -1 between calls."""

    @property
    def length(self) -> int:
        """Number of tokens, prompt and response together."""
        return len(self.prompt) + len(self.response)


def example(sample: Sample, worth: Sequence[float]) -> TokenExample:
    """Return the example of a sample; `worth[n]` is the advantage of each token of its n-th segment."""
    advantages = np.zeros(len(sample.response), np.float32)
    sequences = np.full(len(sample.response), -1, np.int32)
    for number, (segment, value) in enumerate(zip(sample.segments, worth, strict=True)):
        advantages[segment.start : segment.end] = value
        sequences[segment.start : segment.end] = number
    owner = (sample.rollout, sample.attempt)
    return TokenExample(owner, sample.prompt, sample.response, sample.mask, sample.logprobs, advantages, sequences)
