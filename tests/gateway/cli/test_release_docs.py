"""docs/releases.md says what the policy, the stages and the commands are: both are held against each other."""

from __future__ import annotations

import os
import re
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from fakes.diagrams import diagram
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from penstock.gateway.api.openapi import field_docs
from penstock.gateway.canary import stages
from penstock.gateway.cli.tables import GROUPS
from penstock.gateway.model.policy import (
    CostGuard,
    EarlyGuard,
    Guard,
    Guards,
    Holdback,
    LatencyGuard,
    Policy,
    Replay,
    Shadow,
    Stage,
)

PATH = Path(__file__).parents[3] / "docs" / "releases.md"
DOCS = PATH.read_text()
SECTIONS: dict[str, type[BaseModel]] = {
    "Top level": Policy,
    "`[[stages]]`": Stage,
    "`[guards]`": Guards,
    "`[guards.error]`, `[guards.violation]`, `[guards.missing]`": Guard,
    "`[guards.early_error]`": EarlyGuard,
    "`[guards.latency]`": LatencyGuard,
    "`[guards.cost]`": CostGuard,
    "`[holdback]`": Holdback,
    "`[replay]`": Replay,
    "`[shadow]`": Shadow,
}
KINDS = {int: "integer", float: "number", bool: "true or false", str: "text"}
TABLES = {
    "stages": "see `[[stages]]`",
    "guards": "see `[guards]`",
    "holdback": "see `[holdback]`",
    "replay": "see `[replay]`",
    "shadow": "see `[shadow]`",
}


def kind(annotation: Any) -> str:
    """A type as the documentation calls it."""
    if get_origin(annotation) is Literal:
        return " or ".join(f'`"{it}"`' for it in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return next(kind(it) for it in get_args(annotation) if it is not type(None))
    if get_origin(annotation) is list:
        return "list of tables"
    if get_origin(annotation) is tuple:
        return "two numbers"
    return KINDS.get(annotation, "table")


def default(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if name in TABLES:
        return TABLES[name]
    if value is None or value == "":
        return "none"
    if isinstance(value, Guard | EarlyGuard):
        return f"`{{ alpha = {value.alpha:g} }}`"
    if name == "reward_range":
        return f"`{list(value)}`"
    shown = str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else f"{value!r}"
    return f"`{shown}`"


def table(title: str, model: type[BaseModel]) -> str:
    """The keys of a section, as the documentation has them."""
    lines = [f"### {title}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
    docs = field_docs(model)
    for name, field in model.model_fields.items():
        assert name in docs, f"{model.__name__}.{name} says nothing of itself"
        lines.append(f"| `{name}` | {kind(field.annotation)} | {default(name, field)} | {docs[name]} |")
    return "\n".join([*lines, "", ""])


def test_every_key_of_the_policy_is_documented_as_it_is() -> None:
    """`UPDATE_GOLDENS=1` writes the tables anew."""
    text = PATH.read_text()
    begin, end = text.index("### Top level\n"), text.index("## States\n")
    made = "".join(table(title, model) for title, model in SECTIONS.items())
    if os.environ.get("UPDATE_GOLDENS"):
        PATH.write_text(text[:begin] + made + text[end:])
    assert PATH.read_text()[begin:][: len(made)] == made
    assert PATH.read_text()[begin + len(made) :].startswith("## States\n")


def test_the_documented_ramp_is_the_default() -> None:
    first, second, last = Policy().stages
    told = f"{first.split:.0%} until {first.rollouts} and {second.split:.0%} until {second.rollouts} rewarded rollouts "
    told += f"on the candidate, then {last.split:.0%}."
    assert told.replace("%", " %") in " ".join(DOCS.split())


def test_the_documented_policy_is_valid() -> None:
    shown = re.search(r"\n## The policy file.*?```toml\n(.*?)```", DOCS, re.DOTALL)
    assert shown is not None
    policy = Policy.load(shown[1])
    assert [stage.approval for stage in policy.stages] == [False, True]
    assert policy.guards.latency is not None


def test_the_documented_stages_are_those_of_the_table() -> None:
    assert diagram("draft", stages.MOVES) in DOCS


def test_every_documented_command_exists_and_every_command_is_documented() -> None:
    told = ("resource", "prompts", "release")
    known = {(group, name) for group in told for name in GROUPS[group].commands}
    named = set(re.findall(rf"penstock ({'|'.join(told)}) ([a-z]+)", DOCS))
    assert named == known
