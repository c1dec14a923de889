"""Tools of agents for a terminal: the definitions that their servers list, calls that wait for a person, and the effect
of policies. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import Match, SequenceMatcher
from typing import Any, Final, NamedTuple, cast

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from penstock.console.views.noun import NounSelection, NounView, all_rows
from penstock.console.views.table import (
    Column,
    Listing,
    abbreviate,
    ago,
    clean,
    duration,
    figure,
    joined,
    number,
    plain,
)
from penstock.gateway.model.foreign_text import count_invisible, visible, visible_name
from penstock.gateway.model.toml import pluralized
from penstock.gateway.model.tools import DefinitionKind, DefinitionVersion, ServerDefinitions, ServerView
from penstock.gateway.reading.policy.questions import Question
from penstock.gateway.reading.policy.report import BacktestCall, PolicyReport, RuleFigures

KINDS: Final[tuple[DefinitionKind, ...]] = ("tools", "prompts", "resources", "templates", "instructions")
SERVERS: Final = (
    Column("server"), Column("list"), figure("has"), figure("versions"), figure("newest"), figure("approved"),
    figure("first seen", 2), figure("last seen", 1), Column("on change", 3), Column("state", narrows="words", least=12),
)  # fmt: skip
DEFINITIONS: Final = (
    Column("list", 4), Column("name", narrows="fold", least=16), Column("fingerprint", 3), figure("first seen", 2),
    figure("last seen", 1), figure("changes"), Column("state", narrows="words", least=16),
)  # fmt: skip
_SHORT: Final = 12
"""Characters of a fingerprint that are shown."""


def servers(rows: Iterable[ServerView], now_ns: int) -> Listing:
    """A line for each list of each server."""
    made = Listing(*SERVERS)
    for one in rows:
        for kind in KINDS:
            versions = one.of(kind)
            if not versions:
                continue
            newest = one.version(one.newest.get(kind)) or versions[-1]
            numbers = f"{len(newest.items):,}", f"{len(versions):,}", str(newest.version), str(one.pinned.get(kind))
            times = ago(versions[0].first_seen_ns, now_ns), ago(newest.last_seen_ns, now_ns)
            made.add_row(
                plain(one.server), kind, *numbers, *times, one.on_change or "not configured", _state(one, kind)
            )
        if not one.versions:
            made.add_row(plain(one.server), *[""] * 7, one.on_change or "", "nothing listed yet")
    return made


def _state(one: ServerView, kind: DefinitionKind) -> Text:
    if not one.pending(kind):
        return Text("approved")
    said = {"hold": "waits for approval; the approved one is served", "deny": "denied until approved"}
    return Text(said.get(one.on_change or "", "not approved"), style="yellow")


def server(one: ServerView, now_ns: int) -> Group:
    """The definitions that a server lists now, those that were approved and are not listed any more, and the
    approvals."""
    made = Listing(*DEFINITIONS)
    for kind in KINDS:
        newest, approved = one.version(one.newest.get(kind)), one.version(one.pinned.get(kind))
        if newest is None:
            continue
        before = {} if approved is None else approved.items
        for name in sorted(newest.items.keys() | before.keys()):
            made.add_row(*_row(one, kind, name, newest.items, before, now_ns))
    head = joined(Text(visible_name(one.server), style="bold"), f"on_change {one.on_change or 'not configured'}")
    pieces: list[RenderableType] = [head, made]
    for approval in one.approvals:
        before = "" if approval.before is None else f" in place of {approval.before}"
        who = approval.person or "somebody"
        said = f"{approval.kind}: version {approval.version}{before} approved by {visible_name(who)}"
        pieces.append(joined(said, ago(approval.at_ns, now_ns), visible_name(approval.note)))
    return Group(*pieces)


def _row(
    one: ServerView,
    kind: DefinitionKind,
    name: str,
    newest: Mapping[str, str],
    approved: Mapping[str, str],
    now_ns: int,
) -> Sequence[str | Text]:
    now = newest.get(name, approved.get(name, ""))
    having = [version for version in one.of(kind) if name in version.items]
    same = [version for version in having if version.items[name] == now]
    wordings = len({version.items[name] for version in having})
    times = ago(same[0].first_seen_ns, now_ns), ago(max(it.last_seen_ns for it in same), now_ns)
    hidden = count_invisible(_decoded(one.texts.get(now, "")))
    state = Text(_what(name, newest, approved), style="" if newest.get(name) == approved.get(name) else "yellow")
    if hidden:
        state.append(f"; {pluralized(hidden, 'character')} in it cannot be seen", style="red")
    return kind, visible_name(name), now[:_SHORT], *times, f"{wordings - 1:,}", state


def _what(name: str, newest: Mapping[str, str], approved: Mapping[str, str]) -> str:
    if name not in newest:
        return "removed"
    if name not in approved:
        return "unknown: it was never approved"
    return "approved" if newest[name] == approved[name] else "not as approved"


def _decoded(text: str) -> str:
    """A definition with the characters that its JSON writes as escapes."""
    return json.dumps(json.loads(text), ensure_ascii=False).replace("\\n", "\n") if text else ""


def approved(one: ServerDefinitions) -> Text:
    """The definitions that agents get from now on, in a sentence."""
    lists = ", ".join(f"{kind} version {one.pinned[kind]}" for kind in KINDS if kind in one.pinned)
    return Text(f"Approved: agents are given {lists} of {visible_name(one.server)}.")


# -- differences between versions ----


_NAMES: Final = ("name", "uri", "uriTemplate")
"""Fields in which a definition has its name."""
_WORDS: Final = re.compile(r"<tags: [^<>]*>|\s+|(?:(?!<tags: [^<>]*>)\S)+")
_PART: Final = re.compile(r"[^.\[\"]+")
"""A field's name that needs no quotes: it cannot be read as a path, nor as another, quoted name."""
_MOST_WORDS: Final = 4000
"""Maximum number of words of texts that are compared word by word; longer texts are shown as a whole."""
_FEW: Final = 2
"""Number of unchanged words between two changes that count as a coincidence, so as a part of the changes."""
_NEAR: Final = 12
"""Number of unchanged words that are shown beside a change."""


