"""Which model call asked for which tool run: written cases, rollouts whose truth is known, and real trajectories."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from fakes.mistakes import tells
from fakes.tool_rollouts import MS, NAMES, SHOWN, Host, asked, message, rollout, shown, text

from bench import trajectories
from penstock.gateway.model.turn import Choice, Message, Part, Turn
from penstock.gateway.reading.diagnosis.tool_calls import ModelCall, read_tool_requests
from penstock.gateway.reading.diagnosis.tool_join import (
    CandidateAttempt,
    ImpliedRun,
    ToolCallRef,
    ToolRun,
    ToolRunLink,
    find_origins,
    implied_runs,
    join,
)
from penstock.gateway.wire.dialects import by_name

Json = dict[str, Any]
PAGE = "The harbour was closed for repairs until the autumn of that year."
OTHER = "The station has four platforms, and a fifth is under construction."
TASK = message("user", text("Find it."))


def call(sequence: int, said: list[Message], *answers: list[Part], **about: Any) -> ModelCall:
    """A call of 50 ms, 100 ms after the one before it."""
    fields: Json = {"sampling": about.pop("sampling", {}), "response_id": about.pop("response_id", None)}
    choices = [Choice(index=at, message=message("assistant", *parts)) for at, parts in enumerate(answers)]
    turn = Turn(dialect="chat", messages=said, choices=choices, **fields)
    start = about.pop("start", sequence * 100)
    return ModelCall(sequence, start * MS, (start + 50) * MS, turn, **about)


def run(key: str, at: int, result: str | Json | None = PAGE, arguments: Any = None, **about: Any) -> ToolRun:
    """A run of `search` on the server `web`, 10 ms long. `at`: milliseconds."""
    given = {"q": "x"} if arguments is None else arguments
    whole = {"content": [{"type": "text", "text": result}]} if isinstance(result, str) else result
    named: Json = {"server": "web", "tool": "search"} | about
    end = None if result is None and "status" not in about else (at + 10) * MS
    return ToolRun(key, arguments=given, result=whole, start_ns=at * MS, end_ns=end, **named)


def search(id: str | None = "c1", name: str = "search", arguments: Json | str | None = None) -> Part:
    return asked(id, name, {"q": "x"} if arguments is None else arguments)


def grew(said: list[Message], calls: list[Part], *results: Part) -> list[Message]:
    """A conversation after an answer and the results of its tools."""
    return [*said, message("assistant", *calls), *(message("tool", part) for part in results)]


def one(result: str | Json, words: str, wanted: Part | None = None, **about: Any) -> ToolRunLink:
    """The link of a single run whose result a model was shown as `words`."""
    [link] = links_of(carried(wanted or search(), words), run("t", 160, result, **about))
    return link


def links_of(calls: list[ModelCall], *runs: ToolRun) -> list[ToolRunLink]:
    return join(read_tool_requests(calls), runs)


def grades(calls: list[ModelCall], *runs: ToolRun) -> list[str]:
    """The grade of each run with the id it was linked to."""
    return [f"{it.grade} {it.asked.call_id if it.asked else ''}".strip() for it in links_of(calls, *runs)]


def carried(wanted: Part, words: str = PAGE, **about: Any) -> list[ModelCall]:
    """A call that asks for one thing, and one that carries what it brought."""
    later = grew([TASK], [wanted], shown(wanted.id, words, wanted.name))
    return [call(1, [TASK], [wanted]), call(2, later, [], **about)]


# -- one call --------------------------------------------------------------------------------------------------------


def test_both_sides_are_certain() -> None:
    link = one(PAGE, PAGE)
    where = ToolCallRef(1, "c1")
    reason = "call 1 asked for it, and call 2 carries its result"
    assert link == ToolRunLink("t", "certain", reason, where, (where,), 2)


def test_one_side_is_likely() -> None:
    """A result that was rewritten past recognition; another name; a result that no request carried."""
    link = one(PAGE, "The page says that the harbour was closed.")
    assert (link.grade, link.asked, link.carried_by) == ("likely", ToolCallRef(1, "c1"), None)
    assert tells(link.reason, "call 1 asked for it", "carried under its id", "not its result")
    link = one(PAGE, PAGE, search(name="look_it_up"))
    assert (link.grade, link.asked, link.carried_by) == ("likely", ToolCallRef(1, "c1"), 2)
    link = one(PAGE, PAGE, search(arguments={"query": ["x"]}))
    assert tells(link.reason, "call 2 carries its result", "call 1 asked", "other arguments")
    assert grades([call(1, [TASK], [search()])], run("t", 160)) == ["likely c1"]
    assert grades([call(1, [TASK], [search()])], run("t", 160, None)) == ["likely c1"]


def test_names() -> None:
    """One of the host's own needs a result that says something; another tool's is the result's alone."""
    ours = "search mcp__web__search mcp_web_search web-search web_search web.search web/search search_mcp_web"
    for name in (*ours.split(), "mcp__Web__search", "my-own-name-search"):
        assert one(PAGE, PAGE, search(name=name)).grade == "certain", name
    hub, cut = search(name="mcp__git_hub__issues_get"), search(name=f"mcp__web__{'search_' * 9}"[:64])
    assert one(PAGE, PAGE, hub, server="git-hub", tool="issues.get").grade == "certain"
    assert one(PAGE, PAGE, cut, tool="search_" * 9).grade == "certain"
    assert one(PAGE, PAGE, search(name="research")).grade == "likely"
    assert one("ok", "ok", search(name="mine_search")).grade == "likely"
    assert one("ok", "ok", search(name="mcp__web__search")).grade == "certain"


