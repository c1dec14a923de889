"""The filter language: what each term means, what is refused and how, and that text survives quoting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from fakes.memory_tape import T0, call
from hypothesis import event, example, given
from hypothesis import strategies as st

from penstock.gateway.model.rollout import Attempt, AttemptStatus, Reward, Rollout, RolloutStatus, RolloutSummary
from penstock.gateway.model.span import Span, Usage
from penstock.gateway.reading.filter_fields import FIELDS, Target
from penstock.gateway.reading.filters import ContentReaders, QueryError, Term, parse, quote

ROLLOUT = Rollout(
    id="r1",
    mode="train",
    origin="queued",
    status=RolloutStatus.FAILED,
    created_ns=T0,
    metadata={"task": "fix Bug", "n": 3, "deep": {"er": True}, "a.b": "dotted"},
    input={"question": "Straße?"},
    group="g1",
    priority=-2,
    tries=2,
)
ATTEMPTS = [
    Attempt(rollout="r1", id="a1", worker="gpu-1", status=AttemptStatus.SUCCEEDED, reward=0.5),
    Attempt(rollout="r1", id="a2", worker="cpu-1", status=AttemptStatus.TIMEOUT),
]
SUMMARY = RolloutSummary(**dict(ROLLOUT), attempts=ATTEMPTS, reward=0.5)
REWARD = call(
    3, kind="reward", name="reward", attributes=Reward(value=-1.5, source="agent", trusted=False).attributes()
)
SPAN = call(
    2,
    model="Qwen3-8B",
    model_served="qwen3-8b-fp8",
    status="error",
    error="http_429",
    http_status=429,
    ms=2500,
    stream=True,
    tool_calls=2,
    finish="tool_calls",
    agent="planner",
    versions={"planner": "v2", "qwen": "v10"},
    usage=Usage(input_tokens=900, output_tokens=100),
    request_bytes=3000,
    response_bytes=1000,
)
BODIES = '{"messages":[{"content":"Stra\\u00dfe \\"hot\\"\\nline"}]} TimeOut reached'


def always(*texts: str) -> Callable[[Span], Sequence[str]]:
    """Reads these, whatever the span."""
    return lambda _: texts


NOTHING = ContentReaders(always(), always(), always())
NAMES = ("mcp__web__search", "multiply")
"""The tools that the answer asked for."""


def matches(text: str, span: Span = SPAN, rollout: Rollout | None = ROLLOUT) -> bool:
    return parse(text, now_ns=T0 + 3600 * 10**9).matches(
        rollout, span, ContentReaders(always(*NAMES), always(BODIES), always(BODIES))
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rollout:r1 attempt:a? status:error status:failed status:ok,error",
        "model:qwen* model:QWEN3-8b model=Qwen3-8B model=qwen3-8b-fp8 model~3-8 model!=gpt-5",
        "tool:*search tool=multiply tool~web tool:nothing,mult* tool:multiply -tool:divide",
        "version:planner@v2 version:planner@* version=qwen@v10 -version:qwen@v1 -server:*",
        "dialect:chat kind:llm agent:plan* upstream:openai",
        "mode:train origin:queued,header",
        "error:http_* finish:tool_calls stream:true",
        "latency>2s latency>=2500ms latency<0.1m latency<=1h latency=2500ms latency>1us",
        "tokens:1000 input_tokens>899 output_tokens<=100 tool_calls=2",
        "bytes>=4000 http>=400 http:429,500 http!=200",
        "started>61m started<30m started>2026-09-21 started<2026-09-21T14:13:23Z started<=2026-09-21T16:13:23+02:00",
        'text~timeout text~"straße" text~LINE text~"hot" text~"\\"hot\\"" text~"\nline"',
        "text:timeout text:TIME*out text:?imeout text:a,*time*ou? text:* -text:absent -text:time*absent",
        'metadata.task:fix* metadata.task="fix Bug" metadata.n:3 metadata.deep.er:true metadata.a.b:dotted',
        "-status:ok not status:ok - status:ok",
        "-agent:other -text~absent -metadata.none:x",
        "queue_ms:none queue_ms=none queue_ms:1,none -queue_ms!=none -http:none tokens!=none http:none,429",
    ],
)
def test_matches(text: str) -> None:
    assert matches(text)


@pytest.mark.parametrize(
    "text",
    [
        "rollout:r2",
        "status:ok",
        "-status:failed",
        "model:gpt*",
        "model=qwen3-8b",
        "model!=Qwen3-8B",
        "latency>2500ms",
        "latency<2s",
        "http:200,500",
        "stream:false",
        "started>59m",
        "text~absent",
        "-text~timeout",
        "-text:time*",
        "text:out*time",
        "text~time*",
        "mode:val",
        "metadata.none:x",
        "metadata.n:4",
        "status:error model:gpt*",
        "model:[Qq]wen*",
        "tool:search",
        "-tool:multiply",
        "tool:mult* tool:divide",
        "version:planner",
        "version:planner@v1",
        "version:qwen@v1",
        "server:openai",
    ],
)
def test_does_not_match(text: str) -> None:
    assert not matches(text)


def test_absent_values_match_nothing_and_their_negation_matches() -> None:
    bare = Span(rollout="r1", attempt="a1", sequence=1)
    for term in ("latency>0s", "tokens>=0", "input_tokens>=0", "agent:*", "model:*", "http>=0", "error:*"):
        assert not matches(term, bare)
        assert matches(f"-{term}", bare)
        assert (">" in term) == matches(f"{term.partition('>')[0]}:none", bare)
    assert not matches("mode:train", bare, None)


def test_the_server_is_that_of_tools() -> None:
    run = call(1, kind="tool", upstream="web")
    assert matches("server:web -server:openai upstream:web", run)
    assert not matches("server:openai", call(1, upstream="openai"))


def test_what_an_answer_asked_for_is_read_after_all_heads() -> None:
    def never(span: Span) -> list[str]:
        raise AssertionError(span)

    assert not parse("tool:x status:ok").matches(None, SPAN, ContentReaders(never, never, never))
    assert parse("tool:x").needs_bodies
    assert parse("tool:x", "rollouts").needs_spans


def test_failed_is_error_or_interrupted() -> None:
    found = [
        s for s in ("open", "ok", "error", "cancelled", "interrupted") if matches("status:failed", call(1, status=s))
    ]
    assert found == ["error", "interrupted"]


def test_terms_about_rollouts_are_told_apart() -> None:
    query = parse("status:failed mode:train metadata.n:3 rollout:r* started<1h model:qwen*", "rollouts", T0 + 10**15)
    assert query.matches_rollout(ROLLOUT)
    assert query.needs_spans
    assert not query.matches_rollout(ROLLOUT.model_copy(update={"mode": "val"}))
    assert query.matches(ROLLOUT, SPAN, NOTHING)
    assert not query.matches(ROLLOUT, call(1), NOTHING)
    assert not parse("status:failed mode:train", "rollouts").needs_spans


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("group:G* group=g1 -group:g2 priority<0 priority:-2 tries>1 tries<=2", SPAN),
        ('input~straße input~"STRASSE" -input~absent', SPAN),
        ("reward>0.4 reward<=0.5 reward:0.5 -reward>0.5 worker:gpu-* -worker:cpu-1 attempt_status:succeeded", SPAN),
        ("-reward>-100 worker:cpu-1 attempt_status:timeout,failed", SPAN.model_copy(update={"attempt": "a2"})),
        ("reward<-1 reward=-1.5 source:agent name:reward kind:reward worker:gpu-1", REWARD),
        ("-source:user -name:*", SPAN),
    ],
)
def test_spans_are_found_by_their_rollout_and_attempt(text: str, span: Span) -> None:
    query = parse(text)
    assert query.matches(SUMMARY, span, NOTHING)
    for term in query.terms:
        against = replace(term, negated=not term.negated)
        assert not parse(str(against)).matches(SUMMARY, span, NOTHING), against


@pytest.mark.parametrize(
    "text",
    [
        "reward>0.4 -reward>0.5 worker:gpu-1 worker:cpu-1 attempt_status:timeout tries=2 priority<0 input~straße",
        "status:over -status:waiting,claimed group:g1",
    ],
)
def test_rollouts_are_found_by_their_attempts(text: str) -> None:
    query = parse(text, "rollouts")
    assert query.matches_rollout(SUMMARY)
    assert not query.needs_spans
    assert not any(parse(f"-{term}".replace("--", ""), "rollouts").matches_rollout(SUMMARY) for term in query.terms)


def test_attempts_are_asked_for_only_when_needed() -> None:
    assert parse("reward>1").needs_attempts
    assert parse("worker:x attempt_status:failed").needs_attempts
    assert not parse("group:x priority>1 mode:train model:y").needs_attempts
    assert parse("group:x").needs_rollout


@pytest.mark.parametrize("field", ["text", "raw"])
def test_contents_are_read_last_and_once(field: str) -> None:
    reads: list[Span] = []

    def read(span: Span) -> list[str]:
        reads.append(span)
        return [BODIES]

    def never(span: Span) -> list[str]:
        raise AssertionError(span)

    query = parse(f"{field}~timeout model:qwen* {field}~line")
    contents = NOTHING._replace(texts=never, bodies=never)._replace(**{"texts" if field == "text" else "bodies": read})
    assert query.needs_bodies
    assert query.matches(None, SPAN, contents)
    assert not query.matches(None, call(1), contents)
    assert reads == [SPAN]


def test_texts_to_look_for_are_few() -> None:
    parse(" ".join(f"text~{number}" for number in range(8)))
    for many in (" ".join(f"text~{number}" for number in range(9)), "raw~" + ",".join(map(str, range(33)))):
        with pytest.raises(
            QueryError, match="there are too many texts to look for: at most 8 such terms with 32 texts"
        ):
            parse(many)


def test_a_part_of_a_text_lies_in_one_passage() -> None:
    contents = NOTHING._replace(texts=always("first half", "second half"), bodies=always("a first", "half b"))
    assert parse("text~first text~second -text~third").matches(None, SPAN, contents)
    assert not parse('text~"half second"').matches(None, SPAN, contents)
    assert not parse('raw~"first half"').matches(None, SPAN, contents)


def test_rollouts_are_asked_for_only_when_needed() -> None:
    assert parse("mode:train").needs_rollout
    assert parse("-metadata.x:y").needs_rollout
    assert not parse("model:x rollout:y started>1h").needs_rollout


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("statsu:ok", "spans", "unknown field 'statsu'; did you mean 'status'?; allowed: status"),
        ("model>x", "spans", "'model' does not know the operator '>'; allowed: : = != ~"),
        ("text=x", "spans", "'text' does not know the operator '='; allowed: : ~"),
        (f"text:{'?' * 65}", "spans", "with a `?` it has at most 64 characters; `*` may stand for any number"),
        ("latency>2", "spans", "'2' is not a number with a unit, such as 250ms; allowed: us ms s m h d"),
        ("latency>2sec", "spans", "'2sec' is not a number with a unit"),
        ("tokens>many", "spans", "'many' is not a whole number"),
        ("status:eror", "spans", "'eror' is not one of its values; did you mean 'error'?; allowed: open ok error"),
        ("kind:model", "spans", "'model' is not one of its values; did you mean 'llm'?"),
        ("errors>0", "rollouts", "unknown field 'errors'; did you mean 'error:*'?"),
        ("status:ok", "rollouts", "'ok' is not one of its values; allowed: queuing preparing running"),
        ("reward>high", "spans", "'high' is not a number"),
        ("priority>1.5", "spans", "'1.5' is not a whole number; allowed: -1 0 1"),
        ("reward>none", "rollouts", "'none' is not a number"),
        ("status:timeout", "rollouts", "'timeout' is not one of its values; did you mean 'attempt_status:timeout'?"),
        ("status:ende", "rollouts", "did you mean 'ended'?"),
        ("stream:maybe", "spans", "allowed: true false"),
        ("started>yesterday", "spans", "'yesterday' is neither an ISO time (UTC unless it says) nor a time ago"),
        ("timeout", "spans", "filter term 'timeout': is not `field:value`"),
        ("model:", "spans", "its value is missing"),
        ('model:"open', "spans", "its value is missing, or a quote or comma in it is misplaced"),
        ("model:a,,b", "spans", "misplaced"),
        ('model:"a"b', "spans", "misplaced"),
        ("metadata.:x", "spans", "unknown field 'metadata.'"),
        ("not", "spans", "filter term 'not'"),
    ],
)
def test_refusals_say_what_is_allowed(text: str, target: Target, message: str) -> None:
    with pytest.raises(QueryError) as raised:
        parse(f"http:200 {text}", target)
    assert message in str(raised.value)
    assert raised.value.term == text


@given(st.text())
@example("latency>99999999999999999999h")
@example("started>0001-01-01")
@example("-")
@example('text~"\\')
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        parse(text).matches(ROLLOUT, SPAN, NOTHING)
    except QueryError:
        event("refused")


@given(st.sampled_from(sorted(FIELDS["spans"])), st.sampled_from(":=!<>~"), st.text(min_size=1))
def test_any_value_is_parsed_or_refused(field: str, operator: str, value: str) -> None:
    try:
        parse(f"{field}{operator}{quote(value)}").matches(ROLLOUT, SPAN, NOTHING)
    except QueryError:
        event("refused")


TERMS = st.builds(
    Term,
    st.sampled_from(["model", "agent", "metadata.some_key", "rollout"]),
    st.sampled_from([":", "=", "!=", "~"]),
    st.lists(st.text(), min_size=1, max_size=3).map(tuple),
    st.booleans(),
)


@given(st.lists(TERMS, max_size=4).map(tuple))
def test_what_is_written_is_read_back(terms: tuple[Term, ...]) -> None:
    assert parse(" ".join(map(str, terms))).terms == terms


@given(st.text(min_size=1))
def test_a_quoted_value_is_found_exactly(value: str) -> None:
    span = call(1, agent=value)
    assert matches(f"agent={quote(value)}", span)
    assert not matches(f"agent={quote(value + 'x')}", span)
