"""`penstock samples`: training data from the tape, as files for other trainers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from penstock.gateway.client.console import (
    FLAT,
    LOCAL,
    CommandError,
    RolloutTerms,
    Url,
    check_format,
    joined_terms,
    pairs,
    whole_file,
    with_client,
)
from penstock.gateway.model.codes import Extra, install_hint

if TYPE_CHECKING:
    from penstock.adapters.export import Form, Format
    from penstock.adapters.selection import Options
    from penstock.gateway.client.client import Client

Output = Annotated[Path | None, Parameter(name=("--output", "-o"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """Options of `penstock samples`: which calls become samples, and in which form."""

    model: str | None = None
    """The model that is trained; the one that most calls of a rollout asked for if not given."""
    agent: str | None = None
    """Calls of this agent only."""
    attempt: Literal["final", "succeeded", "last", "all"] = "final"
    """Which attempt counts; `final` is the newest that succeeded, else the newest."""
    transitions: Annotated[bool, Parameter(negative="")] = False
    """A sample for each call, instead of one for calls that go on from each other."""
    mask_forced: Annotated[bool, Parameter(negative="")] = False
    """Do not train on tokens that a grammar forced."""
    longest_prompt: int | None = None
    """Most tokens of a prompt; what is longer is left out and told."""
    longest_response: int | None = None
    """Most tokens of a response; a longer sample is split before a call."""
    weight: Annotated[list[str] | None, Parameter(negative="")] = None
    """Weight of a reward's dimension, as NAME=NUMBER; may be given several times. `reward` is the value itself."""
    allow: Annotated[list[str] | None, Parameter(negative="")] = None
    """A reason that shall not keep a call out, such as no_reward; may be given several times."""

    def options(self) -> Options:
        """The same options in the form that the adapters use. Raises `CommandError`."""
        from penstock.adapters.selection import Options

        return Options(
            model=self.model,
            agent=self.agent,
            attempt=self.attempt,
            merge=not self.transitions,
            forced="mask" if self.mask_forced else "keep",
            longest_prompt=self.longest_prompt,
            longest_response=self.longest_response,
            weights=_weights(self.weight),
            allow=_reasons(self.allow or []),
        )


DEFAULT = SampleOptions()


def samples(
    *filter: RolloutTerms,
    form: Literal["samples", "chat", "preferences", "triplets"] = "samples",
    format: Literal["jsonl", "parquet"] = "jsonl",
    sampling: Annotated[SampleOptions, FLAT] = DEFAULT,
    margin: float = 0.0,
    output: Output = None,
    gateway: Url = LOCAL,
) -> None:
    """Write training data made from rollouts: token samples, conversations, preferences or triplets.

    Parameters
    ----------
    form
        Token sequences with mask and log-probabilities, conversations for SFT, pairs for DPO, or a row for each call.
        Those of tokens, `samples` and `triplets`, need the extra `samples`.
    format
        JSON lines or Parquet, which needs the extra `parquet`.
    margin
        By how much the rewards of a pair must differ at least.
    output
        File to write, which appears when it is whole; stdout if not given.
    """
    terms = joined_terms(filter)
    if not margin >= 0:
        raise CommandError(f"--margin is {margin}: it must not be negative", 2)
    _check_extras(form, format)
    check_format(format, output)
    options = sampling.options()
    with_client(gateway, lambda client: _write(client, terms, form, format, options, margin, output))


async def _write(
    client: Client, filter: str, form: Form, format: Format, options: Options, margin: float, output: Path | None
) -> None:
    from penstock.adapters.export import rows, sink
    from penstock.adapters.selection import SampleReport
    from penstock.adapters.source import by_group, list_rollouts, load

    report, gone = SampleReport(), list[str]()
    with whole_file(output) as file:
        out = sink(file, form, format)
        try:
            found = list_rollouts(client, filter)
            wanted = await by_group(found) if form == "preferences" else found
            async with aclosing(load(client, wanted, gone.append)) as episodes:
                async for row in rows(episodes, form, options, margin, report):
                    out.write(row)
        finally:
            out.close()
    said = [f"{len(gone):,} more were forgotten meanwhile (retention)"] if gone else []
    print("\n".join([*report.lines(), *said]), file=sys.stderr)


def _check_extras(form: Form, format: Format) -> None:
    """Raise `CommandError` when numpy is missing for a form of tokens; chat and preferences need no extra as JSON
    lines."""
    from penstock.adapters.export import TOKENS

    if form in TOKENS and find_spec("numpy") is None:
        extras: tuple[Extra, ...] = ("samples",)
        if format == "parquet" and find_spec("pyarrow") is None:
            extras = ("samples", "parquet")
        raise CommandError(f"--form {form} needs numpy: {install_hint(*extras)}; chat and preferences do without")


def _weights(words: Sequence[str] | None) -> dict[str, float] | None:
    if words is None:
        return None
    return {name: _number(name, text) for name, text in pairs(words, "--weight").items()}


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise CommandError(f"--weight: {text!r} of {name} is not a number", 2) from None


def _reasons(words: Sequence[str]) -> frozenset[str]:
    from penstock.adapters.selection import REASONS

    unknown = next((word for word in words if word not in REASONS), None)
    if unknown is not None:
        raise CommandError(f"--allow: {unknown!r} is no reason; there are {', '.join(sorted(REASONS))}", 2)
    return frozenset(words)
