"""Paths lead where they say, whatever stands in the way, and take no longer than the JSON is long."""

from __future__ import annotations

from time import process_time

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.gateway.masking.masker import Compiled, Masker, Tally
from penstock.gateway.masking.paths import MemberPaths, Path, Step, parsed
from penstock.gateway.masking.rules import MaskingRule
from penstock.gateway.model.known_secrets import About

JSON = About("application/json")
STEPS = st.sampled_from([".a", ".b", ".*", ".**", "[*]", "[1]", '["a"]'])
WRITTEN = st.lists(STEPS, min_size=1, max_size=5).map(lambda steps: "".join(steps).removeprefix("."))


def leads(steps: list[Step], path: Path) -> bool:
    """The same, as slow as it is simple."""
    if not steps:
        return True
    (kind, said), rest = steps[0], steps[1:]
    if kind == "deep" and leads(rest, path):
        return True
    if not path:
        return False
    if kind == "deep":
        return leads(steps, path[1:])
    meant = int(said) if kind == "index" else said
    met = kind == "any" or (isinstance(path[0], int) if kind == "each" else path[0] == meant)
    return met and leads(rest, path[1:])


@given(
    written=st.lists(WRITTEN.filter(lambda path: not path.endswith("**")), min_size=1, max_size=3),
    paths=st.lists(st.lists(st.sampled_from(["a", "b", "1", 0, 1]), max_size=6), min_size=1, max_size=4),
)
@example(written=["**.a.**.b"], paths=[["a", "a", 0, "b", "c"]])
def test_a_path_leads_where_its_steps_say(written: list[str], paths: list[list[str | int]]) -> None:
    one, steps = MemberPaths(written), [parsed(path) for path in written]
    for path in map(tuple, paths):
        assert one.lead_to(path) == any(leads(each, path) for each in steps)


def kept(body: bytes, *paths: str) -> tuple[bytes, float]:
    one = Masker((), Compiled([MaskingRule(name="r", paths=list(paths))]), Tally())
    began = process_time()
    return one.body(body, JSON), process_time() - began


def test_steps_of_any_depth_are_soon_over() -> None:
    body = b'{"ssn":1,"a":' + b'{"a":' * 160 + b"1" + b"}" * 161
    masked, seconds = kept(body, "**.a.**.a.**.a.**.ssn")
    assert (masked, seconds < 2) == (body, True)


def test_what_is_nested_deep_takes_no_memory() -> None:
    body = b'{"x":{"email":' + b"[" * 190 + b",".join([b"1"] * 20_000) + b"]" * 190 + b"}}"
    masked, seconds = kept(body, "x.email")
    assert (set(masked), seconds < 2) == ({ord("*")}, True)
    few = b'{"x":{"email":[[[[[["bob",12]]]]]]}}'
    assert kept(few, "x.email")[0] == few.replace(b"bob", b"***").replace(b"12", b"10")
