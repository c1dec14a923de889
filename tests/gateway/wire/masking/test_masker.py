"""What is kept of bodies and texts, and what is not since a rule cannot be applied for sure."""

from __future__ import annotations

import gzip
import json
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.gateway.model.facts import MASKED, MASKING_FAILED
from penstock.gateway.model.known_secrets import NO_SECRETS, BodyContext, own_secrets
from penstock.gateway.model.rollout import Reward
from penstock.gateway.model.span import Span
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.traffic.calls.answer_masking import mask_recorded_body
from penstock.gateway.wire.dialects.json_scan import JsonPaths, Path, Step, parse_path
from penstock.gateway.wire.masking.masker import CompiledRules, Masker, MaskingCounts, MaskingRule, masker
from penstock.gateway.work.operations import without_secrets

CARD = "4111111111111111"
CARDS = MaskingRule(name="cards", pattern=r"\b\d{16}\b")
PEOPLE = MaskingRule(name="people", paths=["messages[*].metadata.email", "**.ssn", 'x["a b"][1]'])
ANY = BodyContext("application/json")


def made(*rules: MaskingRule, values: tuple[bytes, ...] = ()) -> Masker:
    return Masker(values, CompiledRules(rules or (CARDS, PEOPLE)), MaskingCounts())


def kept(value: Any, *rules: MaskingRule) -> Any:
    body = json.dumps(value).encode()
    masked = made(*rules).body(body, ANY)
    assert len(masked) == len(body)
    return json.loads(masked)


def test_members_are_masked_whole_with_all_that_is_below_them() -> None:
    asked = {
        "messages": [{"metadata": {"email": "a@b.c", "id": "7"}}],
        "ssn": {"k": [12, -1.5, True, False, None, "é"]},
    }
    assert kept(asked) == {
        "messages": [{"metadata": {"email": "*****", "id": "7"}}],
        "ssn": {"*": [10, -0.0, None, None, None, "******"]},
    }
    assert kept({"x": {"a b": ["p", "q", "r"]}}) == {"x": {"a b": ["p", "*", "r"]}}
    other = {"email": "a@b.c", "messages": {"metadata": {"email": "a"}}}
    assert kept(other) == other
    # A path leads into JSON in a string.
    call = {"function": {"arguments": json.dumps({"ssn": "12-34", "n": 1})}}
    assert json.loads(kept(call)["function"]["arguments"]) == {"ssn": "*****", "n": 1}


def test_a_pattern_finds_integers_and_keys_and_keeps_their_type() -> None:
    pi = 3.1415926535897932
    assert kept({"n": int(CARD), CARD: 1, "pi": pi}) == {"n": 10**15, "*" * 16: 1, "pi": pi}


def test_notes_say_how_much_each_rule_has_found() -> None:
    """Where that is nothing, a body stays the same object."""
    one, body = made(), b'{"messages":[{"content":"a \\n b"}]}'
    assert one.body(body, ANY) is body
    assert (one.masked, one.span_attributes) == (False, {})
    one = made().for_call()
    _ = one.body(json.dumps({"a": CARD, "b": f"{CARD} {CARD}", "ssn": "1"}).encode(), ANY)
    assert one.span_attributes == {MASKED: {"cards": 3, "people": 1}}
    assert made().for_call().span_attributes == {}


SLOW = MaskingRule(name="slow", pattern=r".*[^A-Z]|[A-Z]{2}")
UTF_16 = json.dumps({"ssn": 1}).encode("utf-16")
AWS = "application/vnd.amazon.eventstream"
FAILS: dict[str, tuple[bytes, str, MaskingRule, str]] = {
    "no JSON, and the member's name": (b"<p>ssn</p>", "text/html", PEOPLE, "people: it is not the JSON that a path"),
    "broken JSON": (b'{"ssn": 1]', "application/json", PEOPLE, "people: it is no JSON at byte 10"),
    "unquoted": (b'{"a": 4111-11, "ssn": 1}', "application/json", PEOPLE, "people: it is no JSON"),
    "binary of no type": (b"\xff\xfe\x00", "", CARDS, "cards: it is no UTF-8"),
    "JSON in UTF-16": (UTF_16, "application/json", PEOPLE, "people: it is no UTF-8"),
    "takes too long": (b"A" * 40_000, "text/plain", SLOW, "slow: took longer than 260 ms"),
    "no frame": (b"\0" * 40, AWS, CARDS, "cards: what stands at byte 0 is no frame"),
    "an event that is no JSON": (b"data: {ssn\n\n", "text/event-stream", PEOPLE, "people: it is not the JSON"),
}


@pytest.mark.parametrize("case", FAILS)
def test_what_a_rule_cannot_be_applied_to_is_not_kept(case: str) -> None:
    body, kind, rule, why = FAILS[case]
    one = made(rule).for_call()
    assert one.body(body, BodyContext(kind)) == b"*" * len(body)
    assert one.span_attributes[MASKING_FAILED].startswith(f"failed: {why}")


