"""Tables and figures of pages are those of the code: whatever only one of them knows is a fault, both ways.

Settings are held by the tests of their files, `test_config.py`.
"""

from __future__ import annotations

import inspect
import os
import re
import types
from collections.abc import Iterator, Sequence
from string import ascii_letters, digits
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from fakes.diagrams import diagram
from fakes.pages import disagreements
from fakes.process import ROOT
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from penstock.console.commands.command_table import COMMANDS, GROUPS
from penstock.gateway.api.openapi import field_docs
from penstock.gateway.api.routes import ROUTES
from penstock.gateway.client.client import Client
from penstock.gateway.client.connection import ApiConnection
from penstock.gateway.followers.index.sql.views import VIEWS
from penstock.gateway.followers.lake.rows import TABLE_DEFINITIONS, LakeColumn
from penstock.gateway.model import rollout, run
from penstock.gateway.model.metrics import METRICS
from penstock.gateway.model.release_policy import (
    CanaryStage,
    CostGuard,
    Guards,
    Holdback,
    LatencyGuard,
    ReleasePolicy,
    Replay,
    Shadow,
)
from penstock.gateway.reading.filter_fields import FIELDS
from penstock.gateway.releases.canary import decision
from penstock.gateway.tape.store import codec, keys, records
from penstock.gateway.tape.store.environment import DATABASES, FORMAT
from penstock.gateway.work.runs import FOLD

SECTIONS: dict[str, type[BaseModel]] = {
    "Top level": ReleasePolicy,
    "`[[stages]]`": CanaryStage,
    "`[guards]`": Guards,
    "`[guards.latency]`": LatencyGuard,
    "`[guards.cost]`": CostGuard,
    "`[holdback]`": Holdback,
    "`[replay]`": Replay,
    "`[shadow]`": Shadow,
}
LETTERS = {*ascii_letters, *digits}
MOVES = {"Rollout": rollout.ROLLOUT_MOVES, "Attempt": rollout.ATTEMPT_MOVES}
OPERATORS = {": = != ~": "text", ": = !=": "choice", ": ~": "part", "> >= < <=": "time", ":": "time"}
OPERATORS[": = != > >= < <="] = "number"
"""What the page calls a field with these operators."""
KINDS = {int: "integer", float: "number", bool: "true or false", str: "text"}


class Table(NamedTuple):
    """What a page lists below a heading, and what the code has."""

    page: str
    heading: str
    shown: str
    """A pattern of a line of it; its group is what is compared."""
    wanted: Sequence[str]


TABLES = (
    Table(
        "reading.md",
        "## Filters",
        r"(\| `\w+` \| \w+ \|).*",
        [f"| `{name}` | {OPERATORS[' '.join(one.operators)]} |" for name, one in FIELDS["spans"].items()],
    ),
    Table("runs.md", "# Training runs", r"\| `penstock runs (\w+)` \|.*", list(GROUPS["runs"].commands)),
    Table("tape.md", "## Databases", r"\| `(\w+)`.*", list(DATABASES)),
    Table(
        "api.md",
        "## Metrics",
        r"(\| `\w+` \| .*?\.)( .*)? \|",
        [f"| `{name}` | {one.kind} | {', '.join(one.labels)} | {one.help}" for name, one in METRICS.items()],
    ),
)


def test_tables_are_those_of_the_code() -> None:
    faults = [fault for table in TABLES for fault in compared(table)]
    wanted = sorted([*COMMANDS, *GROUPS])
    rows = re.findall(r"^\| `penstock ([a-z-]+)", section(read("reading.md"), "## Commands"), re.MULTILINE)
    faults += compared(Table("reading.md", "## Commands", "", wanted), sorted(rows))
    faults += compared(Table("lake.md", "## The tables", r"(\| `\w+` \| .* \|)", lake_rows()))
    wanted = sorted(f"{one.method} {one.path}" for one in ROUTES)
    shown = re.findall(r"`((?:GET|POST) /[^`]+)`", section(read("api.md"), "## Requests"))
    faults += compared(Table("api.md", "## Requests", "", wanted), sorted(shown))
    told = ("resource", "prompts", "release")
    wanted = sorted(f"{group} {name}" for group in told for name in GROUPS[group].commands)
    named = {" ".join(found) for found in re.findall(rf"penstock ({'|'.join(told)}) ([a-z]+)", read("releases.md"))}
    faults += compared(Table("releases.md", "anywhere", "", wanted), sorted(named))
    wanted = re.findall(r"^\| `(\w+)`", keys.__doc__ or "", re.MULTILINE)
    faults += compared(Table("gateway/tape/store/keys.py", "docstring", "", list(DATABASES)), wanted)
    assert not faults, "\n".join(faults)


