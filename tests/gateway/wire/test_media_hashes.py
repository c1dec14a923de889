"""Media in bodies become hashes, and nothing else does."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.wire.dialects.loose_json import MOST_OBJECTS
from penstock.gateway.wire.dialects.parts import MediaHash
from penstock.gateway.wire.media_hashes import hash_media

SOUND = b"RIFF\0\0\0\0WAVE" + bytes(range(256))
TOLD = base64.b64encode(SOUND).decode()
EVENTS = "text/event-stream"


def marked(kind: str = "audio/wav", media: bytes = SOUND) -> str:
    return str(MediaHash(hashlib.sha256(media).hexdigest(), len(media), kind))


PLACES = [
    ('{"type": "input_audio", "input_audio": {"data": "@", "format": "wav"}}', "audio/wav"),
    ('{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "@"}}', "image/png"),
    ('{"image": {"format": "png", "source": {"bytes": "@"}}}', "audio/wav"),
    ('{"inlineData": {"mimeType": "audio/l16", "data": "@"}}', "audio/l16"),
    ('{"choices": [{"delta": {"audio": {"data": "@"}}}]}', "audio/wav"),
    ('{"data": [{"b64_json": "@"}]}', "audio/wav"),
    ('{"type": "response.output_audio.delta", "delta": "@"}', "audio/wav"),
    ('{"type": "input_audio_buffer.append", "audio": "@"}', "audio/wav"),
    ('{"type": "image_generation_call", "result": "@"}', "audio/wav"),
    ('{"type": "image", "mimeType": "image/gif", "data": "@"}', "image/gif"),
]


@pytest.mark.parametrize(("place", "kind"), PLACES)
def test_base64_at_a_place_of_media_is_hashed(place: str, kind: str) -> None:
    for body, form in (
        (place.replace("@", TOLD), "application/json"),
        (f"data: {place.replace('@', TOLD)}\n\ndata: [DONE]\n\n", EVENTS),
        (place.replace("@", TOLD.replace("/", "\\/")), "application/json; charset=utf-8"),
    ):
        made = hash_media(body.encode(), form)
        assert made.replaced == 1
        assert made.body.decode().removeprefix("data: ").split("\n")[0] == place.replace("@", marked(kind))


@pytest.mark.parametrize(
    "kept",
    [
        {"data": [{"object": "embedding", "embedding": TOLD}]},
        {"type": "redacted_thinking", "data": TOLD},
        {"type": "reasoning", "encrypted_content": TOLD},
        {"thoughtSignature": TOLD, "type": "response.output_text.delta", "delta": TOLD},
        {"type": "function_call_output", "result": TOLD, "text": TOLD, "audio": "not base64 " * 20},
    ],
)
def test_other_base64_stays(kept: Any) -> None:
    body = json.dumps(kept).encode()
    made = hash_media(body)
    assert made.replaced == 0
    assert made.body is body


def test_in_more_than_is_read_all_base64_is_hashed() -> None:
    said = '{"x": "@", "audio": "data:audio/wav;base64,@", "@": "words", "pad": [' + ",".join(["{}"] * MOST_OBJECTS)
    for end in ("]}", '], "data": "@"}', '], "data": "@'):
        made = hash_media((said + "," + end).replace("@", TOLD).encode())
        marks = f"{said.replace('audio/wav;base64,@', '@', 1)},{end}".replace("data:@", marked()).replace("@", marked())
        assert made.body.decode() == marks.replace(f'"{marked()}": "words"', f'"{TOLD}": "words"')
        assert made.replaced == 2 + end.count("@")


def test_data_urls_are_hashed_wherever_they_stand() -> None:
    text = f"see ![it](data:image/png;base64,{TOLD}) and 'data:;base64,{TOLD}'"
    for body in (text, json.dumps({"content": text}), f"data: {json.dumps({'content': text, 'embedding': TOLD})}\n\n"):
        made = hash_media(body.encode(), "text/plain")
        assert made.replaced == 2
        assert f"![it]({marked('image/png')}) and '{marked()}'" in made.body.decode()


def test_bodies_that_are_media() -> None:
    for kind, told in (("audio/mpeg", "audio/mpeg"), ("", "audio/wav"), ("application/octet-stream", "audio/wav")):
        assert hash_media(SOUND, kind) == (marked(told).encode(), 1)
    text = b'{"custom_id": "1"}\n' * 20
    assert hash_media(text, "application/octet-stream").body is text
    frames = b"\0\0\0\x10" * 40
    assert hash_media(frames, "application/vnd.amazon.eventstream").body is frames


def test_media_in_the_lines_of_a_batch_s_file() -> None:
    lines = b"".join(b'{"custom_id": "%d", "body": {"b64_json": "%b"}}\n' % (at, TOLD.encode()) for at in range(3))
    hashed = lines.replace(TOLD.encode(), marked().encode())
    assert hash_media(lines, "application/octet-stream") == (hashed, 3)
    head = 'name="file"; filename="a.jsonl"'
    assert hash_media(form((head, lines)), "multipart/form-data; boundary=b") == (form((head, hashed)), 3)


def form(*parts: tuple[str, bytes], mark: str = "b") -> bytes:
    pieces = [
        f"--{mark}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + it + b"\r\n" for head, it in parts
    ]
    return b"".join([*pieces, f"--{mark}--\r\n".encode()])


@given(st.binary(min_size=64), st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=200))
def test_of_forms_only_files_are_hashed(media: bytes, said: str) -> None:
    sound = media + b"\xff\0"
    head = 'name="file"; filename="name=x; a.wav"\r\nContent-Type: audio/wav'
    made = hash_media(
        form(('name="prompt"', said.encode()), (head, sound), mark="q7Zx"), 'multipart/form-data; boundary="q7Zx"'
    )
    assert made == (form(('name="prompt"', said.encode()), (head, marked("audio/wav", sound).encode()), mark="q7Zx"), 1)


@given(st.integers(0, len(form(('name="f"', SOUND)))))
def test_of_a_form_that_is_cut_off_no_media_stay(at: int) -> None:
    body = form(('name="f"', SOUND))[:at]
    assert SOUND[:80] not in hash_media(body, "multipart/form-data; boundary=b").body or len(body) < 180


@given(
    st.binary(max_size=400), st.sampled_from(["application/json", EVENTS, "multipart/form-data; boundary=b", "", "x"])
)
def test_nothing_raises_and_what_has_no_media_is_the_same_object(body: bytes, kind: str) -> None:
    made = hash_media(body, kind)
    assert (made.body is body) == (made.replaced == 0)


@given(
    st.recursive(
        st.text(max_size=90) | st.integers(), lambda it: st.dictionaries(st.text(max_size=9), it) | st.lists(it)
    )
)
def test_json_stays_json(value: Any) -> None:
    body = json.dumps({"a": value, "b64_json": TOLD}).encode()
    assert json.loads(hash_media(body).body) == {"a": value, "b64_json": marked()}