def test_what_is_nested_deep_is_left_out_where_a_rule_may_find_something() -> None:
    for ends in ("]", ""):
        body = b'{"ssn": "1", "x": %b"12-34"%b' % (b"[" * 10_000, ends.encode() * 10_000 + b"}" * bool(ends))
        kept = made(PEOPLE).body(body, ANY)
        assert (len(kept), kept[:11]) == (len(body), b'{"ssn": "*"')
        assert b"12-34" not in kept
        assert b"null" in kept
        other = body.replace(b"ssn", b"sum")
        assert made(PEOPLE).body(other, ANY) is other
    # Nor does half a pair as bytes hide it.
    body = b'{"a": "cut \xed\xa0\xbd", "ssn": "1"}'
    assert made(PEOPLE).body(body, ANY) == body.replace(b'"1"', b'"*"')


def test_an_internal_error_fails_closed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    for name in ("mask_body", "_look_at"):
        monkeypatch.setattr(f"penstock.gateway.wire.masking.masker.{name}", broken)
    one = made().for_call()
    assert one.body(b"hello", ANY) == b"*****"
    assert one.block(b"X-Card: 12\r\nB: c\r\n") == b"X-Card: **\r\nB: *\r\n"
    assert one.span_attributes == {MASKING_FAILED: "failed: cards: an internal error, which the log has"}
    assert "a bug" in caplog.text


def test_what_cannot_be_decoded_is_not_kept() -> None:
    packed = gzip.compress(f"{CARD} ".encode() * 40)
    whole, broken = (
        mask_recorded_body(made(), packed, "gzip", about=ANY),
        mask_recorded_body(made(), packed[:-9] + b"x" * 9, "gzip", about=ANY),
    )
    assert CARD.encode() not in whole.body
    assert set(broken.body) == set(mask_recorded_body(made(), packed, "rot13", about=ANY).body) == {ord("*")}


def test_what_no_rule_can_read_is_kept_if_its_type_says_so_and_the_end_of_what_was_cut_off_is_masked() -> None:
    body = b"\x89PNG\xff" + CARD.encode()
    assert made().body(body, BodyContext("image/png")) is body
    body = b'{"a":"' + b"x" * 1000 + b" 4111 11"
    masked = made().body(body, BodyContext("application/json", cut=True))
    assert (masked[:-256], set(masked[-256:])) == (body[:-256], {ord("*")})


def test_tokens_that_say_the_text_once_more_become_null() -> None:
    answer = {"prompt_token_ids": [1, 22], "choices": [{"text": "x", "token_ids": [5], "logprobs": {"tokens": ["a"]}}]}
    one = made()
    masked = json.loads(one.without_tokens(json.dumps(answer).encode(), ANY))
    assert masked == {"prompt_token_ids": None, "choices": [{"text": "x", "token_ids": [], "logprobs": None}]}


def test_a_prompt_of_token_ids_is_not_kept_where_a_pattern_could_not_read_it() -> None:
    one = made(CARDS).for_call()
    body = b'{"model":"m","prompt":[101,2023,102]}'
    assert json.loads(one.body(body, ANY)) == {"model": "m", "prompt": None}
    assert one.span_attributes == {MASKING_FAILED: "failed: cards: the request gives its text as token ids"}


def test_texts_attributes_and_headers() -> None:
    one = made(CARDS, PEOPLE, MaskingRule(name="ids", paths=["id"]))
    assert one.text(f"say {CARD}") == "say " + "*" * 16
    assert one.text(f"q=%34{CARD[1:]}") == "q=" + "*" * 18
    assert one.json({"a": CARD, "ssn": 12, "ok": [1, "b"]}) == {"a": "*" * 16, "ssn": 10, "ok": [1, "b"]}
    assert one.block(f"X-Card: {CARD}\r\nB: c\r\n".encode()) == b"X-Card: " + b"*" * 16 + b"\r\nB: c\r\n"
    assert one.texts([None, CARD]) == [None, "*" * 16]


def test_nothing_else_is_lost_with_what_is_masked() -> None:
    one = made(MaskingRule(name="mail", pattern=r"[a-z]@x"))
    assert one.json({"a@x": 1, "b@x": {"n": 2**70, "m": "a@x"}}) == {"***": 1, "*** 2": {"n": 2**70, "m": "***"}}
    assert one.json({"half": "\ud83d", "m": "a@x"}) == {"half": "\ud83d", "m": "***"}
    assert made(values=(b"sk-1", b"sk-2")).json({"sk-1": 1, "sk-2": 2}) == {"****": 1, "**** 2": 2}


def test_numbers_of_a_reward_stay() -> None:
    digits = made(MaskingRule(name="digits", pattern=r"\b\d\b|agent"))
    told = Reward(value=1, span=7, source="agent", reason="7", key="7", dimensions={"7": 7, "8": 8}, trusted=False)
    kept = without_secrets(told, digits)
    assert kept == told.model_copy(update={"reason": "*", "key": "*", "dimensions": {"*": 7, "* 2": 8}})
    assert Reward.of(cast(Span, SimpleNamespace(attributes=kept.attributes() | {MASKED: {"digits": 4}}))) == kept