def lake_rows() -> list[str]:
    """The tables of a lake, then the columns that its views of `penstock sql` lack, or have otherwise."""
    own: dict[tuple[str, LakeColumn], list[str]] = {}
    for name, table in TABLE_DEFINITIONS.items():
        known = VIEWS[name if name in VIEWS else "spans"].columns
        for column, one in table.columns.items():
            if column not in known or (known[column].type, known[column].help) != one:
                own.setdefault((column, one), []).append(name)
    rows = [f"| `{name}` | {table.help} |" for name, table in TABLE_DEFINITIONS.items()]
    for (column, one), names in own.items():
        where = "all" if len(names) == len(TABLE_DEFINITIONS) else ", ".join(names)
        rows.append(f"| `{column}` | {where} | `{one.type}` | {one.help} |")
    return rows


def compared(table: Table, shown: Sequence[str] | None = None) -> Iterator[str]:
    """`shown`: what is read of the page, where no pattern finds it."""
    page, heading, pattern, wanted = table
    place = f"{page}: {heading}"
    if shown is None:
        lines = section(read(page), heading).splitlines()
        shown = [found[1] for line in lines if (found := re.fullmatch(pattern, line))]
    yield from disagreements(place, dict.fromkeys(shown, ""), dict.fromkeys(wanted, ""))
    yield from (f"{place}: {it!r} stands there twice: take one out" for it in {*shown} if shown.count(it) > 1)
    if sorted(shown) == sorted(wanted) and list(shown) != list(wanted):
        yield f"{place}: the code has another order: {', '.join(wanted)}"


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """What stands below a heading, up to the next one of its level; nothing where there is none."""
    marks = heading.partition(" ")[0]
    return re.split(rf"\n#{{1,{len(marks)}}} ", text.partition(f"{heading}\n")[2])[0]


def test_diagrams_and_figures_are_those_of_the_code() -> None:
    runs, tape, releases, queue = map(read, ("runs.md", "tape.md", "releases.md", "queue.md"))
    limits = {
        "points of a request": run.MOST_POINTS,
        "values of a request": run.MOST_VALUES,
        "metrics of a run": run.MOST_METRICS,
        "configuration": run.MOST_CONFIG,
        "events of a request": run.MOST_EVENTS,
        "text of an event or a message": run.LONGEST_TEXT,
        "buckets of an answer, all metrics together": run.MOST_READ,
    }
    first, second, last = ReleasePolicy().stages
    ramp = f"{first.split:.0%} until {first.rollouts} and {second.split:.0%} until {second.rollouts} rewarded rollouts "
    ramp += f"on the candidate, then {last.split:.0%}."
    positions = {
        "rollout": ("number", *records.ROLLOUT),
        "attempt": ("cursors", *records.ATTEMPT),
        "style": records.STYLE,
        "summary": ("style", *("duration" if name == "end_ns" else name for name in records.OWN)),
    }
    wanted = [
        *(("queue.md", queue, f"{name}:\n\n{diagram(next(iter(moves)), moves)}") for name, moves in MOVES.items()),
        ("releases.md", releases, diagram("draft", decision.MOVES)),
        ("release-policy.md", read("release-policy.md"), ramp.replace("%", " %")),
        *(("runs.md", runs, f"| {what} | {most:,}") for what, most in limits.items()),
        *(("runs.md", runs, f"`{word}`") for word in (*get_args(run.RunKind), *get_args(run.RunStatus))),
        ("runs.md", runs, f"`lease_s`, {run.NewRun(kind='sft').lease_s:g} s unless given"),
        ("tape.md", tape, f"have {FOLD} rows they become one"),
        ("tape.md", tape, f"format `{FORMAT.decode()}`"),
        ("tape.md", tape, f"at most {codec.DEPTH}"),
    ]
    # What a page says may be wrapped.
    faults = [f"{page}: it does not say: {it}" for page, text, it in wanted if it not in text + " ".join(text.split())]
    for name, names in positions.items():
        shown = re.search(rf"\* \*\*{name}\*\*: ([a-z_,\s]+)", tape)
        faults += compared(Table("tape.md", name, "", names), re.findall(r"[a-z_]+", shown[1]) if shown else [])
    (signs,) = re.findall(r"letters, digits and `([^`]+)`", runs)
    known = {chr(code) for code in range(32, 127) if re.match(run.METRIC, f"a{chr(code)}")}
    faults += compared(Table("runs.md", "name of a metric", "", sorted(known)), sorted({*signs} - {" "} | LETTERS))
    begin = {chr(code) for code in range(32, 127) if re.match(run.METRIC, chr(code))}
    faults += compared(Table("runs.md", "name of a metric, the first", "", sorted(begin)), sorted({"_"} | LETTERS))
    assert not faults, "\n".join(faults)


