"""Media on the wire: summaries and turns agree, whatever comes."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.span import Usage
from penstock.gateway.wire.dialects import DIALECTS, by_name
from penstock.gateway.wire.dialects.media import request_fields, seconds_of
from penstock.gateway.wire.dialects.request_body import form_fields, form_type

NAMES = [dialect.name for dialect in DIALECTS if dialect.media]
PNG = base64.b64encode(b"\x89PNG" + bytes(40)).decode()
USAGE = {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7}
EVENTS: list[dict[str, Any]] = [
    {"type": "transcript.text.delta", "delta": "a "},
    {"type": "transcript.text.done", "text": "a b", "usage": USAGE},
    {"type": "transcript.text.segment", "text": "a", "speaker": "A"},
    {"type": "speech.audio.delta", "audio": PNG},
    {"type": "speech.audio.done", "usage": USAGE},
    {"type": "image_generation.partial_image", "b64_json": PNG},
    {"type": "image_generation.completed", "b64_json": PNG, "usage": USAGE},
    {"type": "error", "error": {"message": "No."}},
    {"type": "new.kind", "text": 7, "usage": "?"},
]
ANSWERS: list[Any] = [
    {"text": "a b", "usage": {"type": "duration", "seconds": 2.5}},
    {"text": "a", "duration": "3.5", "segments": [{"text": "a"}]},
    {"text": None, "usage": USAGE | {"input_token_details": {"audio_tokens": 2}}},
    {"created": 1, "data": [{"b64_json": PNG}, {"url": "https://x/1.png", "revised_prompt": "p"}], "usage": USAGE},
    {"data": [], "svg_usage": USAGE | {"model": "gpt-6", "reasoning_tokens": 1}},
    {"data": "odd", "usage": [], "duration": {}},
    {"id": "video_1", "object": "video", "model": "sora-2", "seconds": "8", "status": "queued"},
    {"error": {"message": "No."}},
    [],
]
REQUEST = b'{"model": "m", "input": "Hello"}'


def agrees(name: str, response: bytes, stream: bool, request: bytes = REQUEST) -> None:
    facts, turn = by_name(name).facts(request, response, stream), by_name(name).read(request, response, stream)
    assert (facts.model_served, facts.response_id) == (turn.model_served, turn.response_id)
    assert (facts.failed in ("stream_error", "error_body")) == (turn.error is not None)
    if facts.failed is None:
        assert facts.usage == turn.usage


@given(st.sampled_from(NAMES), st.lists(st.sampled_from(EVENTS), max_size=6), st.integers(0, 400))
def test_a_summary_says_what_a_turn_says_of_a_stream(name: str, events: list[Any], cut: int) -> None:
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
    agrees(name, body[: max(len(body) - cut, 0)], True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("answer", ANSWERS)
def test_and_of_a_plain_answer(name: str, answer: Any) -> None:
    agrees(name, json.dumps(answer).encode(), False)


@given(st.sampled_from(NAMES), st.binary(max_size=200), st.binary(max_size=200), st.booleans())
def test_nothing_raises_on_odd_bytes(name: str, request: bytes, response: bytes, stream: bool) -> None:
    dialect = by_name(name)
    _ = dialect.facts(request, response, stream)
    _ = dialect.read(request, response, stream)
    _ = list(dialect.passages(request, response, stream, lambda: True))
    most = dialect.most(request)
    assert most is not None
    assert (most.input_tokens or 0) >= 0


def test_an_svg_s_tokens_are_a_part_with_its_own_model() -> None:
    body = json.dumps({"data": [{"b64_json": PNG}], "usage": USAGE, "svg_usage": USAGE | {"model": "gpt-6"}}).encode()
    usage = by_name("images").facts(REQUEST, body, False).usage
    billed = {"images": 1, "output_image": 4, "parts": [["gpt-6", 3, 4, None, None, None]]}
    assert usage == Usage(input_tokens=6, output_tokens=8, billed=billed)


# -- forms -------------------------------------------------------------------------------------------------------------

NAMED = st.text(st.characters(codec="latin-1", categories=("L", "N")), min_size=1, max_size=9)
PARTS = st.lists(st.tuples(NAMED, st.binary(max_size=60), st.none() | NAMED), max_size=5)


def form(parts: list[tuple[str, bytes, str | None]], mark: str = "Xq7") -> bytes:
    pieces: list[bytes] = []
    for name, value, file in parts:
        said = f'form-data; name="{name}"' + (
            "" if file is None else f'; filename="{file}"\r\nContent-Type: Audio/WAV; x'
        )
        pieces.append(f"--{mark}\r\nContent-Disposition: {said}\r\n\r\n".encode() + value + b"\r\n")
    return b"".join([*pieces, f"--{mark}--\r\n".encode()])


def test_what_a_form_may_cost_follows_from_its_own_boundary() -> None:
    """What stands before the first boundary is no part of a form, and of several values the highest may count."""
    file, kind = form([("file", b"x" * 4000, "a.mp3")]), 'multipart/form-data; boundary="Xq7"'
    for body in (file, form([("model", b"whisper-1", None)], mark="A") + file):
        most = by_name("transcription").most(body, kind)
        assert most is not None
        assert most.billed == {"seconds": 2.0}
    images = form([("n", b"1", None), ("n", b" 10", None)])
    most = by_name("images").most(form([("n", b"2", None)], mark="A") + images, kind)
    assert most is not None
    assert most.billed == {"images": 10}


def test_a_wav_file_is_as_long_as_its_samples() -> None:
    """Whatever else it says."""
    wav = bytearray(b"RIFF....WAVEfmt \x10\0\0\0\1\0\1\0\x80\x3e\0\0\0\x7d\0\0\2\0")
    assert seconds_of(bytes(wav), 32000) == 1.0
    wav[28:32] = b"\xff" * 4
    assert seconds_of(bytes(wav), 32000) == 1.0
    wav[20:22] = b"U\0"  # MP3
    assert seconds_of(bytes(wav), 32000) == 16.0


@given(PARTS)
def test_a_form_is_read_without_its_content_type(parts: list[tuple[str, bytes, str | None]]) -> None:
    body = form(parts)
    kind = form_type(body) if parts else 'multipart/form-data; boundary="Xq7"'
    assert kind is not None
    found = [(it.name, body[it.start : it.end], it.file, it.kind) for it in form_fields(body, kind)]
    assert found == [(name, value, file, "" if file is None else "audio/wav") for name, value, file in parts]


@given(PARTS, st.data())
def test_a_form_that_is_cut_off_or_changed_is_no_other_form(
    parts: list[tuple[str, bytes, str | None]], data: Any
) -> None:
    body = form([*parts, ("model", b"whisper-1", None)])
    at = data.draw(st.integers(0, len(body) - 6))
    problems: list[str] = []
    read = request_fields(body[:at], problems)
    assert problems
    assert read.get("model") in (
        None,
        *(value.decode("utf-8", "replace") for name, value, _ in parts if name == "model"),
    )


HOSTILE = [
    b'--b\r\nContent-Disposition: form-data; filename="; name=\\"model\\""; name="file"\r\n\r\nx\r\n--b--',
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a\r\n\r\n--b--',
    b"--b\r\n" * 2000,
    b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n--bb\r\n--b--',
    b"--b\r\n" + b"x" * 20000,
    b"--b\r\n\r\n--b\r\n\r\n\r\n--b--",
]


@pytest.mark.parametrize("body", HOSTILE)
def test_hostile_forms_name_no_model(body: bytes) -> None:
    assert request_fields(body, []).get("model") is None
    assert by_name("transcription").model(body) is None
