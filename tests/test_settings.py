"""How much there is to set: a number that may only go down, or up with a reason. 160, 9 for servers of tools (MCP), 10
for those that the gateway hosts, 21 for policies on their calls, 28 for prompt optimisation, 3 for prompts between
steps of training, 1 for chat templates that take one system message, 2 for runs that would learn nothing (when one
ends, and a look before it begins), one for rollouts that fail, one for the weights that a release takes, 4 for how a
loss is summed up and what length costs, 3 for named keys, 2 for errors of a release that are looked at early, 2 for
rewards that never come and margins by odds, 2 for the holdback of a release, one for what it assigns, 4 for webhooks, 3
for suites of held-out tasks and for which tasks a step takes, one for agents that share a process, one for when there
is an index, one for what holds SQL, one for prices, 3 for masking rules, three for what is forgotten, 5 for
certificates: 3 of the port, 2 that upstreams are shown, 9 for budgets, of which 3 say whose calls and which they are, 3
for the log, one for names that the gateway goes by, and 2 for stopping and reloading it, and 2 for checks of upstreams
and for what a router behind one is told.

What counts is every key that can be written into penstock.toml, a release's policy, train.toml or apo.toml (tables do
not count, their keys do), and every option of `penstock run`. What nobody would change is a constant instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_args

from pydantic import BaseModel

from penstock.gateway.config import Config as Gateway
from penstock.gateway.model.policy import Policy
from penstock.sidecar.options import RunOptions
from penstock.trainer.apo.config import Config as Apo
from penstock.trainer.config import Config as Trainer

MOST = 302


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
        "apo.toml": len(list(keys(Apo))),
        "penstock run": len({"gateway", *(one.name for one in fields(RunOptions))}),
    }
    assert min(found.values()) > 20, found
    assert sum(found.values()) <= MOST, found
