"""Versions of weights and what a server must hold: pure."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.mistakes import tells
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.gateway.model.resource import ModelVersion, Residency

PATHS = {"policy@v0": "/a/v0", "policy@v1": "/a/v1", "policy@v2": "/a/v2", "sql": "/a/sql", "big-2": None}
KNOWN = {name: ModelVersion(upstream="vllm", base="base", adapter=path) for name, path in PATHS.items()}


def test_names() -> None:
    adapter = {"upstream": "vllm", "base": "Qwen/Qwen3-8B", "adapter": "/adapters/v12"}
    assert ModelVersion.model_validate(adapter).name("policy", "v12") == "policy@v12"
    assert ModelVersion.model_validate(adapter | {"served": "p12"}).name("policy", "v12") == "p12"
    replica = {"upstream": "vllm-2", "base": "policy-12"}
    assert ModelVersion.model_validate(replica).name("policy", "v12") == "policy-12"
    assert ModelVersion.model_validate(replica | {"served": "alias"}).name("policy", "v12") == "alias"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("adapter", "adapters/v1", "'adapters/v1' must be an absolute path on the server"),
        ("adapter", "/adapters/../v1", "without '..'"),
        ("adapter", "/adapters/v1\n", "absolute path"),
        ("adapter", "", "absolute path"),
        ("adapter", 7, "valid string"),
        ("served", "two words", "pattern"),
        ("served", "base", "'base' is the base model's name"),
        ("base", "", "pattern"),
        ("upstream", "a/b", "pattern"),
        ("adaptor", "/adapters/v1", "not permitted"),
    ],
)
def test_what_is_no_version_is_refused(field: str, value: Any, said: str) -> None:
    content = {"upstream": "vllm", "base": "base", "adapter": "/adapters/v1"}
    with pytest.raises(ValidationError, match=said) as refused:
        ModelVersion.model_validate(content | {field: value})
    assert field in str(refused.value)


def test_a_server_is_brought_to_what_is_wanted() -> None:
    present = {"base": None, "policy@v0": "/a/v0", "policy@v1": "/a/v1"}
    plan = Residency(KNOWN).plan(present, ["policy@v1", "policy@v2", "policy@v1"])
    assert (plan.unload, plan.load) == (["policy@v0"], {"policy@v2": KNOWN["policy@v2"]})
    assert (plan.problems, plan.warnings) == ({}, [])
    # A restarted one gets the most important first.
    plan = Residency(KNOWN).plan({"base": None}, ["policy@v2", "policy@v1", "policy@v0"])
    assert list(plan.load) == ["policy@v2", "policy@v1", "policy@v0"]


def test_what_is_not_ours_stays() -> None:
    """Another gateway's, one with our name and other weights, one the server was started with, the base."""
    with pytest.raises(KeyError, match="policy@v9"):
        Residency(KNOWN).plan({}, ["policy@v9"])
    present = {"base": None, "theirs@v1": "/b/v1", "policy@v0": "/b/v0", "sql": "/a/sql"}
    assert Residency(KNOWN).plan(present, []).unload == []


def test_a_name_that_stands_for_other_weights_is_a_problem() -> None:
    present = {"policy@v1": "/b/v1", "policy@v2": None, "big-2": "/a/big"}
    plan = Residency(KNOWN).plan(present, ["policy@v1", "policy@v2", "big-2"])
    assert (plan.unload, plan.load) == ([], {})
    assert tells(plan.problems["policy@v1"], "'policy@v1'", "the adapter in /b/v1, not the one in /a/v1")
    assert tells(plan.problems["policy@v2"], "a base model, not the one in /a/v2")
    assert tells(plan.problems["big-2"], "not a model", "the server was started with")
    # A replica that is not there cannot be loaded.
    plan = Residency(KNOWN).plan({"base": None}, ["big-2"])
    assert plan.load == {}
    assert "--served-model-name big-2" in plan.problems["big-2"]
    assert Residency(KNOWN).plan({"big-2": None}, ["big-2"]).problems == {}


def test_more_adapters_than_slots_are_reported() -> None:
    wanted = ["policy@v1", "policy@v2", "big-2"]
    assert Residency(KNOWN, slots=2).plan({"big-2": None}, wanted).warnings == []
    (warning,) = Residency(KNOWN, slots=1).plan({"big-2": None}, wanted).warnings
    assert tells(warning, "2 adapters are needed at once", "1 (--max-loras)")


LISTED = st.dictionaries(st.sampled_from([*KNOWN, "base", "theirs@v1"]), st.sampled_from([*PATHS.values(), "/b/x"]))


@given(LISTED, st.lists(st.sampled_from(list(KNOWN))))
def test_after_a_plan_there_is_nothing_left_to_do(present: dict[str, str | None], wanted: list[str]) -> None:
    residency = Residency(KNOWN)
    plan = residency.plan(present, wanted)
    assert not set(plan.unload) & set(wanted)
    assert not plan.load.keys() & present.keys()
    after = {name: path for name, path in present.items() if name not in plan.unload}
    after |= {name: version.adapter for name, version in plan.load.items()}
    again = residency.plan(after, wanted)
    assert (again.unload, again.load, again.problems) == ([], {}, plan.problems)
    for name in wanted:
        assert (name in plan.problems) != (name in after and after[name] == PATHS[name])