def test_a_name_that_another_server_has_is_not_ours() -> None:
    """Two servers with one tool, asked the same at the same time, with the same answer."""
    parts = [search("a", "mcp__web__search"), search("b", "mcp__news__search")]
    later = grew([TASK], parts, shown("a", PAGE), shown("b", PAGE))
    calls = [call(1, [TASK], parts), call(2, later, [])]
    assert grades(calls, run("t", 160, server="news"), run("u", 160)) == ["certain b", "certain a"]


@pytest.mark.parametrize(
    ("generated", "given", "result", "grade"),
    [
        ('{ "a": 1.0, "b": {"d": null, "c": [2]} }', {"b": {"c": [2]}, "a": 1}, "ok", "certain"),
        ("", {}, "ok", "certain"),
        ("null", None, "ok", "certain"),
        ('"{\\"a\\": 1}"', {"a": 1}, "ok", "certain"),
        ('{"a": 1}', {"a": 1, "limit": 10}, PAGE, "certain"),
        ('{"a": 1}', {"a": 1, "limit": 10}, "ok", "likely"),
        ('{"a": 1, "limit": 10}', {"a": "1"}, PAGE, "certain"),
        ("{}", {"session": "s"}, PAGE, "certain"),
        ('{"a": 1}', {"a": 2}, PAGE, "likely"),
        ('{"a": 1}', {"a": 2}, "ok", "none"),
        ('{"a": 1', {"a": 1}, PAGE, "likely"),
        ('{"a": 1', {"a": 1}, "ok", "none"),
    ],
)
def test_arguments(generated: str, given: Any, result: str, grade: str) -> None:
    calls = carried(search(arguments=generated), result)
    [link] = links_of(calls, ToolRun("t", "web", "search", given, text_result(result), 160 * MS, 170 * MS))
    assert link.grade == grade


def text_result(words: str) -> Json:
    return {"content": [{"type": "text", "text": words}]}


ROWS = {"rows": [{"id": 7, "name": "näme", "open": True}]}
QUOTED = 'Say "A & B" to whoever it is that asks'
LONG = "\n".join(f"{at}: line of a long page" for at in range(40))
TWO = {"content": [{"type": "text", "text": "first\tblock"}, {"type": "text", "text": "second"}]}