def test_known_values_are_hidden_as_well() -> None:
    one = made(values=(b"sk-secret-123456789",)).with_values([b"another-key-00000001"])
    hidden = b" ".join([b"*" * 19, b"*" * 20, b"*" * 16])
    assert one.hide(b"sk-secret-123456789 another-key-00000001 " + CARD.encode()) == hidden
    # Without rules there is no masker.
    own = own_secrets(["sk-secret-123456789"])
    assert masker([], own, MaskingCounts()) is own


def test_each_rule_is_logged_once_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    tally = MaskingCounts()
    one = masker([CARDS], NO_SECRETS, tally)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            _ = one.body(b"\xff", BodyContext())
    assert len(caplog.records) == 1
    assert (tally.failed["cards",], tally.masked["cards",]) == (3, 0)


REFUSED = {
    **{"(": "missing .", "a*": "matches the empty string", r"\b": "matches the empty string"},
    **{"(?=a)b": "invalid perl operator", r"a{5000}": "invalid repetition size"},
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_a_pattern_that_cannot_be_used_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match=f"masking rule 'r': pattern .*{REFUSED[pattern]}"):
        _ = CompiledRules([MaskingRule(name="r", pattern=pattern)])


def test_a_rule_has_a_pattern_or_paths_that_can_be_read() -> None:
    for path in ("", "a..b", ".a", "a[", "a[x]", "**", "a.**", "a b", "a[*]b", "/a"):
        with pytest.raises(ValueError, match="path"):
            _ = MaskingRule(name="r", paths=[path])
    with pytest.raises(ValueError, match="'r' masks nothing"):
        _ = MaskingRule(name="r")
    with pytest.raises(ValueError, match="'r' has a pattern and paths"):
        _ = MaskingRule(name="r", pattern="a", paths=["b"])


def test_without_the_engine_patterns_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "re2", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[masking\]'"):
        _ = CompiledRules([CARDS])
    assert CompiledRules([PEOPLE]).all.patterns == []


# -- paths lead where they say, whatever stands in the way, and take no longer than the JSON is long ------------------

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
    one, steps = JsonPaths(written), [parse_path(path) for path in written]
    for path in map(tuple, paths):
        assert one.lead_to(path) == any(leads(each, path) for each in steps)


def test_paths_take_no_longer_than_the_json_is_long() -> None:
    """Were it not so, these would not end."""

    def at(path: str) -> Masker:
        return made(MaskingRule(name="r", paths=[path]))

    body = b'{"ssn":1,"a":' + b'{"a":' * 160 + b"1" + b"}" * 161
    assert at("**.a.**.a.**.a.**.ssn").body(body, ANY) == body
    body = b'{"x":{"email":' + b"[" * 190 + b",".join([b"1"] * 20_000) + b"]" * 190 + b"}}"
    assert set(at("x.email").body(body, ANY)) == {ord("*")}
    few = b'{"x":{"email":[[[[[["bob",12]]]]]]}}'
    assert at("x.email").body(few, ANY) == few.replace(b"bob", b"***").replace(b"12", b"10")


def form(**parts: tuple[str, bytes]) -> bytes:
    """A form; each part with more of its head, and its value."""
    head = '--b\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n'
    told = [head.format(name, more).encode() + value + b"\r\n" for name, (more, value) in parts.items()]
    return b"".join([*told, b"--b--\r\n"])


FORM = BodyContext("multipart/form-data; boundary=b")
SOUND = ('; filename="a.wav"\r\nContent-Type: audio/wav', b"\0\xff" + CARD.encode())


def test_a_form_is_masked_part_by_part() -> None:
    lines = (
        '; filename="a.jsonl"\r\nContent-Type: application/jsonl',
        b'{"ssn": "12-34"}\n{"a": "%b"}' % CARD.encode(),
    )
    body = form(prompt=("", b"Card " + CARD.encode()), ssn=("", b"12-34"), file=SOUND, batch=lines)
    masked = ("", b"*" * 5), (lines[0], b'{"ssn": "*****"}\n{"a": "%b"}' % (b"*" * 16))
    assert made().body(body, FORM) == form(
        prompt=("", b"Card " + b"*" * 16), ssn=masked[0], file=SOUND, batch=masked[1]
    )
    named = form(file=(f'; filename="{CARD}.wav"\r\nContent-Type: audio/wav', b"\0\xff"))
    assert made().body(named, FORM) == named.replace(CARD.encode(), b"*" * 16)


@pytest.mark.parametrize(
    "body",
    [
        form(file=('; filename="a.bin"\r\nContent-Type: text/plain', b"\xff\xfe" + CARD.encode())),
        form(file=SOUND)[:-9],
        b"no form",
    ],
)
def test_of_a_form_that_cannot_be_searched_nothing_is_kept(body: bytes) -> None:
    one = made().for_call()
    assert one.body(body, FORM) == b"*" * len(body)
    assert MASKING_FAILED in one.span_attributes
