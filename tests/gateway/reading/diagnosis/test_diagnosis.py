"""What `penstock doctor` says: each reason on its own, the merging of calls, odd bytes, and how it looks.

`agents.json` has what Claude Code 2.1.330 and 2.1.197 (with 36 tools of a server) and Codex 0.169.0 sent in sessions of
three calls; its long texts are cut.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from fakes.goldens import check_widths, text_of
from fakes.memory_tape import T0, call, chat_exchange, exchange
from fakes.mistakes import tells
from fakes.tool_calls import PAGE, TASK, Recorded, carried, model, ran, wanted
from fakes.wire_bodies import sse
from hypothesis import given
from hypothesis import strategies as st

from penstock.console.views import queue
from penstock.gateway.model.answers import Diagnosis, Finding
from penstock.gateway.model.codes import FindingCode
from penstock.gateway.model.facts import WEBSOCKET
from penstock.gateway.model.rollout import Attempt, AttemptStatus, Reward, RolloutStatus, RolloutSummary, Totals
from penstock.gateway.model.span import Span
from penstock.gateway.model.tools import ToolList, UnansweredCall
from penstock.gateway.model.turn import Exchange
from penstock.gateway.reading.diagnosis import diagnosis as module
from penstock.gateway.reading.diagnosis.diagnosis import BaseUrlEffects, diagnose
from penstock.gateway.reading.diagnosis.findings import HARMLESS
from penstock.gateway.reading.diagnosis.tool_uses import tools_used
from penstock.gateway.wire.dialects.tokens import length, read_tokens

DOCS = Path(__file__).parents[4] / "docs" / "doctor.md"
Json = dict[str, Any]
Messages = list[Json]
ASK: Messages = [{"role": "user", "content": "2+2?"}]
MORE: Messages = [*ASK, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}]


def answer(
    ids: Sequence[int],
    prompt: Sequence[int] | None = (1, 2),
    logprobs: int | None = None,
    usage: tuple[int, int] | None = None,
    logprob: Any = -0.5,
) -> Json:
    """The parts of a response that vLLM adds. `usage`: tokens of prompt and answer, as the engine counts them;
    `logprob`: that of the first token."""
    content = [{"token": "x", "logprob": -0.5} for _ in range(len(ids) if logprobs is None else logprobs)]
    content[:1] = [{"token": "x", "logprob": logprob}] * bool(content)
    choice: Json = {"index": 0, "finish_reason": "stop", "logprobs": {"content": content}, "token_ids": list(ids)}
    told = {} if usage is None else {"usage": dict(zip(("prompt_tokens", "completion_tokens"), usage, strict=True))}
    return {"prompt_token_ids": None if prompt is None else list(prompt), "choices": [choice]} | told


def good(messages: Messages = ASK, text: str = "4", **about: Any) -> Exchange:
    """A call with all that training wants."""
    wanted: Json = {"ids": (3, 4)} | about
    given = answer(**wanted)
    given["choices"][0]["message"] = {"role": "assistant", "content": text}
    return exchange(json.dumps({"model": "m", "messages": messages}).encode(), json.dumps(given).encode())


def rollout(gaps: int = 0, reward: float | None = 1.0, **about: Any) -> RolloutSummary:
    own = {name: about.pop(at) for at, name in (("attempt_status", "status"), ("ended_ns", "ended_ns")) if at in about}
    own.setdefault("status", AttemptStatus.SUCCEEDED)
    attempt = Attempt(rollout="r1", id="a1", reward=reward, totals=Totals(gaps=gaps), **own)
    usual: Json = {"origin": "queued", "status": RolloutStatus.SUCCEEDED, "attempts": [attempt], "reward": reward}
    return RolloutSummary(id="r1", **(usual | about))


def span(sequence: int = 1, **about: Any) -> Span:
    about.setdefault("model", "m")
    return call(sequence, **about)


def judge(*calls: tuple[Span, Exchange | None], of: RolloutSummary | None = None, **about: Any) -> Diagnosis:
    bytes_of = {head.sequence: found for head, found in calls}
    return diagnose(of or rollout(), [head for head, _ in calls], lambda s: bytes_of[s.sequence], **about)


def found(diagnosis: Diagnosis) -> list[Finding]:
    attempt = diagnosis.attempts[-1]
    return [*diagnosis.findings, *attempt.findings, *(f for one in attempt.calls for f in one.findings)]


def codes(diagnosis: Diagnosis) -> list[str]:
    return [finding.code for finding in found(diagnosis)]


# --- one reason at a time ---


def test_a_good_call_can_be_trained_on() -> None:
    made = judge((span(), good(usage=(2, 2), logprob=1e-8)))
    assert (made.trainable, codes(made)) == (True, [])
    assert made.verdict == "r1 can be trained on: 1 of 1 calls, 1 sequence, reward 1.0."
    (one,) = made.attempts[0].calls
    assert (one.prompt_tokens, one.output_tokens, one.trainable, one.goes_on) == (2, 2, True, None)


@pytest.mark.parametrize(
    ("head", "bytes_of", "code", "fix"),
    [
        (span(), good(prompt=None), "no_token_ids", "train = true on the [[route]] of m"),
        (span(), good(ids=(), logprobs=2), "no_token_ids", "penstock requeue r1"),
        (span(), chat_exchange(ASK, {"content": "4"}), "no_token_ids", "train = true on the [[route]] of m"),
        (span(dialect="messages"), chat_exchange(ASK, {"content": "4"}), "no_token_ids", "speak chat completions"),
        (span(dialect="gemini"), exchange(b"{}", b'[{"candidates": []}]'), "no_token_ids", "speak chat completions"),
        (span(), good(logprobs=0), "no_logprobs", "train = true on the [[route]] of m"),
        (span(), good(logprobs=1), "no_logprobs", "train = true on the [[route]] of m"),
        (span(), good(usage=(2, 8)), "token_counts", "penstock show r1/a1#1 --raw response"),
        (span(), good(usage=(2, 1)), "token_counts", "update the engine"),
        (span(), good(usage=(50, 2)), "token_counts", "penstock show r1/a1#1 --raw response"),
        (span(), good(logprob=0.7), "no_logprobs", "train = true on the [[route]] of m"),
        (span(), good(logprob=-9999.0), "no_logprobs", "train = true on the [[route]] of m"),
        (span(), exchange(b"{}", b"\xff\x00"), "unreadable", "penstock show r1/a1#1 --raw response"),
        (span(), None, "unreadable", "penstock show r1/a1#1 --raw response"),
        (span(truncated=True), good(), "truncated", "limits.recorded_bytes"),
        (span(status="cancelled"), good(), "cancelled", "penstock requeue r1"),
        (span(status="error", error="http_429"), good(), "error", "penstock requeue r1"),
        (span(status="interrupted"), None, "interrupted", "penstock requeue r1"),
        (span(status="open", end_ns=None), None, "unfinished", "penstock show r1/a1"),
        (span(dialect="embeddings"), good(), "no_generation", ""),
    ],
)
def test_what_blocks_a_call(head: Span, bytes_of: Exchange | None, code: str, fix: str) -> None:
    made = judge((head, bytes_of))
    assert codes(made) == [code]
    assert found(made)[0].blocks
    assert fix in found(made)[0].fix
    assert not made.trainable
    assert made.verdict == f"r1 cannot be trained on: a1: {code} in 1 of 1 calls."


@pytest.mark.parametrize(
    ("about", "code", "fix"),
    [
        ({"reward": None}, "no_reward", "penstock reward r1/a1 VALUE"),
        ({"gaps": 2}, "gap", "penstock requeue r1"),
        ({"attempt_status": AttemptStatus.RUNNING}, "unfinished", "penstock show r1/a1"),
        ({"attempt_status": AttemptStatus.CANCELLED}, "cancelled", "penstock requeue r1"),
    ],
)
def test_what_blocks_an_attempt(about: Json, code: str, fix: str) -> None:
    made = judge((span(), good()), of=rollout(**about))
    assert codes(made) == [code]
    assert not made.trainable
    assert not made.attempts[0].calls[0].trainable
    assert found(made)[0].fix == fix
    assert found(made)[0].reason in made.verdict


OWN = Reward(value=0.5, source="agent", trusted=False)
STYLE = Reward(dimensions={"style": 1.0}, source="judge")


@pytest.mark.parametrize(
    ("said", "code", "told"),
    [
        (OWN, "untrusted_reward", "penstock reward r1/a1 0.5 --source judge"),
        (STYLE, "no_reward", "dimensions and no value"),
    ],
)
def test_rewards_that_do_not_count(said: Reward, code: str, told: str) -> None:
    head = call(2, kind="reward", name="reward", attributes=said.attributes())
    (only,) = found(judge((span(), good()), (head, None), of=rollout(reward=None)))
    assert (only.code, told in f"{only.reason} {only.fix}") == (code, True)


def test_a_call_after_the_end_is_late() -> None:
    made = judge((span(1), good()), (span(2), good()), of=rollout(ended_ns=T0 + 1_500_000_000))
    assert [call.trainable for call in made.attempts[0].calls] == [True, False]
    assert codes(made) == ["late"]


def test_the_model_of_most_calls_is_the_one_that_is_judged() -> None:
    calls = [(span(1), good()), (span(2, model="$(judge)"), good()), (span(3), good())]
    made = judge(*calls)
    assert (made.model, codes(made)) == ("m", ["other_model"])
    assert found(made)[0].fix == "penstock doctor r1 --model '$(judge)'"
    other = judge(*calls, model="$(judge)")
    assert [call.trainable for call in other.attempts[0].calls] == [False, True, False]


def test_some_findings_do_not_block() -> None:
    first, second = (span(n, versions={"policy": "v3"}, finish=end) for n, end in ((1, "length"), (2, None)))
    made = judge((first, good()), (second, good()))
    assert codes(made) == ["cut_off"]
    assert not any(finding.blocks for finding in found(made))
    assert made.attempts[0].trainable == 2


def test_an_engine_that_was_asked_and_gave_no_ids_is_the_wrong_one() -> None:
    asked = span(attributes={"penstock.captured": ["return_token_ids", "logprobs"]})
    (only,) = found(judge((asked, chat_exchange(ASK, {"content": "4"}))))
    assert (only.code, tells(only.fix, "an engine that gives them", "vLLM")) == ("no_token_ids", True), only.fix


def asking(**more: Any) -> Exchange:
    """A good call that set this."""
    answered = good().response_body
    return exchange(json.dumps({"model": "m", "messages": ASK} | more).encode(), answered)


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ({"tool_choice": "required"}, "forced", "(tool_choice required)"),
        ({"response_format": {"type": "json_object"}}, "forced", "(response_format json_object)"),
        ({"guided_regex": "[0-9]"}, "forced", "(guided_regex)"),
        ({"temperature": 0.7, "top_p": 0.9}, "sampling", "with temperature 0.7, top_p 0.9;"),
        ({"top_k": 20, "logit_bias": {"1": 2}}, "sampling", "with top_k 20, logit_bias;"),
    ],
)
def test_log_probabilities_that_are_not_the_policys_are_marked(more: Json, code: str, said: str) -> None:
    made = judge((span(), asking(**more)))
    assert [(f.code, f.blocks) for f in found(made)] == [(code, False)]
    assert said in found(made)[0].reason
    assert made.trainable


def test_a_call_that_is_left_to_the_model_has_no_mark() -> None:
    free = {"temperature": 1.0, "top_p": 1, "top_k": -1, "tool_choice": "auto", "response_format": {"type": "text"}}
    assert codes(judge((span(), asking(**free)))) == []


def test_what_fell_back_in_the_middle_is_not_trained_on() -> None:
    versions = ({"policy": "v3"}, {"policy": "v4"})
    made = judge(*((span(number, versions=one), good()) for number, one in enumerate(versions, 1)))
    assert codes(made) == ["mixed_versions"]
    (only,) = found(made)
    assert (only.blocks, tells(only.reason, "2 versions of policy", "v3, v4", "fell back")) == (True, True), only.reason
    # Two agents may have a version each.
    agents = ("planner", "critic")
    made = judge(*((span(n, versions=versions[n - 1], agent=agents[n - 1]), good()) for n in (1, 2)))
    assert codes(made) == []


def test_a_rollout_without_attempts() -> None:
    waiting = diagnose(rollout(status=RolloutStatus.QUEUING, attempts=[], reward=None), [], lambda _: None)
    assert tells(waiting.verdict, "r1 cannot be trained on", "waits in the queue")
    assert waiting.findings[0].fix == "penstock run -- COMMAND"


def test_an_agent_that_came_by_itself_need_not_be_finished() -> None:
    made = judge((span(), good()), of=rollout(origin="header", attempt_status=AttemptStatus.RUNNING))
    assert made.trainable
    failed = judge((span(status="error"), good()), of=rollout(origin="header"))
    assert found(failed)[0].fix == "run the agent again"


def test_too_many_calls_are_counted_and_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CALLS", 2)
    made = judge(*[(span(n), good()) for n in (1, 2)], (span(3), None))
    assert (made.skipped, len(made.attempts[0].calls), codes(made)) == (1, 2, [])


# --- which calls are one sequence ---


def test_a_prompt_that_begins_with_an_earlier_calls_tokens_goes_on_from_it() -> None:
    made = judge((span(1), good()), (span(2), good(MORE, prompt=(1, 2, 3, 4, 5), ids=(6,))))
    assert [call.goes_on for call in made.attempts[0].calls] == [None, 1]
    assert (codes(made), made.attempts[0].trainable, made.attempts[0].sequences) == ([], 2, 1)


ANEW = [(9, "retokenised", "from 3 on, in its answer"), (8, "template", "from 1 on, in its prompt")]


@pytest.mark.parametrize(("odd", "code", "where"), ANEW)
def test_messages_that_go_on_with_other_tokens_were_written_anew(odd: int, code: str, where: str) -> None:
    prompt = (1, 2, 3, odd, 5) if code == "retokenised" else (1, odd, 3, 4, 5)
    made = judge((span(1), good()), (span(2), good(MORE, prompt=prompt, ids=(6,))))
    assert codes(made) == [code]
    assert made.attempts[0].calls[1].begins == [code]
    assert tells(found(made)[0].reason, "go on from #1", f"the tokens differ {where}")
    assert (made.attempts[0].trainable, made.attempts[0].sequences) == (2, 2)


def test_what_an_exact_session_says_of_itself_is_told() -> None:
    plain, exact = [
        judge((span(1), good()), (span(2, attributes=told), good(MORE, prompt=(1, 2, 9), ids=(6,))))
        for told in (None, {"penstock.session": "s2", "penstock.session.began": "tools"})
    ]
    assert tells(found(plain)[0].fix, 'train = "exact"', "[[route]] of m", "penstock.toml")
    assert found(exact)[0].reason == found(plain)[0].reason + "; its session began anew (tools)"
    assert found(exact)[0].fix == "penstock show r1/a1#2 --raw request"


def test_another_conversation_is_not_tokenised_anew() -> None:
    made = judge((span(1), good()), (span(2), good([{"role": "user", "content": "Else?"}], prompt=(7, 8))))
    assert (codes(made), made.attempts[0].sequences) == ([], 2)


def test_each_of_several_choices_may_be_gone_on_from() -> None:
    two = answer((3, 4))
    two["choices"].append({"index": 1, "token_ids": [5], "logprobs": {"content": [{"logprob": -1}]}})
    first = exchange(json.dumps({"messages": ASK}).encode(), json.dumps(two).encode())
    made = judge((span(1, choices=2), first), (span(2), good(MORE, prompt=(1, 2, 5, 9))))
    assert ([call.goes_on for call in made.attempts[0].calls], codes(made)) == ([None, 1], [])


# --- where the ids stand ---


COUNTS = {"prompt_tokens": 2}


def test_ids_of_a_stream_are_put_together() -> None:
    choices: list[Json] = [
        {"delta": {"role": "assistant"}},
        {"delta": {"content": "4"}, "token_ids": [3], "logprobs": {"content": [{"logprob": -1}]}},
        {"delta": {}, "token_ids": [4], "logprobs": {"content": [{"logprob": 0}]}},
    ]
    events: list[Json] = [{"choices": [{"index": 0} | one]} for one in choices]
    body = sse(events[0] | {"prompt_token_ids": [1, 2]}, *events[1:], {"choices": [], "usage": COUNTS}, "[DONE]")
    tokens = read_tokens(body, True)
    assert tokens.complete
    assert (length(tokens.prompt), tokens.generated, tokens.outputs[0].logprobs) == (2, 2, 2)
    made = judge((span(stream=True), exchange(b'{"model":"m"}', gzip.compress(body))))
    assert codes(made) == ["unreadable"]  # it does not say that it is compressed


def test_ids_may_stand_in_the_choice() -> None:
    choice = {"index": 0, "prompt_token_ids": [1], "token_ids": [2, 3], "logprobs": {"token_logprobs": [-1, -2]}}
    tokens = read_tokens(json.dumps({"choices": [choice]}).encode(), False)
    assert tokens.complete
    assert tokens.outputs[0].logprobs == 2


@pytest.mark.parametrize("ids", [[1, "2"], [1, None], [-1], [1 << 40], [1.5], "12", {"0": 1}, [[1]]])
def test_odd_ids_are_no_ids(ids: Any) -> None:
    body = {"prompt_token_ids": ids, "choices": [{"token_ids": ids, "logprobs": ids}, ids]}
    assert not read_tokens(json.dumps(body).encode(), False).complete


KEYS = st.sampled_from(
    ["choices", "prompt_token_ids", "token_ids", "logprobs", "content", "logprob", "index", "messages"]
)
ANY_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)
BODIES = st.binary(max_size=60) | ANY_JSON.map(lambda it: json.dumps(it).encode())
DIALECTS = st.sampled_from(["chat", "completions", "responses", "messages", "opaque", "never heard of"])


@given(BODIES, BODIES, st.booleans(), DIALECTS)
def test_no_bytes_raise(request: bytes, response: bytes, streamed: bool, dialect: str) -> None:
    body = b"data: " + response + b"\n\n" if streamed else response
    heads = [span(n, stream=streamed, dialect=dialect) for n in (1, 2)]
    made = judge(*[(head, exchange(request, body)) for head in heads])
    assert made.model_validate_json(made.model_dump_json()) == made


# --- for people ---


def long_story() -> Diagnosis:
    """A rollout with something of everything."""
    first = rollout(reward=None, gaps=1).attempts[0]
    second = first.model_copy(update={"id": "a2", "sequence": 2, "reward": 0.75, "totals": Totals()})
    heads = [
        (span(1, status="cancelled"), good()),
        (span(1, attempt="a2"), good()),
        (span(2, attempt="a2"), good(MORE, prompt=(1, 2, 3, 9, 5), ids=(6,))),
        (span(3, attempt="a2", model="judge"), good()),
        (span(4, attempt="a2", finish="length"), chat_exchange(ASK, {"content": "4"})),
        (span(5, attempt="a2", dialect="embeddings", model="emb"), None),
    ]
    bytes_of = {(head.attempt, head.sequence): found for head, found in heads}
    whole = rollout(attempts=[first, second], reward=0.75)
    return diagnose(whole, [head for head, _ in heads], lambda s: bytes_of[(s.attempt, s.sequence)])


def test_how_it_looks() -> None:
    """Several are a line each, and one of several is told whole."""
    check_widths("doctor", queue.diagnosis(long_story()))
    assert text_of(queue.diagnoses([long_story()])) == text_of(queue.diagnosis(long_story()))
    fine = judge((span(1), good())).model_copy(update={"rollout": "0193c6f2-7d1a-7c3e-9f54-2b8a6d0e4c71"})
    check_widths("doctor-several", queue.diagnoses([long_story(), fine]))


def test_every_reason_is_documented_and_exists() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \| (yes|no) \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert [code for code, _ in rows] == list(get_args(FindingCode))
    harmless = {code for code, blocks in rows if blocks == "no"}
    assert harmless == HARMLESS


# -- tools, call by call, and calls of tools that lost their results ---------------------------------------------------


SEARCH, OTHER, AGAIN = ("c1", "search", {"q": "x"}), ("c2", "search", {"q": "y"}), ("c2", "search", {"q": "x"})
ASKED, CARRIED = model(1, [TASK], wanted(SEARCH)), [TASK, wanted(SEARCH), carried("c1", PAGE)]
DONE = {"content": "Done."}


def used(*recorded: Recorded) -> ToolList:
    bytes_of = {span.sequence: exchange for span, exchange in recorded}
    return tools_used([span for span, _ in recorded], lambda span: bytes_of[span.sequence])


def said(*recorded: Recorded) -> list[tuple[int, str, str, str]]:
    """The findings about tools: (call, code, reason, fix)."""
    bytes_of = {span.sequence: exchange for span, exchange in recorded}
    attempt = Attempt(rollout="r1", id="a1", status=AttemptStatus.SUCCEEDED, reward=1.0)
    whole = RolloutSummary(id="r1", attempts=[attempt], reward=1.0)
    made = diagnose(whole, [span for span, _ in recorded], lambda span: bytes_of[span.sequence])
    found = [(one.sequence, finding) for one in made.attempts[0].calls for finding in one.findings]
    tools = [(sequence, it) for sequence, it in found if it.code.startswith("tool_")]
    assert not any(it.blocks for _, it in tools)
    return [(sequence, it.code, it.reason, it.fix) for sequence, it in tools]


def test_a_tool_that_went_well_is_not_worth_a_word() -> None:
    calls = (ASKED, ran(2, "search", {"q": "x"}), model(3, CARRIED, DONE))
    assert said(*calls) == []
    assert used(*calls).unanswered == []
    assert [(it.span_id, it.asked_span_id) for it in used(*calls).tools] == [(None, None)]
    # The span of the call that asked is named.
    named = model(1, [TASK], wanted(SEARCH), span_id="a" * 16), ran(2, "search", {"q": "x"}, span_id="b" * 16)
    [run] = used(*named, model(3, CARRIED, DONE)).tools
    assert (run.span_id, run.asked_span_id, run.asked_by, run.grade) == ("b" * 16, "a" * 16, 1, "certain")


def test_a_run_whose_result_was_lost() -> None:
    later = [TASK, wanted(SEARCH), {"role": "user", "content": "Never mind."}]
    calls = (ASKED, ran(2, "search", {"q": "x"}), model(3, later, DONE))
    assert used(*calls).unanswered == [UnansweredCall(asked_by=1, call_id="c1", tool="search", run=2)]
    reason = "#2 ran search, and no later call carries the result"
    assert said(*calls) == [(1, "tool_unanswered", reason, "penstock tools r1/a1")]


def test_one_of_two_tool_calls_without_a_result() -> None:
    later = [TASK, wanted(SEARCH, OTHER), carried("c1", PAGE)]
    calls = (model(1, [TASK], wanted(SEARCH, OTHER)), model(2, later, DONE))
    assert used(*calls).unanswered == [UnansweredCall(asked_by=1, call_id="c2", tool="search", run=None)]
    assert [code for _, code, _, _ in said(*calls)] == ["tool_unanswered"]


def test_a_tool_call_that_ends_the_agent_lacks_nothing() -> None:
    assert said(model(1, [TASK], wanted(("c1", "submit", {})))) == []
    assert said(ASKED, ran(2, "search", {"q": "x"})) == []


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        ("tool_error", "tool_failed", "#2 search was run and failed (tool_error)"),
        ("policy_violation", "tool_denied", "#2 search was stopped by a rule"),
    ],
)
def test_a_run_that_failed_or_was_denied(error: str, code: str, reason: str) -> None:
    bad = ran(2, "search", {"q": "x"}, status="error", error=error)
    assert said(ASKED, bad, model(3, CARRIED, DONE)) == [(1, code, reason, "penstock show r1/a1#2")]


def test_runs_that_nothing_tells_apart() -> None:
    later = [TASK, wanted(SEARCH, AGAIN), carried("c1", PAGE), carried("c2", PAGE)]
    runs = (ran(2, "search", {"q": "x"}), ran(3, "search", {"q": "x"}))
    found = said(model(1, [TASK], wanted(SEARCH, AGAIN)), *runs, model(4, later, DONE))
    assert [(sequence, code) for sequence, code, _, _ in found] == [(1, "tool_ambiguous")] * 2


def test_an_attempt_without_tools_is_not_read_twice() -> None:
    reads: list[int] = []
    span, exchange = model(1, [TASK], {"content": "Done."})
    attempt = Attempt(rollout="r1", id="a1", reward=1.0)
    whole = RolloutSummary(id="r1", attempts=[attempt], reward=1.0)
    _ = diagnose(whole, [span, call(2, kind="event")], lambda it: (reads.append(it.sequence), exchange)[1])
    assert reads == [1]


# -- what agents lose behind a base URL, told from calls of real ones --------------------------------------------------


AGENTS: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("agents.json").read_text())
CODEX = "Codex 0.169.0, POST"


def reasons(calls: list[tuple[Span, Exchange]]) -> dict[str, str]:
    made = BaseUrlEffects()
    for span, sent in calls:
        made.add(span, sent)
    return dict(made.reasons())


def calls(who: str, **about: Any) -> list[tuple[Span, Exchange]]:
    dialect = "responses" if who == CODEX else "messages"
    made: list[tuple[Span, Exchange]] = []
    for number, one in enumerate(AGENTS[who], 1):
        sent = exchange(json.dumps(one["body"]).encode(), b"{}")
        headers = [(name, value) for name, value in one["headers"]]
        made.append((call(number, dialect=dialect, **about), sent.model_copy(update={"request_headers": headers})))
    return made


def said_of(who: str, **about: Any) -> dict[str, str]:
    return reasons(calls(who, **about))


def sent_by(agent: str, *more: tuple[str, str]) -> list[tuple[Span, Exchange]]:
    """Codex's calls, by another agent."""
    headers = [("user-agent", agent), *more]
    return [(span, one.model_copy(update={"request_headers": headers})) for span, one in calls(CODEX)]


