"""What panes draw, with data that no demo has."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, date, datetime
from itertools import pairwise

import pytest
from fakes.goldens import text_of
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text
from textual.app import App, ComposeResult

from penstock.console.views.pages import EvidencePoint
from penstock.console.views.releases import EValueThreshold
from penstock.console.views.rollout_tree import StepPair, TranscriptStep, align_steps, find_divergence
from penstock.gateway.model.answers import Breakdown, BreakdownRow, Digest, RewardStats, SpanDetail, Stats
from penstock.gateway.model.queue import QueueStatus
from penstock.gateway.model.rollout import Attempt, RolloutSummary, Totals, Worker
from penstock.gateway.model.span import Span, SpanStatus, Usage
from penstock.gateway.model.state import UpstreamView
from penstock.gateway.wire.dialects.tokens import TokenLogprob, read_logprobs
from penstock.tui import widgets as module
from penstock.tui.screens import span_panes
from penstock.tui.screens.chart import TerminalCurve, bars, chart, scale, smooth_points, ticks
from penstock.tui.screens.compare import mark_differences
from penstock.tui.screens.overview import Figures, OverviewData, course, draw_blocks, fitting_grain
from penstock.tui.screens.releases import FEWEST, remaining_rollouts
from penstock.tui.screens.rollout import build_tree
from penstock.tui.screens.span_panes import NONE, timing, tokens
from penstock.tui.view import BUCKETS, SECONDS, DigestHistory
from penstock.tui.widgets import RESTS, Sheet

FINITE = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.one_of(st.none(), FINITE)


# -- charts ------------------------------------------------------------------------------------------------------------


@given(values=st.lists(VALUES, max_size=60), width=st.integers(20, 160), height=st.integers(3, 20))
def test_a_chart_fits_whatever_the_values_are(values: Sequence[float | None], width: int, height: int) -> None:
    points = [(float(at), value) for at, value in enumerate(values)]
    lines = text_of(chart([TerminalCurve("a", points, smooth_points(points))], width, height), 400).splitlines()
    if all(value is None for value in values):
        assert lines == ["no finite value yet"]
    else:
        assert len(lines) == max(5, height)
        assert max(map(cell_len, lines)) <= max(width, 45)


@given(low=FINITE, size=st.floats(0, 1e9), rows=st.integers(3, 60))
def test_a_scale_says_at_each_row_what_is_there(low: float, size: float, rows: int) -> None:
    high = low + size
    assume(high > low)
    (bottom, top), labels = scale(low, high, rows)
    slack = 1e-6 * (top - bottom)
    assert bottom - slack <= low
    assert high <= top + slack
    said = [(row, float(label)) for row, label in labels.items()]
    assert len(said) >= 2
    assert len({value for _, value in said}) == len(said)
    for row, value in said:
        there = top + (bottom - top) * row / (rows - 1)
        assert abs(value - there) <= slack + 1e-6 * abs(there), labels


@given(low=st.integers(-1000, 1000), size=st.integers(1, 10_000), most=st.integers(1, 20))
def test_ticks_are_round_and_within(low: int, size: int, most: int) -> None:
    found = ticks(low, low + size, most)
    assert 1 <= len(found) <= most
    assert all(low <= one <= low + size for one in found)
    assert len({round(b - a, 9) for a, b in pairwise(found)}) <= 1


def test_a_chart_has_its_numbers_where_they_belong_and_leaves_gaps() -> None:
    drawn = text_of(chart([TerminalCurve("reward", [(0, 0.0), (10, None), (20, 1.0)])], 30, 7)).splitlines()
    assert [line.rstrip()[:4].strip() for line in drawn[:5]] == ["1┤", "│", "0.5┤", "│", "0┤"]
    assert drawn[-1].split() == ["0", "20"]
    assert drawn[-2].index("┬") == drawn[-1].index("0")
    assert sum(cell not in " ⠀" for line in drawn[:5] for cell in line[4:]) == 2, "a gap is drawn as one"


def test_bars_are_as_high_as_what_they_stand_for() -> None:
    drawn = text_of(bars([[0, 10, 5], [0, 2, 0]], 40, 10, "abc".__getitem__)).splitlines()
    assert drawn[-1].split() == ["a", "b", "c"]
    columns = [[cell not in " ⠀" for cell in line] for line in drawn[:-2]]
    tall = [sum(line[drawn[-1].index(name)] for line in columns if len(line) > drawn[-1].index(name)) for name in "abc"]
    labels = {row: line[:3].strip(" ┤│") for row, line in enumerate(drawn) if "┤" in line}
    assert tall[0] == 0
    assert labels[len(columns) - tall[1]] == "10"
    assert labels[len(columns) - tall[2]] == "5"


# -- the race ----------------------------------------------------------------------------------------------------------


def grown(*logs: float) -> list[EvidencePoint]:
    """Evidence after each counted rollout."""
    return [EvidencePoint(at + 1, {"harm": math.exp(log)}, None) for at, log in enumerate(logs)]


def test_what_is_left_follows_from_the_pace_and_is_a_range() -> None:
    harm = EValueThreshold("harm", math.exp(1.0), math.exp(2.0), "rolls back", "harm")
    assert remaining_rollouts(harm, grown(*(at / 10 for at in range(1, 11)))) == (10, 10)
    fast_lately = remaining_rollouts(harm, grown(0, 0, 0, 0, 0, 0.2, 0.4, 0.6, 0.8, 1.0))
    assert fast_lately is not None
    assert (fast_lately.least, fast_lately.most) == (5, 10)


@pytest.mark.parametrize(
    "logs", [[1.0] * (FEWEST - 1), [-0.1 * at for at in range(20)]], ids=["too few", "against the claim"]
)
def test_nothing_is_foretold_from_too_little_or_against_the_claim(logs: list[float]) -> None:
    assert (
        remaining_rollouts(EValueThreshold("harm", math.exp(logs[-1]), 50.0, "rolls back", "harm"), grown(*logs))
        is None
    )


def test_what_has_crossed_its_bound_has_nothing_left() -> None:
    assert (
        remaining_rollouts(
            EValueThreshold("harm", 60.0, 50.0, "rolls back", "harm"), grown(*(at / 2 for at in range(10)))
        )
        is None
    )


# -- attempts side by side ---------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.builds(TranscriptStep, st.sampled_from(["user", "assistant"]), st.sampled_from("abc"), st.just(1)), max_size=12
)


@given(one=STEPS, other=STEPS)
def test_aligned_attempts_have_every_step_once_and_in_order(
    one: list[TranscriptStep], other: list[TranscriptStep]
) -> None:
    pairs = align_steps(one, other)
    assert [pair.left for pair in pairs if pair.left is not None] == one
    assert [pair.right for pair in pairs if pair.right is not None] == other
    assert all(pair.sign == "=" for pair in pairs) == (one == other)


def test_signs_say_which_side_has_a_step() -> None:
    step = TranscriptStep("user", "hello", 1)
    assert [StepPair(step, None).sign, StepPair(None, step).sign, StepPair(step, step).sign] == ["<", ">", "="]


@given(one=STEPS, others=st.lists(STEPS, min_size=1, max_size=3))
def test_an_attempt_leaves_the_one_that_goes_along_for_longest(
    one: list[TranscriptStep], others: list[list[TranscriptStep]]
) -> None:
    at, other = find_divergence(one, others)
    assert other is not None
    assert one[:at] == other[:at]
    assert not any(one[: at + 1] == it[: at + 1] and at < min(len(one), len(it)) for it in others)


@given(one=st.text("ab \n", max_size=30), other=st.text("ab \n", max_size=30))
def test_marked_words_are_those_that_differ(one: str, other: str) -> None:
    a, b = mark_differences(one, other)
    assert a.plain.replace("[-", "").replace("-]", "") == one
    assert b.plain.replace("{+", "").replace("+}", "") == other
    assert ("[-" in a.plain or "{+" in b.plain) == (one != other)


# -- spans, tokens, traffic --------------------------------------------------------------------------------------------


@given(
    start=st.integers(0, 10**9), length=st.one_of(st.none(), st.integers(0, 10**9)),
    first=st.one_of(st.none(), st.integers(0, 10**9)), width=st.integers(1, 200), stream=st.booleans(),
    status=st.sampled_from(SpanStatus),
)  # fmt: skip
def test_a_bar_is_at_least_a_character_and_stays_in_its_place(
    start: int, length: int | None, first: int | None, width: int, stream: bool, status: SpanStatus
) -> None:
    span = Span(
        rollout="r", attempt="a", sequence=1, status=status, start_ns=start, stream=stream,
        end_ns=None if length is None else start + length, first_byte_ns=first,
    )  # fmt: skip
    axis = span_panes.TimeAxis.of([span], start + 5)
    drawn = span_panes.bar(span, axis, width, start + 5)
    assert 1 <= drawn.cell_len <= width
    assert drawn.plain.strip()


def test_a_bar_tells_waiting_from_streaming_and_how_it_ended() -> None:
    span = Span(rollout="r", attempt="a", sequence=1, start_ns=0, end_ns=100, first_byte_ns=40, stream=True)
    axis = span_panes.TimeAxis(0, 100)
    assert span_panes.bar(span, axis, 10, 100).plain == "░░░░██████"
    failed = span.model_copy(update={"status": SpanStatus.ERROR, "stream": False})
    assert span_panes.bar(failed, axis, 10, 100).plain == "▒▒▒▒▒▒▒▒▒✗"
    going = span.model_copy(update={"status": SpanStatus.OPEN, "end_ns": None})
    assert span_panes.bar(going, axis, 10, 50).plain == "░░░░▶"


def test_an_attempt_without_calls_has_its_own_time() -> None:
    attempt = Attempt(rollout="r", id="a1", created_ns=10**9, ended_ns=9 * 10**9)
    printed = Span(rollout="r", attempt="a1", sequence=1, kind="event", name="stdout", start_ns=5 * 10**9)
    data = build_tree(RolloutSummary(id="r", attempts=[attempt]), [printed], {})
    assert span_panes.heading(data.axes["a1"], 10).plain == "0      8 s"
    assert span_panes.bar(printed, data.axes["a1"], 9, 9 * 10**9).plain == f"    {span_panes.EVENT}"


ENTRIES = [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -3}]
CHAT = {"index": 0, "token_ids": [7, 8], "logprobs": {"content": ENTRIES}}
TOKENS = [TokenLogprob("a", 7, -0.1), TokenLogprob("b", 8, -3.0)]


def test_tokens_are_read_from_plain_and_streamed_answers_of_both_apis() -> None:
    assert read_logprobs(json.dumps({"choices": [CHAT]}).encode(), False) == TOKENS
    pieces = [
        json.dumps({"choices": [{"index": 0, "token_ids": [id], "logprobs": {"content": [entry]}}]})
        for id, entry in zip((7, 8), ENTRIES, strict=True)
    ]
    stream = "".join(f"data: {piece}\n\n" for piece in pieces).encode()
    assert read_logprobs(stream + b"data: [DONE]\n\n", True) == TOKENS
    lists = {"index": 0, "logprobs": {"tokens": ["a", "b"], "token_logprobs": [None, -3.0]}}
    assert read_logprobs(json.dumps({"choices": [lists]}).encode(), False) == [
        TokenLogprob("a", None, None),
        TokenLogprob("b", None, -3.0),
    ]
    assert read_logprobs(json.dumps({"choices": [CHAT]}).encode(), False, choice=1) == []


@given(st.binary(max_size=60), st.booleans())
def test_what_is_no_answer_has_no_tokens(body: bytes, stream: bool) -> None:
    assert read_logprobs(body, stream) == []


def test_unlikely_tokens_stand_out_without_colours() -> None:
    drawn = text_of(
        tokens([TokenLogprob("The", 1, -0.01), TokenLogprob(" cat", 2, -1.0), TokenLogprob(" flew", 3, -4.0)])
    )
    assert "The|? cat|‼ flew" in drawn
    assert drawn.index("' flew'") < drawn.index("' cat'"), "the least likely one is first"
    assert text_of(tokens([]), 400).strip() == NONE


def test_the_speed_of_a_stream_is_that_after_its_first_byte_and_else_that_of_the_call() -> None:
    usage = Usage(input_tokens=5, output_tokens=100)
    call = Span(
        rollout="r",
        attempt="a1",
        sequence=1,
        end_ns=2_000_000_000,
        first_byte_ns=1_999_999_000,
        stream=False,
        usage=usage,
    )
    assert "50.0 tokens a second over the call" in text_of(timing(SpanDetail(span=call), 80), 80)
    stream = call.model_copy(update={"stream": True, "first_byte_ns": 1_000_000_000})
    assert "100.0 tokens a second after the first byte" in text_of(timing(SpanDetail(span=stream), 80), 80)


def test_traffic_is_told_by_the_second_and_forgotten_in_time() -> None:
    now = 1000.0
    traffic = DigestHistory(lambda: now)
    assert traffic.rate_series(lambda one: one.calls).rates == [None] * (BUCKETS - 1) + [0.0]
    traffic.add(Digest(cursor=1, calls=SECONDS // BUCKETS))
    assert traffic.rate_series(lambda one: one.calls).peak == 1.0
    now += SECONDS + 1
    traffic.add(Digest(cursor=2))
    flow = traffic.rate_series(lambda one: one.calls)
    assert (flow.peak, flow.rates[0]) == (0.0, 0.0)


# -- a long pane is drawn when there is something new, not whenever the screen is --------------------------------------


class Shows(App[None]):
    """A sheet."""

    def __init__(self) -> None:
        super().__init__()
        self.sheet = Sheet()

    def compose(self) -> ComposeResult:
        yield self.sheet


async def test_what_takes_long_is_not_drawn_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, drawn = [100.0], [0]

    def slow(width: int, height: int | None) -> Text:
        drawn[0] += 1
        now[0] += 1.0
        return Text("long")

    async with Shows().run_test() as pilot:
        assert isinstance(pilot.app, Shows)
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
        sheet, one, other = pilot.app.sheet, object(), object()
        for _ in range(3):
            sheet.show("pane", slow, one)
        assert drawn == [1]
        now[0] += RESTS
        sheet.show("pane", slow, one)
        assert drawn == [2], "ages go on, some time"
        sheet.show("pane", slow, other)
        sheet.show("another", slow, other)
        assert drawn == [4], "what is new is drawn at once"


# -- what the overview says, without a gateway -------------------------------------------------------------------------


def text(count: int) -> str:
    """An overview in which there is so much of everything."""
    stats = Stats(
        counted_spans=0, complete=True, since_ns=None, totals=Totals(), by_model={}, by_status={}, by_kind={},
        rewards=RewardStats(), tape={"rollouts": count, "attempts": count}, cursor=0, gaps=count,
    )  # fmt: skip
    sums = Breakdown(by="model", rows=[], prices_as_of=date(2026, 1, 1), complete=True)
    figures = Figures(sums, sums, "minute", "")
    paused = UpstreamView(name="up", paused=True, paused_s=5, bound_s=9, waiting=count, running=0, waited=0, refused=0)
    status = QueueStatus(state="open", waiting={}, claimed=0, oldest_ns=None)
    workers = [Worker(id=f"w{number}", last_seen_ns=0) for number in range(count)]
    return text_of(
        draw_blocks(
            OverviewData(None, stats, status, workers, [], [], [], [], [paused], [], figures), None, 0, 100, None
        ),
        100,
    )


def test_one_is_no_plural() -> None:
    one, two = text(1), text(2)
    for noun in ("rollout", "attempt", "worker"):
        assert f"1 {noun}" in one
        assert f"1 {noun}s" not in one
        assert f"2 {noun}s" in two
    for said in ("1 call could not be recorded", "1 call waits"):
        assert said in one
    for said in ("2 calls could not be recorded", "2 calls wait "):
        assert said in two


def test_the_course_of_calls_has_every_step_and_the_range_decides_how_fine() -> None:
    rows = [BreakdownRow(value="2026-03-01 10:02", calls=3), BreakdownRow(value="2026-03-01 10:00", calls=1)]
    found = Breakdown(by="minute", rows=rows, prices_as_of=date(2026, 1, 1), complete=True)
    now_ns = int(datetime(2026, 3, 1, 10, 4, 30, tzinfo=UTC).timestamp()) * 10**9
    places, steps = course(Figures(found, found, "minute", ""), now_ns)
    assert [place.minute for place in places] == [0, 1, 2, 3, 4]
    assert [step.calls for step in steps] == [1, 0, 3, 0, 0]
    places, _ = course(Figures(found, found, "minute", "15m"), now_ns)
    assert len(places) == 16
    assert [fitting_grain(since) for since in ("15m", "1h", "24h", "7d", "90d", "")] == [
        "minute", "minute", "hour", "hour", "day", "day",
    ]  # fmt: skip
