"""How much there is to set: a number that may only go down, or up with a reason. 160, 9 for servers of tools
(MCP), 10 for those that the gateway hosts, 21 for policies on their calls, and 3 for prompts between steps of training.

What counts is every key that can be written into penstock.toml, a release's policy or train.toml (tables do not count,
their keys do), and every option of `penstock run`. What nobody would change is a constant instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_args

from pydantic import BaseModel

from penstock.gateway.config import Config as Gateway
from penstock.gateway.model.policy import Policy
from penstock.sidecar.options import RunOptions
from penstock.trainer.config import Config as Trainer

MOST = 209


def keys(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """The paths of all keys of a tree."""
    for name, field in model.model_fields.items():
        inner = table(field.annotation)
        if inner is None:
            yield path + name
        else:
            yield from keys(inner, f"{path}{name}.")


def table(annotation: Any) -> type[BaseModel] | None:
    """The model of a table, of a list of tables, or of one that may be left out."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in get_args(annotation) if (found := table(one)) is not None), None)


def test_there_is_no_more_to_set_than_somebody_would() -> None:
    found = {
        "penstock.toml": len(list(keys(Gateway))),
        "a policy": len(list(keys(Policy))),
        "train.toml": len(list(keys(Trainer))),
        "penstock run": len({"gateway", *(one.name for one in fields(RunOptions))}),
    }
    assert min(found.values()) > 20, found
    assert sum(found.values()) <= MOST, found
