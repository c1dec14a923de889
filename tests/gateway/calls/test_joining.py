"""Conversations that another worker keeps."""

from __future__ import annotations

import pytest

from penstock.gateway.calls.address import Address
from penstock.gateway.calls.admitted import Admitted
from penstock.gateway.calls.conversations import Answer, Found
from penstock.gateway.calls.fingerprints import EMPTY, Fingerprints, Story
from penstock.gateway.calls.joining import Joining
from penstock.gateway.dialects.chat import Chat
from penstock.gateway.dialects.responses import Responses
from penstock.gateway.http.client_connection import Hints


class Elsewhere:
    """The worker that keeps them, which only hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int | None]] = []

    async def find(self, story: Story, previous: str | None, answers: bool, hints: Hints) -> Found:
        raise AssertionError("nobody asks")

    def remember(
        self, found: Found, key: int | None, hints: Hints, rollout: str, answer: Answer, response: str | None
    ) -> None:
        self.heard.append((rollout, key))

    def undo(self, found: Found, key: int | None) -> None:
        self.heard.append(("undone", key))


async def test_who_keeps_them_hears_of_the_end_of_a_call_before_its_client_does() -> None:
    """The last bytes are written after this: the client may go on in that worker while this one does not run."""
    keeper, chat = Elsewhere(), Chat()
    joining = Joining(keeper)
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
    call = Admitted(Address("r1", origin="implicit"), chat, "/v1/chat/completions", body)
    call.is_read(Fingerprints().read(chat, body))
    assert call.story is not None
    joining.remember_soon(call, Hints(), Answer(lambda: b"{}", False, 2, chat.replies))
    joining.remember_soon(call, Hints(), None)
    assert keeper.heard == [("r1", call.story.key), ("undone", call.story.key)]


@pytest.mark.parametrize("answer", [None, b"{}"])
async def test_who_keeps_them_hears_of_the_end_of_a_call_that_nobody_can_continue(answer: bytes | None) -> None:
    """It has noted that the call is under way, and would note it for ever."""
    keeper, responses = Elsewhere(), Responses()
    joining = Joining(keeper)
    body = b'{"model": "m", "previous_response_id": "resp_1", "input": "go on"}'
    call = Admitted(Address("r1", origin="implicit"), responses, "/v1/responses", body)
    call.is_read(Fingerprints().read(responses, body))
    call.story, call.found = EMPTY, Found("r1", number=7)
    said = None if answer is None else Answer(lambda: answer, False, 2, responses.replies)
    joining.remember(call, Hints(), said)
    assert keeper.heard == [("undone", None)]