class VersionPair(NamedTuple):
    """Two versions of a list that are compared."""

    before: DefinitionVersion
    after: DefinitionVersion


def version_pairs(one: ServerDefinitions, version: int | None) -> list[VersionPair]:
    """The versions to compare: `version` and the one of its list before it; without `version`, of each list the newest
    and the approved one or, where these are the same, the newest and the one before it."""
    wanted = one.version(version)
    if version is not None:
        return [] if wanted is None else [found for found in [_with_before(one, wanted)] if found is not None]
    found = list[VersionPair]()
    for kind in KINDS:
        newest, approved = one.version(one.newest.get(kind)), one.version(one.pinned.get(kind))
        if newest is None:
            continue
        if approved is not None and approved.version != newest.version:
            found.append(VersionPair(approved, newest))
        elif (last := _with_before(one, newest)) is not None:
            found.append(last)
    return found


def _with_before(one: ServerDefinitions, version: DefinitionVersion) -> VersionPair | None:
    others = [it for it in one.of(version.kind) if it.version < version.version]
    return VersionPair(others[-1], version) if others else None


def difference(one: ServerView, version: int | None, now_ns: int) -> Group:
    """The changes, word by word."""
    pieces = list[RenderableType]()
    for before, after in version_pairs(one, version):
        title = f"{after.kind}: version {before.version} → {after.version}"
        pieces.append(joined(Text(title, style="bold"), f"listed first {ago(after.first_seen_ns, now_ns)}"))
        for name in sorted(before.items.keys() | after.items.keys()):
            was, is_ = before.items.get(name), after.items.get(name)
            if was != is_:
                what = "removed" if is_ is None else "unknown until now" if was is None else "changed"
                pieces.append(Padding.indent(joined(Text(visible_name(name) or after.kind, style="bold"), what), 2))
                pieces += _definition(name, one.texts.get(was or ""), one.texts.get(is_ or ""))
    return Group(*pieces) if pieces else Group(Text("Nothing has changed."))


