"""Rules are strict: what is wrong in one names the field, the value and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.process import ROOT
from pydantic import BaseModel

from penstock.gateway.api.openapi import field_docs
from penstock.gateway.config import load
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.policy.rules import Condition, PolicyRule, Redaction


def rules(tmp_path: Path, text: str) -> list[PolicyRule]:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return load(path).policy


def test_a_rule_says_what_it_matches_and_what_follows(tmp_path: Path) -> None:
    (one,) = rules(
        tmp_path,
        '[[policy]]\nname = "pay"\nserver = "bank"\ntool = ["pay_*", "send"]\nmode = "online"\nverdict = "ask"\n'
        'wait = 60.0\nannotations = { readOnlyHint = false }\n[[policy.argument]]\nat = "/amount"\nabove = 100\n',
    )
    assert (one.server, one.tool, one.mode, one.verdict, one.wait) == (
        ["bank"],
        ["pay_*", "send"],
        ["online"],
        "ask",
        60,
    )
    assert (one.argument[0].at, one.argument[0].above, one.annotations) == ("/amount", 100, {"readOnlyHint": False})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('verdict = "no"', "policy 'r': verdict: 'no' is not 'allow', 'deny', 'redact', 'ask', 'kernel' or 'dry'"),
        ('verdict = "deny"\nargument = [{ at = "path", glob = "*" }]', "argument 1: at: a JSON pointer is empty"),
        ('verdict = "deny"\nargument = [{ at = "/a", regex = "(" }]', "argument 1: regex: it is no regular expression"),
        ('verdict = "deny"\nargument = [{ at = "/a" }]', "'/a' says nothing of its value: add equals, glob"),
        ('verdict = "deny"\nargument = [{ at = "/a", absent = true, above = 1 }]', "'/a' is absent and has a value"),
        ('verdict = "redact"', "verdict is 'redact': add redact ="),
        ('verdict = "deny"\nredact = { results = [""] }', "verdict is 'deny': leave redact out"),
        ('verdict = "redact"\nredact = { pattern = "a" }', "policy 'r': redact: it names no place: add arguments"),
        ('verdict = "kernel"', """verdict is 'kernel': add kernel = "module:name\""""),
        ('verdict = "kernel"\nkernel = "module"', "policy 'r': kernel: 'module' is not module:name"),
        ('verdict = "ask"\nkernel = "a:b"', "verdict is 'ask': leave kernel out"),
        ('verdict = "deny"\ntol = "a"', "policy 'r': tol: unknown key; did you mean 'tool'?"),
        ('verdict = "deny"\nargument = [{ at = "/a", globb = "*" }]', "globb: unknown key; did you mean 'glob'?"),
        ('verdict = "deny"\nannotations = { readonly = true }', "policy 'r': annotations"),
        ('verdict = "deny"\n[[policy]]\nname = "r"\nverdict = "deny"', "policy names must differ: r"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _ = rules(tmp_path, f'[[policy]]\nname = "r"\n{line}\n')
    assert said in str(caught.value)


@pytest.mark.parametrize(("model", "heading"), [(Condition, "Arguments"), (Redaction, "Redaction")])
def test_every_key_of_a_table_within_a_rule_is_documented(model: type[BaseModel], heading: str) -> None:
    page = (ROOT / "docs" / "policies.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert {row[0].strip("`"): row[2] for row in rows} == field_docs(model)
