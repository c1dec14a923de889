"""Spans of Claude's API are joined with the calls that they tell of; links of Agent Lightning lead rewards to calls."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.otlp import Inlet, Made, names, partial, request
from fakes.waiting import until

from penstock.gateway.followers.otlp.provider_spans import LOOKUPS
from penstock.gateway.model.facts import REQUEST_ID
from penstock.gateway.model.span import span_tree
from penstock.gateway.tape.hosted_sessions import record_events
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.view import TapeView
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.hosted import session_facts

CLAUDE = {"service.name": "claude-platform"}
TRACE = "ab" * 16


async def called(
    inlet: Inlet, rollout: str, response: str | None, start: int = 1, attributes: dict[str, Any] | None = None
) -> None:
    """A call that was answered, or got an error."""
    entry = SpanEntry(rollout, "a1", status="ok" if response else "error", start_ns=start, end_ns=start + 9)
    entry.dialect, entry.response_id, entry.attributes = "messages", response, attributes
    await inlet.dispatcher.add([entry])


def served(name: str, value: str) -> list[Made]:
    """What the API tells of a request: the request, and the run of a tool in it."""
    whole = Made("anthropic.messages.create", {name: value}, CLAUDE, TRACE, "11" * 8)
    return [whole, Made("anthropic.tool_use web_search", {}, CLAUDE, TRACE, "22" * 8, "11" * 8)]


async def sent(inlet: Inlet, *spans: Made) -> None:
    answer = await inlet.post(request(*spans).SerializeToString())
    assert (answer.status, answer.body) == (200, b"")


NAMES = ["anthropic.messages.create", "anthropic.tool_use web_search"]


async def test_the_response_tells_the_call(inlet: Inlet) -> None:
    await called(inlet, "r1", "msg_1")
    await called(inlet, "r2", "msg_2")
    await sent(inlet, *served("gen_ai.response.id", "msg_1"))
    assert names(inlet.spans("r1")) == NAMES
    tree = span_tree(list(inlet.store.spans("r1")))
    call, whole, tool = inlet.store.spans("r1")
    assert tree == {None: [call], call.sequence: [whole], whole.sequence: [tool]}
    (attempt,) = inlet.store.attempts("r1")
    assert (attempt.totals.calls, attempt.totals.input_tokens) == (1, 0), "its tokens are the call's own"
    assert inlet.counted == {("accepted",): 2}


async def test_the_request_tells_a_call_without_a_response(inlet: Inlet) -> None:
    await called(inlet, "r1", None, attributes={REQUEST_ID: "req_1"})
    await sent(inlet, *served(REQUEST_ID, "req_1"))
    assert names(inlet.spans("r1")) == NAMES


async def test_the_session_tells_its_rollout(inlet: Inlet) -> None:
    told = session_facts(
        by_name("managed_sessions"), "/v1/sessions/sesn_1", b'{"type": "session", "id": "sesn_1"}', False, 1
    )
    assert told is not None
    entry = SpanEntry("reader", "a1", start_ns=1)
    await inlet.dispatcher.run(lambda tape: record_events(tape, entry, told, ("home", "a1"), None))
    await sent(inlet, *served("anthropic.session.id", "sesn_1"))
    assert names(inlet.spans("home")) == NAMES


async def test_spans_wait_for_their_call(inlet: Inlet) -> None:
    """They are on the tape meanwhile; those of calls that never pass here are dropped."""
    await sent(inlet, *served("gen_ai.response.id", "msg_1"))
    await sent(inlet, *served("gen_ai.response.id", "msg_1"))  # the exporter has heard no answer
    await called(inlet, "r1", "msg_1")
    await until(lambda: _are(inlet, "r1"))
    assert not [*inlet.store.records("hosted", b"w")]
    assert inlet.counted == {("accepted",): 4}


async def test_secrets_do_not_wait_on_the_tape(inlet: Inlet) -> None:
    key = "sk-ant-api03-" + "Ab1_" * 12
    said = {"gen_ai.response.id": "msg_1", "error.message": f"no such key: {key}"}
    await sent(inlet, Made(f"create {key}", said, CLAUDE, TRACE, "11" * 8))
    ((_, waiting),) = inlet.store.records("hosted", b"w")
    assert b"no such key" in waiting
    assert key.encode() not in waiting


async def test_spans_of_calls_that_never_come_hold_up_no_others(inlet: Inlet) -> None:
    """More than are looked for at once wait before it."""
    foreign = [
        Made("anthropic.messages.create", {"gen_ai.response.id": f"msg_x{at}"}, CLAUDE, span=f"{at:016x}")
        for at in range(1, LOOKUPS + 9)
    ]
    await sent(inlet, *foreign)
    await sent(inlet, *served("gen_ai.response.id", "msg_1"))
    await called(inlet, "r1", "msg_1")
    await until(lambda: _are(inlet, "r1"))


async def test_the_calls_of_many_spans_are_one_search(inlet: Inlet, monkeypatch: pytest.MonkeyPatch) -> None:
    search, texts = TapeView.log_segments_with, list[int]()

    def counted(self: TapeView, wanted: list[bytes], *rest: Any) -> Any:
        texts.append(len(wanted))
        return search(self, wanted, *rest)

    monkeypatch.setattr(TapeView, "log_segments_with", counted)
    await called(inlet, "r1", "msg_3")
    await sent(
        inlet,
        *(Made("anthropic.x", {"gen_ai.response.id": f"msg_{at}"}, CLAUDE, span=f"{at:016x}") for at in range(1, 9)),
    )
    assert texts[0] == 8
    assert names(inlet.spans("r1")) == ["anthropic.x"]


async def _are(inlet: Inlet, rollout: str) -> bool:
    return sorted(map(str, names(inlet.spans(rollout)))) == NAMES


async def test_other_spans_without_a_rollout_are_refused(inlet: Inlet) -> None:
    await called(inlet, "r1", "msg_1")
    answer = await inlet.post(request(Made("mine", {"gen_ai.response.id": "msg_1"})).SerializeToString())
    assert partial(answer)[0] == 1


# -- links of rewards ------------------------------------------------------------------------------------------------


def judged(links: dict[str, str], trace: str = TRACE) -> Made:
    """A reward with links, as Agent Lightning writes it."""
    attributes: dict[str, Any] = {"agentlightning.reward.0.name": "x", "agentlightning.reward.0.value": 0.5}
    for number, (key, value) in enumerate(links.items()):
        attributes |= {
            f"agentlightning.link.{number}.key_match": key, f"agentlightning.link.{number}.value_match": value,
        }  # fmt: skip
    at = 1_790_000_009_000_000_000
    return Made("agentlightning.annotation", attributes, {"penstock.rollout_id": "r1"}, trace, start=at, end=at)


@pytest.mark.parametrize(
    ("links", "span"),
    [
        ({"gen_ai.response.id": "msg_2"}, 2),
        ({"conversation_id": "chat-42"}, 1),
        ({"trace_id": TRACE, "span_id": "33" * 8}, 1),
        ({"conversation_id": "chat-42", "gen_ai.response.id": "msg_2"}, None),
        ({"conversation_id": "chat-43"}, None),
        ({}, None),
    ],
)
async def test_links_lead_a_reward_to_its_call(inlet: Inlet, links: dict[str, str], span: int | None) -> None:
    start = 1_790_000_000_000_000_000
    await called(inlet, "r1", "msg_1", start + 5)
    await called(inlet, "r1", "msg_2", start + 10**9 * 5)
    operation = Made(
        "agentlightning.operation", {"conversation_id": "chat-42"}, {"penstock.rollout_id": "r1"}, TRACE, "33" * 8
    )
    await sent(inlet, operation)
    answer = await inlet.post(request(judged(links)).SerializeToString())
    (reward,) = inlet.rewards("r1")
    assert (reward.value, reward.span) == (0.5, span)
    assert ("name no call of its attempt" in answer.body.decode("latin-1")) == (bool(links) and span is None)
