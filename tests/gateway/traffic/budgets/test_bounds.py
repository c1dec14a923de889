"""How much a request may use at most: of every format, and of requests that are none."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.traffic.budgets.claims import ADDED, IMAGE, PromptCounter, TokenBound, bound
from penstock.gateway.wire.dialects import find
from penstock.gateway.wire.dialects.loose_json import peek

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(300_000)).decode()
JPEG = base64.b64encode(b"\xff\xd8\xff\xe0" + bytes(range(256)) * 900).decode()
PATHS = {
    "text_completions": "/v1/complete",
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "embeddings": "/v1/embeddings",
    "gemini": "/v1beta/models/gemini-2.5-pro:generateContent",
    "converse": "/model/anthropic.claude/converse",
    "invoke": "/model/meta.llama/invoke",
}


def prompt_tokens(body: bytes) -> int:
    return PromptCounter().tokens("r", body)


def asked(api: str, body: Any) -> TokenBound:
    return bound(find("POST", PATHS[api]), peek(json.dumps(body).encode()), 0)


@pytest.mark.parametrize(
    ("api", "body", "answer", "answers"),
    [
        ("chat", {"max_tokens": 7}, 7, 1),
        ("chat", {"max_completion_tokens": 7, "n": 3}, 7, 3),
        ("chat", {"max_completion_tokens": 7, "max_tokens": 9}, 9, 1),
        ("chat", {"max_tokens": 7.0}, 7, 1),
        ("chat", {"max_tokens": "7"}, 7, 1),
        ("chat", {"max_tokens": None, "n": None}, None, 1),
        ("chat", {"max_tokens": -1, "n": 0}, None, 1),
        ("chat", {"max_tokens": True}, None, 1),
        ("chat", {"max_tokens": 1e300, "n": "many"}, None, 1),
        ("chat", {"max_tokens": 7, "generationConfig": "none", "inferenceConfig": [1]}, 7, 1),
        ("chat", [], None, 1),
        ("completions", {"max_tokens": 7, "prompt": ["a", "b"], "n": 2}, 7, 4),
        ("completions", {"max_tokens": 7, "prompt": [1, 2, 3], "best_of": 5}, 7, 5),
        ("completions", {"max_tokens": 7, "prompt": [[1, 2], [3]]}, 7, 2),
        ("completions", {"max_tokens": 7, "prompt": "a"}, 7, 1),
        ("responses", {"max_output_tokens": 7}, 7, 1),
        ("messages", {"max_tokens": 7}, 7, 1),
        ("embeddings", {"input": "a"}, 0, 1),
        ("gemini", {"generationConfig": {"maxOutputTokens": 7, "candidateCount": 2}}, 7, 2),
        ("gemini", {"generation_config": {"max_output_tokens": 7, "candidate_count": 2}}, 7, 2),
        ("converse", {"inferenceConfig": {"maxTokens": 7}}, 7, 1),
        ("converse", {"inferenceConfig": {"maxTokens": {}}}, None, 1),
        ("invoke", {"inferenceConfig": {"max_new_tokens": 7}}, 7, 1),
        ("invoke", {"max_gen_len": 7}, 7, 1),
        ("text_completions", {"max_tokens_to_sample": 7}, 7, 1),
    ],
)
def test_the_limit_of_the_answer_is_found_where_each_api_has_it(api: str, body: Any, answer: int, answers: int) -> None:
    found = asked(api, body)
    assert (found.answer, found.answers) == (answer, answers)
    assert found.answer_tokens == answers * (8192 if answer is None else answer)


@given(st.binary(max_size=300) | st.from_regex(rb'\{"max_tokens":.{0,40}\}', fullmatch=True))
def test_a_request_that_is_none_has_a_bound_too(body: bytes) -> None:
    for path in PATHS.values():
        found = bound(find("POST", path), peek(body), prompt_tokens(body))
        assert found.prompt >= len(body)
        assert found.answers >= 1


@given(st.text())
def test_a_prompt_has_no_more_tokens_than_bytes(said: str) -> None:
    """Not even where each byte is one, as of scripts that a tokenizer does not know."""
    body = json.dumps({"messages": [{"role": "user", "content": said}]}, ensure_ascii=False).encode("utf-8", "replace")
    assert prompt_tokens(body) >= len(said.encode("utf-8", "replace")) + ADDED


@pytest.mark.parametrize("picture", [PNG, JPEG])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,PICTURE"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "PICTURE"}},
        {"inlineData": {"mimeType": "image/png", "data": "PICTURE"}},
        {"type": "input_image", "image_url": "data:image/jpeg;base64,PICTURE"},
    ],
)
def test_the_tokens_of_an_image_do_not_follow_from_its_bytes(picture: str, part: Any) -> None:
    said = json.dumps({"messages": [{"content": [part, part]}]}).replace("PICTURE", picture)
    for body in (said, said.replace("/", "\\/")):
        assert 2 * IMAGE < prompt_tokens(body.encode()) < 2 * IMAGE + ADDED + 500


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}},
        {"type": "input_file", "file_id": "file-1"},
        {"fileData": {"fileUri": "gs://bucket/film.mp4"}},
        {"previous_response_id": "resp_1"},
        {"type": "image", "source": {"type": "url", "url": "https://example.com/cat.png"}},
        {"type": "image_url", "image_url": {"detail": "high", "url": "https://example.com/cat.png"}},
        {"type": "input_image", "image_url": "https://example.com/cat.png"},
        {"image": {"source": {"s3Location": {"uri": "s3://bucket/cat.png"}}}},
    ],
)
def test_what_is_only_named_is_counted_as_an_image(part: Any) -> None:
    body = json.dumps({"input": [part]}).encode()
    assert prompt_tokens(body) == len(body) + ADDED + IMAGE


def test_words_about_images_are_words() -> None:
    words = json.dumps({"image_url": "https://example.com", "data": "iVBORw0KGgo"})
    said = json.dumps({"content": words, "url": {"a": "b"}, "input": {"url": "https://example.com"}})
    assert prompt_tokens(said.encode()) == len(said) + ADDED


PARTS = st.lists(
    st.one_of(
        st.integers(1, 9000).map(lambda length: {"type": "text", "text": ('a "quoted" word\n' * length)[:length]}),
        st.integers(64, 20_000).map(lambda length: {"data": "iVBORw0KGgo" + "A" * length}),
        st.just({"file_id": "file-1"}),
    ),
    min_size=1,
    max_size=12,
)


@given(PARTS, st.integers(0, 20_000), st.booleans())
def test_of_a_conversation_that_grows_only_what_is_new_is_read(parts: list[Any], tools: int, left: bool) -> None:
    """And what is found is what a first look at all of it finds."""
    prompts = PromptCounter()
    for count in range(1, len(parts) + 1):
        told = {"messages": parts[int(left) : count], "tools": "t" * tools}
        body = json.dumps(told).encode()
        assert prompts.tokens("r", body) == prompt_tokens(body)


APART = [
    '{"image_url": {"detail": "low", "url": "https://example.com/cat.png"}}',
    '{"source": {"type": "url", "url": "https://example.com"}}',
    '{"file_id": "file-1"}',
    '{"s3Location": {"uri": "s3://bucket/cat.png"}}',
]


@given(st.sampled_from(APART), st.integers(0, 60))
def test_what_is_counted_apart_is_found_where_prompts_part_in_the_middle_of_it(part: str, at: int) -> None:
    """Those before are the same up to there, and have nothing there that is counted so."""
    prompts, text = PromptCounter(), "a word." * 4000
    for end in ("data:", "?", part[at:]):
        body = f"{text}{part[:at]}{end}".encode()
        assert prompts.tokens("r", body) == prompt_tokens(body)


def test_no_more_than_some_prompts_are_kept() -> None:
    prompts, body = PromptCounter(), b"a" * (1 << 20)
    for number in range(40):
        assert prompts.tokens(number, body) == len(body) + ADDED
    assert list(prompts._kept) == list(range(8, 40))
    assert prompts.tokens("huge", b"a" * (33 << 20)) == (33 << 20) + ADDED
    assert prompts._bytes == sum(len(kept) for kept, _ in prompts._kept.values()) == 32 << 20