def test_every_key_of_the_policy_is_documented_as_it_is() -> None:
    """`UPDATE_GOLDENS=1` writes the tables anew."""
    path = ROOT / "docs" / "release-policy.md"
    text = path.read_text(encoding="utf-8")
    before, begin, shown = text.partition("### Top level\n")
    made = "\n".join(policy_table(title, model) for title, model in SECTIONS.items())
    if os.environ.get("UPDATE_GOLDENS"):
        path.write_text(before + made, encoding="utf-8")
        return
    assert begin + shown == made


def test_every_method_of_the_client_is_documented_as_it_is() -> None:
    """`UPDATE_GOLDENS=1` writes the rows anew."""
    path = ROOT / "docs" / "client.md"
    text = path.read_text(encoding="utf-8")
    methods = {name for name in {*dir(Client)} - {*dir(ApiConnection)} if not name.startswith("_")}
    rows = re.findall(r"^\| \**`(\w+)\(.*$", section(text, "## All methods"), re.MULTILINE)
    faults = list(compared(Table("client.md", "## All methods", "", sorted(methods)), sorted(rows)))
    assert not faults, "\n".join(faults)
    made = re.sub(r"^\| \**`(\w+)\(.*$", lambda found: method_row(found[1]), text, flags=re.MULTILINE)
    if os.environ.get("UPDATE_GOLDENS"):
        path.write_text(made, encoding="utf-8")
        return
    assert text == made


def method_row(name: str) -> str:
    """A method of the client with its parameters, and the first words about it; in bold if it iterates."""
    method = getattr(Client, name)
    given = f"`{name}({', '.join(list(inspect.signature(method).parameters)[1:])})`"
    shown = f"**{given}**" if inspect.isasyncgenfunction(method) else given
    words = re.split(r"[.;] |\.$", " ".join((inspect.getdoc(method) or "").split()))[0]
    return f"| {shown} | {words} |"


def policy_table(title: str, model: type[BaseModel]) -> str:
    """The keys of a section, as the documentation has them."""
    lines = [f"### {title}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
    docs = field_docs(model)
    for name, field in model.model_fields.items():
        assert name in docs, f"{model.__name__}.{name} says nothing of itself"
        lines.append(f"| `{name}` | {kind(field.annotation)} | {default(name, field)} | {docs[name]} |")
    return "\n".join([*lines, ""])


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
    if name in ("stages", "guards", "holdback", "replay", "shadow"):
        return f"see `[[{name}]]`" if name == "stages" else f"see `[{name}]`"
    if value is None or value == "":
        return "none"
    if name == "reward_range":
        return f"`{list(value)}`"
    shown = str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else f"{value!r}"
    return f"`{shown}`"