@pytest.mark.parametrize(
    ("returned", "words", "grade"),
    [
        (PAGE, f"  {PAGE}\r\n", "certain"),
        (TWO, "first\tblocksecond", "certain"),
        (TWO, "first\tblock\n\nsecond", "certain"),
        (TWO, json.dumps(TWO["content"], indent=2), "certain"),
        (TWO, json.dumps(TWO | {"isError": False}), "certain"),
        (TWO, '["first\\tblock", "second"]', "certain"),
        ({"content": [], "structuredContent": ROWS}, json.dumps(ROWS, ensure_ascii=True, indent=4), "certain"),
        ({"content": [], "structuredContent": {"result": 5}}, "5", "certain"),
        (json.dumps(ROWS), json.dumps(ROWS, indent=1, sort_keys=True), "certain"),
        ("ok", '{"result": "ok"}', "certain"),
        ("ok", '{"output": {"content": "ok"}, "took_ms": 5}', "certain"),
        ("ok", '"ok"', "certain"),
        ("ok", "<result>\n<text>ok</text>\n</result>", "certain"),
        ("ok", "```text\nok\n```", "certain"),
        ("no such table", "MCP error -32000: no such table", "certain"),
        (PAGE, f"Here is what was found.\n---\n{PAGE}\n---\nUse it well.", "certain"),
        (QUOTED + "'s\n", f"[TextContent(text='{QUOTED}\\'s\\n')]", "certain"),
        (QUOTED, f"<r>{QUOTED.replace('&', '&amp;').replace(chr(34), '&quot;')}</r>!", "certain"),
        (LONG, LONG[:300], "certain"),
        (LONG, LONG[:300] + "\n... [truncated 912 characters]", "certain"),
        (LONG, LONG[:100] + "[... omitted ...]" + LONG[-100:], "certain"),
        (LONG, "[... omitted ...]\n" + LONG[-100:], "certain"),
        (LONG, "<r>" + LONG[:300] + "...</r>", "certain"),
        ({"content": []}, "", "certain"),
        # What is no match: the call was asked for, but the result does not speak for it.
        (LONG, LONG[:100] + " and so on, a summary of what was found", "likely"),
        (LONG, LONG[:20] + "...", "likely"),
        ("ok", "It went ok, I think.", "likely"),
        ({"content": []}, "(no output)", "likely"),
        ({"content": [], "structuredContent": ROWS}, "", "likely"),
        (PAGE, OTHER, "likely"),
    ],
)
def test_results(returned: str | Json, words: str, grade: str) -> None:
    assert one(returned, words).grade == grade


def test_images_and_errors_are_results() -> None:
    image = {"content": [{"type": "image", "data": "iVBORw0KGgoAAAANSUhEUgAAAAUA", "mimeType": "image/png"}]}
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAUA"}}
    for data in ([url], {"source": {"data": "iVBORw0KGgoAAAANSUhEUgAAAAUA"}}):
        result = Part(type="tool_call_response", id="c1", text="", data=data)
        calls = [call(1, [TASK], [search()]), call(2, grew([TASK], [search()], result), [])]
        assert grades(calls, run("t", 160, image)) == ["certain c1"]
    failed = run("t", 160, None, status="error", error="q is too short")
    assert grades(carried(search(), "MCP error -32602: q is too short"), failed) == ["certain c1"]


# -- several that fit ------------------------------------------------------------------------------------------------


def test_equal_parallel_calls() -> None:
    """Different results tell them apart; equal ones do not, and then none is chosen."""
    parts = [search("a"), search("b")]
    later = grew([TASK], parts, shown("a", PAGE), shown("b", OTHER))
    calls = [call(1, [TASK], parts), call(2, later, [])]
    assert grades(calls, run("t", 160, OTHER), run("u", 160, PAGE)) == ["certain b", "certain a"]
    rewritten = run("u", 160, "rewritten by the host, past recognition")
    assert grades(calls, run("t", 160, OTHER), rewritten) == ["certain b", "likely a"]
    later = grew([TASK], parts, shown("a", PAGE), shown("b", PAGE))
    calls = [call(1, [TASK], parts), call(2, later, [])]
    links = links_of(calls, run("t", 160), run("u", 161))
    assert [it.grade for it in links] == ["ambiguous", "ambiguous"]
    assert links[0].candidates == (ToolCallRef(1, "a"), ToolCallRef(1, "b", place=1))
    assert tells(links[0].reason, "2 tool calls asked", "nothing tells")
    assert implied_runs(read_tool_requests(calls), links) == []


