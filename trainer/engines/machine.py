"""Describes a machine's speed for a run in one line, so that nobody finds out after a day that it takes a month."""

from __future__ import annotations

from time import perf_counter
from typing import Final

import torch

from penstock.trainer.engines.policy import PolicyModel

SIZE: Final = 512
"""Rows and columns of the matrices in the measurement of speed."""


def describe_machine(policy: PolicyModel) -> str:
    """Return a line: the device that computes a policy, the policy's size, and on a CPU the highest possible speed of
    training."""
    if policy.config.engine.kind == "verl":
        return f"computes on {policy.config.engine.ranks} ranks of verl"
    size = sum(one.numel() for one in policy.network.parameters())
    if policy.device.type == "cuda":
        slow = ', in float32: engine.dtype = "bfloat16" is several times faster'
        name = torch.cuda.get_device_name(policy.device)
        return f"computes on {name}: {_short(size)} parameters{slow if policy.dtype == torch.float32 else ''}"
    why = "" if torch.cuda.is_available() else "there is no usable GPU here: "
    rate = _operations() / (size * (6 if policy.full else 4))
    return (
        f"{why}computes on the CPU (threads: {torch.get_num_threads()}); for {_short(size)} parameters that is at best "
        f"{_short(rate)} tokens a second"
    )


def _operations() -> float:
    """Return floating-point operations a second, float32. A token takes 2 for each parameter in the forward pass, as
    many in the backward pass through the layers, and again as many where weights themselves have gradients (Kaplan et
    al. 2020, arXiv:2001.08361)."""
    one = torch.ones(SIZE, SIZE)
    times: list[float] = []
    for _ in range(5):
        began = perf_counter()
        _ = one @ one
        times.append(perf_counter() - began)
    return 2 * SIZE**3 / min(times)


def _short(number: float) -> str:
    """Return a number with two digits and a unit: 1.2 M."""
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= unit:
            return f"{number / unit:.2g}{name}" if number < 100 * unit else f"{number / unit:.0f}{name}"
    return f"{number:.2g}" if number < 100 else f"{number:.0f}"
