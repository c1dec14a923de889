"""What calls say of batches, whatever comes: nothing raises, and no answer is lost without a word."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.span import Usage
from penstock.gateway.wire.dialects.batches import BatchInput, BatchResult, batch_facts, find, results, with_batch_tier

NAMES = st.text("abcxyz019_-", min_size=1, max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
OF = st.sampled_from(["openai", "anthropic", "gemini"])


def line(of: str, name: str, answer: Any) -> bytes:
    if of == "openai":
        return json.dumps({"custom_id": name, "response": {"status_code": 200, "body": answer}}).encode()
    return json.dumps({"custom_id": name, "result": {"type": "succeeded", "message": answer}}).encode()


@given(
    st.sampled_from(["openai", "anthropic"]),
    st.lists(st.tuples(NAMES, st.dictionaries(st.text(max_size=5), JSON, max_size=3))),
    st.lists(st.integers(0, 2000)), st.sampled_from([b"\n", b"\r\n", b"\n\n"]), st.booleans(),
)  # fmt: skip
def test_lines_are_read_however_they_come(
    of: str, answers: list[tuple[str, Any]], cuts: list[int], end: bytes, last: bool
) -> None:
    whole = end.join(line(of, *one) for one in answers) + (end if last else b"")
    places = sorted({0, *(cut for cut in cuts if cut < len(whole)), len(whole)})
    pieces = [whole[a:b] for a, b in pairwise(places)]
    found = [it for it in results(of, pieces) if it is not None]
    assert [(it.name, json.loads(it.body)) for it in found] == answers


ODD = (
    rb'{"t": "\ud83d"}',
    b'{"t": NaN}',
    b'{"t": "\xed\xa0\x80"}',
    b'{"t": 1e999}',
    b'{"custom_id": "b", "params": 1}',
)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("of", ["openai", "anthropic"])
def test_what_decoders_refuse_is_kept_as_it_came(of: str, odd: bytes) -> None:
    """And so are names within that mean something outside."""
    whole = b"\xef\xbb\xbf" + line(of, "a", "?").replace(b'"?"', odd) + b"\n"
    (found,) = results(of, [whole])
    assert found == BatchResult("a", odd)
    posted = b'{"requests": [{"custom_id": "a", "params": %b}]}' % odd
    assert BatchInput("anthropic", posted, "").of("a").body == odd


@given(OF, st.lists(st.binary(max_size=40) | JSON.map(lambda it: json.dumps(it).encode()), max_size=5))
def test_what_is_no_result_is_told_apart(of: str, garbage: list[bytes]) -> None:
    body = b"\n".join(it.replace(b"\n", b" ") for it in garbage)
    lines = [it for it in body.split(b"\n") if it.strip()]
    found = list(results(of, [body]))
    assert found == ([] if of == "gemini" else [None] * len(lines))
    assert BatchInput(of, body, "multipart/form-data; boundary=x").of("a").body == b""


@given(OF, st.dictionaries(NAMES, JSON.filter(lambda it: it is not None), max_size=6))
def test_each_answer_finds_its_request(of: str, asked: dict[str, Any]) -> None:
    kind = "multipart/form-data; boundary=b-1"
    if of == "openai":
        file = b"\n".join(json.dumps({"custom_id": n, "url": "/v1/x", "body": it}).encode() for n, it in asked.items())
        part = b'--b-1\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
        body = part % (b"purpose", b"batch") + part % (b'file"; filename="f', file) + b"--b-1--\r\n"
    elif of == "anthropic":
        body = json.dumps({"requests": [{"custom_id": n, "params": it} for n, it in asked.items()]}).encode()
    else:
        inline = [{"request": it, "metadata": {"key": n}} for n, it in asked.items()]
        body = json.dumps({"batch": {"input_config": {"requests": {"requests": inline}}}}).encode()
    requests = BatchInput(of, body, kind)
    assert {name: json.loads(requests.of(name).body) for name in asked} == asked
    assert requests.of("?").body == b""


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("POST /v1/files", ("openai", "upload", None)), ("POST /openai/batches", ("openai", "make", None)),
        ("GET /batches", ("openai", "state", None)), ("GET /v1/batches/b", ("openai", "state", None)),
        ("POST /v1/batches/b/cancel", ("openai", "state", None)),
        ("GET /v1/files/f/content", ("openai", "results", "f")),
        ("POST /v1/messages/batches", ("anthropic", "make", None)),
        ("GET /v1/messages/batches/b/results", ("anthropic", "results", "b")),
        ("POST /v1beta/models/gemini-2.5-flash:batchGenerateContent", ("gemini", "make", None)),
        ("GET /v1beta/batches/b", ("gemini", "results", "b")), ("GET /v1/models", None), ("DELETE /v1/batches/b", None),
        ("GET /v1/files", None), ("POST /v1/messages", None), ("GET /v1/batches/b/c", None),
    ],
)  # fmt: skip
def test_forms(call: str, found: tuple[str, str, str | None] | None) -> None:
    method, path = call.split()
    it = find(method, path)
    assert (None if it is None else (it[0].of, it[0].does, it[1])) == found


@given(JSON, st.sampled_from(["POST /v1/files", "GET /v1/batches", "POST /v1/messages/batches?beta=true"]))
def test_nothing_raises_whatever_is_answered(answer: Any, call: str) -> None:
    method, path = call.split()
    assert batch_facts(method, path, json.dumps(answer).encode()) is None or isinstance(answer, dict)


def test_files_of_other_things_are_no_results() -> None:
    assert batch_facts("GET", "/v1/files/f/content", b'{"prompt": 1}\n') is None
    assert batch_facts("GET", "/v1/files/f/content", b'{"custom_id": "a"}\n') is not None


@pytest.mark.parametrize(
    ("of", "said", "error"),
    [
        ("openai", {"response": {"status_code": 429, "body": {"error": {}}}}, "http_429"),
        ("openai", {"response": None, "error": {"code": "batch_cancelled"}}, "batch_cancelled"),
        ("openai", {"error": {"code": "odd"}}, "batch_error"), ("openai", {}, "batch_error"),
        ("openai", {"custom_id": None, "id": "batch_req_1", "error": {}}, "batch_error"),
        ("anthropic", {"result": {"type": "canceled"}}, "batch_cancelled"),
        ("anthropic", {"result": {"type": "brand_new"}}, "batch_error"),
    ],
)  # fmt: skip
def test_why_there_is_no_answer(of: str, said: dict[str, Any], error: str) -> None:
    (found,) = results(of, [json.dumps({"custom_id": "a"} | said).encode()])
    assert isinstance(found, BatchResult)
    assert found.error == error
    assert found.body


def test_a_batch_has_its_own_price() -> None:
    usage = Usage(input_tokens=1, output_tokens=1, billed={"tier": "priority", "cache_write_long": 1})
    assert with_batch_tier(usage) == usage.model_copy(update={"billed": {"tier": "batch", "cache_write_long": 1}})
    assert with_batch_tier(None) is None