def test_two_equal_runs_for_one_call() -> None:
    calls = carried(search())
    links = links_of(calls, run("t", 160), run("u", 165))
    assert [it.grade for it in links] == ["ambiguous", "ambiguous"]
    assert tells(links[0].reason, "2 equal runs fit the one tool call", "nothing tells")


def test_equal_calls_one_after_the_other_are_told_apart_by_time() -> None:
    first = grew([TASK], [search("a")], shown("a", PAGE))
    second = grew(first, [search("b")], shown("b", PAGE))
    calls = [call(1, [TASK], [search("a")]), call(2, first, [search("b")]), call(3, second, [])]
    assert grades(calls, run("t", 160), run("u", 260), run("v", 360)) == ["certain a", "certain b", "none"]


def test_what_the_host_began() -> None:
    """Before any call, with other arguments, after the result was carried, beside a call that has its run."""
    calls = carried(search())
    links = links_of(calls, run("t", 50), run("u", 160, arguments={"q": "y"}, result=OTHER), run("v", 300))
    assert [it.grade for it in links] == ["none", "none", "none"]
    assert tells(links[0].reason, "no answer asked for it", "the host began it")
    assert grades(calls, run("t", 160), run("u", 165, OTHER)) == ["certain c1", "ambiguous"]


# -- retries ---------------------------------------------------------------------------------------------------------


def test_a_tool_that_ran_again() -> None:
    """The first try had no answer."""
    calls = carried(search(), start=300)
    links = links_of(calls, run("t", 160, None, status="cancelled"), run("u", 180))
    assert [(it.grade, it.asked) for it in links] == [
        ("likely", ToolCallRef(1, "c1")),
        ("certain", ToolCallRef(1, "c1")),
    ]
    assert tells(links[0].reason, "call 1 asked for it", "no result", "ran again")


@pytest.mark.parametrize(
    ("first", "second", "grade"),
    [
        ("{}", '{"retry_of": 1}', "certain"),
        ('{"whole": false}', "{}", "certain"),
        ("{}", "{}", "ambiguous"),  # whichever answer the client took, nobody says
    ],
)
def test_a_model_call_sent_again_that_is_answered_with_the_same_id(first: str, second: str, grade: str) -> None:
    calls = [call(at, [TASK], [search()], **json.loads(it)) for at, it in enumerate((first, second), 1)]
    calls.append(call(3, grew([TASK], [search()], shown("c1", PAGE)), []))
    [link] = links_of(calls, run("t", 260))
    one, two = ToolCallRef(1, "c1"), ToolCallRef(2, "c1")
    found = (link.grade, link.asked, link.candidates)
    assert found == ((grade, two, (two,)) if grade == "certain" else (grade, None, (one, two)))


def test_a_model_call_sent_again_that_is_answered_with_another_id() -> None:
    calls = [call(1, [TASK], [search("a")]), call(2, [TASK], [search("b")])]
    assert grades(calls, run("t", 260)) == ["ambiguous"]
    calls.append(call(3, grew([TASK], [search("b")], shown("b", "something else, written by the host")), []))
    assert grades(calls, run("t", 260)) == ["likely b"]


def test_a_request_that_carries_a_result_twice() -> None:
    """The second model call was sent again: the result was carried by the first of them."""
    later = grew([TASK], [search()], shown("c1", PAGE))
    calls = [call(1, [TASK], [search()]), call(2, later, []), call(3, later, [], retry_of=2)]
    [link] = links_of(calls, run("t", 160))
    assert (link.grade, link.carried_by) == ("certain", 2)


# -- conversations ---------------------------------------------------------------------------------------------------


def agents(first: str, second: str) -> list[ModelCall]:
    """Two agents at the same time; both number their calls from 1."""
    one, other = [message("user", text(first))], [message("user", text(second))]
    return [
        call(1, one, [search()]),
        call(2, other, [search()], start=110),
        call(3, grew(one, [search()], shown("c1", PAGE)), []),
        call(4, grew(other, [search()], shown("c1", OTHER)), [], start=310),
    ]


def test_an_id_of_two_agents_is_followed_in_its_conversation() -> None:
    asks = read_tool_requests(agents("Find the harbour.", "Find the station."))
    links = join(asks, [run("t", 170, OTHER), run("u", 170, PAGE)])
    assert [(it.grade, it.asked) for it in links] == [
        ("certain", ToolCallRef(2, "c1")),
        ("certain", ToolCallRef(1, "c1")),
    ]