def test_nothing_is_said_of_an_agent_that_lacks_nothing() -> None:
    """It calls its maker's host, has its WebSocket, or never had one."""
    own = [who for who in AGENTS if who.endswith("own host")]
    assert [said_of(who) for who in own] == [{}] * len(own)
    assert own
    assert said_of(CODEX, attributes={WEBSOCKET: True}) == {}
    assert reasons(sent_by("codex_cli_rs/0.98.0 (Debian)")) == {}


def test_the_newest_claude_code_behind_a_base_url() -> None:
    assert said_of("Claude Code 2.1.330, base URL") == {
        "base_url": "Claude Code 2.1.330 runs degraded behind a base URL: no part of its system prompt is cached "
        "beyond its own account (scope global), its 8 beta flags lack prompt-caching-scope"
    }


def test_an_older_claude_code_behind_a_base_url_brings_all_tools_along() -> None:
    found = said_of("Claude Code 2.1.197, base URL")
    assert list(found) == ["base_url", "inlined_tools"]
    assert found["base_url"].endswith("its 8 beta flags lack advanced-tool-use")
    assert tells(found["inlined_tools"], "2 calls", "61 at most")


def test_a_sub_agent_with_few_tools_brings_none_along_that_are_searched_for() -> None:
    whole = calls("Claude Code 2.1.330, base URL")
    span, sent = whole[1]
    body = json.loads(sent.request_body)
    body["tools"] = body["tools"][:2]
    whole[1] = (span, sent.model_copy(update={"request_body": json.dumps(body).encode()}))
    assert list(reasons(whole)) == ["base_url"]