def _definition(name: str, was: str | None, is_: str | None) -> Iterator[RenderableType]:
    before, after = (dict(_leaves(json.loads(text))) if text is not None else {} for text in (was, is_))
    for path in dict.fromkeys([*before, *after]):
        said = [values.get(path) for values in (before, after)]
        # The definition's own name is in the line above.
        if said[0] != said[1] and not (path in _NAMES and set(said) <= {None, _json(name)}):
            texts = [_text(one) for one in said]
            if texts[0] == texts[1]:  # "1" and 1
                texts = [one or "" for one in said]
            yield Padding.indent(Text(f"{visible_name(path) or 'text'}:", style="dim"), 4)
            yield Padding.indent(words(*texts), 6)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, JSON) of every value in a definition that holds no other. Each path is unique: two values with one path
    would hide each other."""
    if isinstance(value, dict) and value:
        for key, one in cast("dict[str, Any]", value).items():
            part = key if _PART.fullmatch(key) else _json(key)
            yield from _leaves(one, f"{path}.{part}" if path else part)
    elif isinstance(value, list) and any(isinstance(one, dict | list) for one in cast("list[Any]", value)):
        for place, one in enumerate(cast("list[Any]", value)):
            yield from _leaves(one, f"{path}[{place}]")
    else:
        yield path, _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(said: str | None) -> str:
    """A value in readable form: a text without quotes."""
    return "" if said is None else json.loads(said) if said.startswith('"') else said


def words(before: str, after: str) -> Text:
    """Two texts in one: `[-removed-]`, `{+added+}`. The middle of long unchanged stretches is left out."""
    old, new = (_WORDS.findall(visible(text)) for text in (before, after))
    made = Text()
    if max(len(old), len(new)) > _MOST_WORDS:
        return made.append(f"[-{visible(before)}-]", "red").append(f"{{+{visible(after)}+}}", "green")
    at, place = 0, 0
    for same in _stretches(old, new):
        if at < same.a:
            made.append(f"[-{''.join(old[at : same.a])}-]", "red")
        if place < same.b:
            made.append(f"{{+{''.join(new[place : same.b])}+}}", "green")
        at, place = same.a + same.size, same.b + same.size
        made.append(_shortened(old[same.a : at], first=same.a == 0, last=at == len(old)))
    return made


def _stretches(old: Sequence[str], new: Sequence[str]) -> Iterator[Match]:
    """The unchanged stretches, in order; the last one is the end. A word or two between two changes counts as a part of
    them."""
    for same in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        inside = same.a > 0 and same.b > 0 and same.a + same.size < len(old) and same.b + same.size < len(new)
        if not inside or sum(not word.isspace() for word in old[same.a : same.a + same.size]) > _FEW:
            yield same


def _shortened(same: Sequence[str], first: bool, last: bool) -> str:
    """The unchanged words next to the changes, and the number of the others."""
    most = 2 * _NEAR
    head, tail = (0 if first else most), (0 if last else most)
    left_out = sum(not word.isspace() for word in same[head : len(same) - tail])
    if left_out <= _NEAR:
        return "".join(same)
    begin, end = "".join(same[:head]), "".join(same[len(same) - tail :])
    return f"{begin}[… {left_out:,} words …] {end}" if begin or end else "".join(same)


# -- policies on calls ----


RULES = (
    Column("rule"), Column("verdict"), figure("calls"), figure("unread", 1), figure("rollouts", 2),
    figure("reward"), figure("others"), Column("difference"),
)  # fmt: skip
STOPPED = (
    Column("call"), Column("verdict", 2), Column("rule"), Column("server", 1),
    Column("tool", narrows="cut", least=12), Column("why", 3, narrows="cut", least=24),
)  # fmt: skip
STYLES = {"deny": "red", "ask": "yellow", "kernel": "yellow", "redact": "cyan", "dry": "blue", "allow": "green"}
LONGEST = 2000
"""Maximum number of characters of arguments that are shown."""


def question(one: Question, now_ns: int) -> Group:
    """A waiting call with all that a person has to know."""
    return Group(*_question(one, now_ns))


def _question(one: Question, now_ns: int) -> Iterator[Text]:
    left = duration(max(0, one.until_ns - now_ns))
    yield Text.assemble(plain(one.id, "bold"), "  ", plain(one.tool, "yellow"), plain(f" on {one.server}"))
    about = [f"asked {ago(one.asked_ns, now_ns)}, refused in {left}", f"rollout {one.rollout}/{one.attempt}"]
    about.append(f"rule {one.rule}" + (f": {one.message}" if one.message else ""))
    yield from (plain(f"  {line}") for line in about)
    yield plain(f"  {abbreviate(clean(one.arguments), LONGEST)}")


WAITING = NounView[NounSelection, Question](
    "waiting",
    Question,
    all_rows(lambda client: client.waiting(), "No tool call waits for a person."),
    lambda one: one.id,
    whole=question,
    every_s=3.0,
)


def answered(one: Question, verdict: str) -> Text:
    """The verdict on a call that has waited, in a sentence."""
    done = "It runs" if verdict == "approve" else "It was refused"
    return plain(f"{done}: {one.tool} on {one.server}, for rollout {one.rollout}.")


def report(told: PolicyReport) -> Group:
    """The sums, rule by rule, and the calls that would not have run as they did."""
    table = Listing(*RULES)
    for one in told.rules:
        unread = plain(one.unread or "")
        means = (number(_rounded(one.touched.mean)), number(_rounded(one.others.mean)))
        head = (plain(one.rule), plain(one.verdict, STYLES[one.verdict]), plain(f"{one.calls:,}"), unread)
        table.add_row(*head, plain(f"{one.touched.rollouts:,}"), *means, _difference(one))
    shown: list[RenderableType] = [Text(_summary(told)), Text(), table, Text(), Text(_MEANING, "dim")]
    if told.stopped:
        shown += [Text(), _stopped(told.stopped), *_more(told)]
    return Group(*shown)


_MEANING = (
    "reward: mean of the rollouts that the rule touches; others: of those with tool calls that it does not.\n"
    "difference: the one less the other, with its 95 % interval. It does not say that the rule is why."
)


def _summary(told: PolicyReport) -> str:
    looked = f"{pluralized(told.calls, 'tool call')} of {pluralized(told.rollouts, 'rollout')}"
    ends = [
        (told.denied, "would not have run"),
        (told.asked, "would have waited for a person or a kernel"),
        (told.changed, "would have been changed"),
    ]
    said = ", ".join(f"{number:,} {words}" for number, words in ends if number)
    return f"{looked}: {said or 'all would have run'}."


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _difference(one: RuleFigures) -> Text:
    if one.difference is not None:
        value, low, high = one.difference
        return plain(f"{value:+.3f} ({low:+.3f} to {high:+.3f})")
    return Text("" if not one.calls else "too little to tell", "dim")


def _stopped(calls: Sequence[BacktestCall]) -> Listing:
    made = Listing(*STOPPED)
    for one in calls:
        place, style = plain(f"{one.rollout}/{one.attempt}#{one.span}"), STYLES[one.verdict]
        what = (plain(one.verdict, style), plain(one.rule), plain(one.server), plain(one.tool))
        made.add_row(place, *what, plain(one.problem))
    return made


def _more(told: PolicyReport) -> Iterator[Text]:
    more = told.denied + told.asked + told.changed - len(told.stopped)
    if more:
        yield Text(f"and {more:,} more; --limit shows more of them.", "dim")