def test_agents_that_do_exactly_the_same_are_not_told_apart() -> None:
    asks = read_tool_requests(agents("Find it.", "Find it."))
    links = join(asks, [run("t", 170, OTHER), run("u", 170, PAGE)])
    assert [it.grade for it in links] == ["ambiguous", "ambiguous"]
    assert set(links[0].candidates) == {ToolCallRef(1, "c1"), ToolCallRef(2, "c1")}
    named = [
        call(at, it.turn.messages, [search()], agent="ab"[at % 2]) for at, it in enumerate(agents("x", "x")[:2], 1)
    ]
    later = grew(named[0].turn.messages, [search()], shown("c1", PAGE))
    assert [it.call.agent for it in read_tool_requests([*named, call(3, later, [], agent="a")]) if it.deliveries] == [
        "a"
    ]


def test_the_choice_that_was_followed() -> None:
    answers = [[search("a")], [text("No.")], [search("b")]]
    calls = [call(1, [TASK], *answers), call(2, grew([TASK], [search("b")], shown("b", PAGE)), [])]
    [link] = links_of(calls, run("t", 160))
    assert (link.grade, link.asked) == ("certain", ToolCallRef(1, "b", choice=2))
    [link] = links_of(calls[:1], run("t", 160))
    assert (link.grade, link.candidates) == ("ambiguous", (ToolCallRef(1, "a"), ToolCallRef(1, "b", choice=2)))


def test_a_choice_that_was_not_followed_is_no_reason() -> None:
    calls = [call(1, [TASK], [search("a")], [text("No.")])]
    calls.append(call(2, [TASK, message("assistant", text("No.")), TASK], []))
    [link] = links_of(calls, run("t", 260))
    assert link.grade == "ambiguous"
    assert tells(link.reason, "answers alone", "nothing tells")


def test_a_conversation_that_was_compacted() -> None:
    """What was carried over is not read again, and a result that comes with the summary is found."""
    first = grew([TASK], [search("a")], shown("a", PAGE))
    short = [message("user", text("Summary.")), *grew([], [search("a")], shown("a", "[cleared]"))]
    short = grew(short, [search("b", arguments={"q": "y"})], shown("b", OTHER))
    calls = [call(1, [TASK], [search("a")]), call(2, first, [search("b", arguments={"q": "y"})]), call(3, short, [])]
    assert grades(calls, run("t", 160), run("u", 260, OTHER, {"q": "y"})) == ["certain a", "certain b"]
    assert [link.carried_by for link in links_of(calls, run("t", 160))] == [2]


def test_a_conversation_that_the_provider_keeps() -> None:
    """Requests hold what is new, and name the response that they go on from."""
    after = [{"previous_response_id": name} for name in ("r1", "r2")]
    calls = [
        call(1, [TASK], [search("a")], response_id="r1"),
        call(2, [message("tool", shown("a", PAGE))], [search("a")], response_id="r2", sampling=after[0]),
        call(3, [message("tool", shown("a", OTHER))], [], sampling=after[1]),
    ]
    links = links_of(calls, run("t", 160), run("u", 260, OTHER))
    assert [(it.grade, it.asked) for it in links] == [
        ("certain", ToolCallRef(1, "a")),
        ("certain", ToolCallRef(2, "a")),
    ]


def test_calls_without_ids() -> None:
    parts = [search(None, "search"), asked(None, "fetch", {"u": 1})]
    later = grew([TASK], parts, shown(None, OTHER, "fetch"), shown(None, PAGE, "search"))
    calls = [call(1, [TASK], parts), call(2, later, [])]
    links = links_of(calls, run("t", 160), run("u", 160, OTHER, {"u": 1}, tool="fetch"))
    expected = [("certain", ToolCallRef(1, None)), ("certain", ToolCallRef(1, None, place=1))]
    assert [(it.grade, it.asked) for it in links] == expected