def test_a_claude_code_that_lacks_nothing_that_is_known_is_not_degraded() -> None:
    whole = calls("Claude Code 2.1.330, base URL")
    for at, (span, sent) in enumerate(whole):
        body = json.loads(sent.request_body)
        body["system"][-1]["cache_control"] = {"type": "ephemeral", "scope": "global"}
        headers = [("user-agent", "claude-cli/3.0.0"), ("anthropic-beta", "prompt-caching-scope-x,advanced-tool-use-x")]
        made = {"request_body": json.dumps(body).encode(), "request_headers": headers}
        whole[at] = (span, sent.model_copy(update=made))
    assert reasons(whole) == {}
    agent = {"request_headers": [("user-agent", "claude-cli/3.0.0")]}
    bare = [(span, one.model_copy(update=agent)) for span, one in whole]
    assert tells(reasons(bare)["base_url"], "0 beta flags", "prompt-caching-scope and advanced-tool-use")


def test_codex_without_its_websocket_sends_everything_again() -> None:
    found = said_of(CODEX)
    assert list(found) == ["no_websocket"]
    bodies = [json.loads(body.request_body) for _, body in calls(CODEX)]
    sizes = [[len(json.dumps(item)) for item in body["input"]] for body in bodies]
    repeated = sum(sizes[0]) + sum(sizes[1])
    assert tells(found["no_websocket"], f"{repeated / 1000:,.0f} KB of the", "in 3 calls", "Codex 0.169", "WebSocket")


@pytest.mark.parametrize("agent", ["codex-tui/0.170.1 (x)", "Codex Desktop/0.169.0", "codex_cli_rs/1.0.0"])
def test_threads_of_codex_are_told_apart(agent: str) -> None:
    both = zip(*(sent_by(agent, ("thread-id", name)) for name in ("one", "two")), strict=True)
    threads = [one for pair in both for one in pair]
    once, twice = said_of(CODEX)["no_websocket"], reasons(threads)["no_websocket"]
    assert 2 * int(once.split()[0]) - 1 <= int(twice.split()[0]) <= 2 * int(once.split()[0]) + 1


@pytest.mark.parametrize("body", [b"", b"[]", b'{"system":[1],"tools":[2]}', b'{"system":"x","tools":{}}', b"\xff"])
@pytest.mark.parametrize("agent", ["claude-cli/2.1.330", "codex_exec/0.169.0", "codex/x", ""])
def test_odd_bodies_say_nothing(body: bytes, agent: str) -> None:
    one = exchange(body, b"").model_copy(update={"request_headers": [("User-Agent", agent)]})
    assert reasons([(call(1, dialect="responses"), one)]) == {}