def test_results_that_come_one_by_one() -> None:
    parts = [search("a"), search("b", arguments={"q": "y"})]
    half = grew([TASK], parts, shown("a", PAGE))
    calls = [call(1, [TASK], parts), call(2, half, [text("Wait.")])]
    calls.append(call(3, [*half, message("tool", shown("b", OTHER))], []))
    links = links_of(calls, run("t", 160), run("u", 160, OTHER, {"q": "y"}))
    assert [(it.grade, it.carried_by) for it in links] == [("certain", 2), ("certain", 3)]


def test_when_a_host_may_begin_a_tool() -> None:
    """Before the answer has ended; before it has begun only where clocks may differ."""
    calls, early = carried(search()), [run("t", 95)]
    assert grades(calls, run("t", 130)) == ["certain c1"]
    assert grades(calls, *early) == ["none"]
    assert [it.grade for it in join(read_tool_requests(calls), early, skew_ns=10 * MS)] == ["certain"]


# -- tools inside the agent ------------------------------------------------------------------------------------------


def test_tools_that_ran_inside_the_agent() -> None:
    parts = [search("a"), asked("b", "bash", {"cmd": "ls"}), asked("c", "bash", {"cmd": "rm"})]
    calls = [call(1, [TASK], parts), call(2, grew([TASK], parts, shown("a", PAGE), shown("b", "x y")), [])]
    asks = read_tool_requests(calls)
    assert implied_runs(asks, join(asks, [run("t", 160)])) == [
        ImpliedRun((ToolCallRef(1, "b", place=1),), "bash", '{"cmd": "ls"}', shown("b", "x y"), 2, 150 * MS, 200 * MS)
    ]
    assert [it.name for it in implied_runs(asks, [])] == ["search", "bash"]


def test_an_implied_run_of_agents_that_do_the_same_is_told_once() -> None:
    found = implied_runs(read_tool_requests(agents("Find it.", "Find it.")), [])
    assert [it.asked for it in found[:1]] == [(ToolCallRef(1, "c1"), ToolCallRef(2, "c1"))]
    assert [it.result.text for it in found] == [PAGE, OTHER]


# -- many ------------------------------------------------------------------------------------------------------------


def test_rollouts_whose_truth_is_known() -> None:
    """Agents with sub-agents, parallel calls, retries, choices, compaction, and hosts of all kinds."""
    grades, joinable = Counter[str](), Counter[str]()
    hosts: list[Host] = []
    for seed in range(200):
        made = rollout(seed)
        hosts.append(made.host)
        expected = made.joinable()
        for link in join(read_tool_requests(made.calls), made.runs):
            truth = made.truth[link.run].asked
            grades[link.grade] += 1
            joinable[link.grade] += link.run in expected
            assert link.asked in (None, truth), (seed, link)
            assert link.grade != "ambiguous" or truth is None or truth in link.candidates, (seed, link)
    assert joinable["certain"] >= 0.99 * joinable.total() > 1500
    assert min(grades.values()) > 50
    assert ({it.shown for it in hosts}, {it.name for it in hosts}) == (set(SHOWN), set(NAMES)), "every host is tried"


def test_made_rollouts_that_are_alive_at_the_same_time() -> None:
    """Runs of tools whose address named no rollout are matched with all rollouts: what is chosen is right."""
    grades, joinable, together = Counter[str](), Counter[str](), 5
    for seed in range(0, 150, together):
        made = {f"r{at}/a1": rollout(at) for at in range(seed, seed + together)}
        runs = [replace(run, key=f"{place}:{run.key}") for place, one in made.items() for run in one.runs]
        asking = [CandidateAttempt(place, one.calls) for place, one in made.items()]
        found = find_origins(asking, sorted(runs, key=lambda it: it.start_ns))
        for place, one in made.items():
            expected = one.joinable()
            for key, truth in one.truth.items():
                it = found[f"{place}:{key}"]
                grades[it.grade] += 1
                joinable[it.grade] += key in expected
                if it.asked is not None:
                    assert (it.place, it.asked) == (place, truth.asked), (seed, key, it)
    assert joinable["certain"] >= 0.99 * joinable.total() > 1200
    assert min(grades.values()) > 60


def test_a_long_rollout_is_joined_at_once() -> None:
    """One conversation of 1,000 calls with 5,000 runs: what is carried again is not read again, or it would not end."""
    said, calls, runs = [TASK], list[ModelCall](), list[ToolRun]()
    for at in range(1, 1001):
        parts = [search(f"c{at}-{k}", arguments={"q": k, "page": at % 7}) for k in range(5)]
        calls.append(call(at, list(said), parts))
        for k in range(5):
            given = {"q": k, "page": at % 7}
            runs.append(run(f"{at}-{k}", at * 100 + 60 + k, f"{PAGE} {at} {k}", given))
        said = grew(said, parts, *(shown(f"c{at}-{k}", f"{PAGE} {at} {k}") for k in range(5)))
    assert Counter(link.grade for link in links_of(calls, *runs)) == {"certain": 4995, "likely": 5}


# -- real agents -----------------------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """A real agent as a rollout of its own, its tools as if they had run on a server; of each run the tool-call id."""

    calls: list[ModelCall]
    runs: list[ToolRun]
    ids: dict[str, str]


def trial(agent: trajectories.Agent, number: int) -> Trial:
    made = Trial([], [], {})
    for at, (request, said) in enumerate(agent):
        start = number * 137 + at * 1000
        answer = json.dumps({"choices": [{"index": 0, "message": said}]}).encode()
        turn = by_name("chat").read(request, answer, False)
        made.calls.append(ModelCall(at + 1, start * MS, (start + 400) * MS, turn))
        # What the tools returned stands in the next request.
        later: list[Json] = json.loads(agent[at + 1][0])["messages"] if at + 1 < len(agent) else []
        results = [it for it in later[len(json.loads(request)["messages"]) + 1 :] if it["role"] == "tool"]
        for k, (wanted, result) in enumerate(zip(said.get("tool_calls") or [], results, strict=False)):
            key, asked_for = f"{number}-{at}-{k}", wanted["function"]
            name, given = asked_for["name"], json.loads(asked_for["arguments"])
            words, began, ended = text_result(result["content"]), (start + 500) * MS, (start + 600) * MS
            made.runs.append(ToolRun(key, "airline", name, given, words, began, ended))
            made.ids[key] = wanted["id"]
    return made


def joined(trials: list[Trial]) -> Counter[str]:
    """The grades when agents work at the same time in one rollout; a wrong link counts as wrong."""
    timed = sorted((call for one in trials for call in one.calls), key=lambda it: it.start_ns)
    asks = read_tool_requests([replace(call, sequence=at) for at, call in enumerate(timed, 1)])
    ids = {key: id for one in trials for key, id in one.ids.items()}
    links = join(asks, [run for one in trials for run in one.runs])
    assert implied_runs(asks, links) == []
    return Counter("wrong" if it.asked and it.asked.call_id != ids[it.run] else it.grade for it in links)


def strayed(trials: list[Trial]) -> Counter[str]:
    """The grades when each is a rollout of its own and no run says whose it is."""
    asking = [CandidateAttempt(f"r{at}/a1", one.calls) for at, one in enumerate(trials)]
    found = find_origins(asking, [run for one in trials for run in one.runs])
    grades = Counter[str]()
    for at, one in enumerate(trials):
        for key, id in one.ids.items():
            it = found[key]
            right = it.asked is None or (it.place, it.asked.call_id) == (f"r{at}/a1", id)
            grades[it.grade if right else "wrong"] += 1
    return grades


@pytest.mark.skipif(not trajectories.DATA.exists(), reason="no trajectories at ../shared/data")
def test_real_agents() -> None:
    """Each on its own, and ten at a time as the sub-agents of one rollout, and as rollouts."""
    trials = [trial(one, at % 10) for at, one in enumerate(trajectories.agents())]
    groups = [trials[begin : begin + 10] for begin in range(0, len(trials), 10)]
    alone = sum((joined([one]) for one in trials), Counter[str]())
    assert alone == {"certain": alone.total()}
    for how in (joined, strayed):
        together = sum(map(how, groups), Counter[str]())
        # Two trials of one task ask the same at the same time, with the same results.
        assert set(together) <= {"certain", "ambiguous"}
        assert together["certain"] >= 0.9 * together.total() > 450
