"""An imported trajectory as spans of kind `otel`, and back. Pure.

A trajectory is a span `invoke_agent` with the document's head, and a span below it for each step, with the step's JSON;
those of embedded trajectories stand below the span of the one that holds them. Beside the JSON stand attributes of
OpenTelemetry's GenAI conventions, by which tokens and costs are counted and texts are found. The gateway cuts
attributes (docs/opentelemetry.md), so JSON stands in pieces, the rest of a long one in spans `atif.part` below; pieces
end between words and numbers, so that masking sees secrets whole. What is read back is what was sent, but for masks.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from penstock.gateway.model.span import Span
from penstock.gateway.wire.dialects.loose_json import arr, obj, objs

Wire = dict[str, Any]
AT, STEP, PART, JSON = (f"penstock.atif.{name}" for name in ("at", "step", "part", "json"))
"""Attributes of imported spans: the trajectory's place (0, 0.1 for its first sub-agent, ...), the step's number (0 for
the head), the number of the part from 0, and the pieces of packed JSON."""
COUNTS, DIGEST = "penstock.atif.counts", "penstock.atif.digest"
"""Attributes of heads: how many steps and embedded trajectories there are, and the hash of the whole document."""
PIECE: Final = 8000
"""Most characters of one text that is not cut, less some for what masking adds."""
FIRST, MORE, MOST_PIECES = 24_000, 56_000, 120
"""Most characters of pieces in the span of a step, which has other texts too, and in one with the rest; most pieces in
either."""
TEXT: Final = 8192
"""Most characters of a text that stands in an attribute of its own."""
SHOWN: Final = 200
"""Most characters of a step's text that stand where it is shown in one line."""
UNKNOWN: Final = "unknown"
"""Name and version of an agent that nothing tells; Harbor writes the same."""
LOOK_BACK: Final = 2000
"""Characters before the end of a piece in which it may end sooner, between words."""


class SpanOfStep(NamedTuple):
    """A span of an imported trajectory; times are ns since the epoch."""

    span_id: str
    parent_id: str | None
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]


def digest_of(document: Wire) -> str:
    """The hash of a document, 32 hex digits; the order of members makes no difference."""
    return blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=16).hexdigest()


def spans_of(document: Wire, name: str, now_ns: int) -> Iterator[SpanOfStep]:
    """Yield the spans of a valid trajectory, parents first. `name`: of the attempt, part of the spans' ids; `now_ns`:
    the time of trajectories that say none. A step without a time has that of the step before, or of the next."""
    steps = [step for one in _all(document) for step in objs(one["steps"])]
    times = [ns for step in steps if (ns := time_of(step)) is not None]
    whole = (min(times), max(times)) if times else (now_ns, now_ns)
    yield from _trajectory(document, name, "0", whole, {DIGEST: digest_of(document)})
    totals = obj(document.get("final_metrics"))
    counts = {key.removeprefix("total_"): value for key, value in totals.items() if key != "total_steps"}
    if not any(step.get("metrics") for step in steps) and (about := _usage(counts)):
        # Many harnesses count the whole run only: a call that stands for all.
        about |= {"gen_ai.request.model": obj(document["agent"]).get("model_name")}
        about = {key: value for key, value in about.items() if value is not None}
        yield SpanOfStep(_id(name, "0", 0, -1), _id(name, "0", 0, 0), "all steps", *whole, about)


def _all(document: Wire) -> Iterator[Wire]:
    yield document
    for one in objs(document.get("subagent_trajectories")):
        yield from _all(one)


def time_of(step: Mapping[str, Any]) -> int | None:
    """The time of a step, ns since the epoch; None where it says none. One without a zone is UTC."""
    if (text := step.get("timestamp")) is None:
        return None
    found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    since = (found if found.tzinfo else found.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    ns = (since.days * 86400 + since.seconds) * 10**9 + since.microseconds * 1000
    return ns if 0 < ns < 2**63 else None


def _trajectory(
    document: Wire, name: str, at: str, times: tuple[int, int], more: Wire, parent: str | None = None
) -> Iterator[SpanOfStep]:
    agent, steps = obj(document["agent"]), objs(document["steps"])
    head = {key: value for key, value in document.items() if key not in ("steps", "subagent_trajectories")}
    counts = [len(steps), len(objs(document.get("subagent_trajectories")))]
    about: Wire = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": agent["name"], COUNTS: counts, **more}
    own = _id(name, at, 0, 0)
    yield from _pieces(SpanOfStep(own, parent, f"invoke_agent {agent['name']}", *times, about), head, name, (at, 0))
    now = next((ns for step in steps if (ns := time_of(step)) is not None), times[0])
    for number, step in enumerate(steps, 1):
        now = time_of(step) or now
        took = obj(obj(step.get("extra")).get("penstock")).get("duration_ns")
        end = now + (took if isinstance(took, int) and 0 <= took < 10**15 else 0)
        about = _facts(step, agent)
        label = f"chat {about.get('gen_ai.request.model', '')}".strip() if _asked(step) else str(step["source"])
        yield from _pieces(SpanOfStep(_id(name, at, number, 0), own, label, now, end, about), step, name, (at, number))
    for number, one in enumerate(objs(document.get("subagent_trajectories")), 1):
        yield from _trajectory(one, name, f"{at}.{number}", times, {}, own)


def _id(name: str, at: str, step: int, part: int) -> str:
    return blake2b(f"{name}\0{at}\0{step}\0{part}".encode(), digest_size=8, person=b"penstock.atif").hexdigest()


def _asked(step: Mapping[str, Any]) -> bool:
    """True if a model made the step in this trajectory."""
    return step["source"] == "agent" and not step.get("is_copied_context") and step.get("llm_call_count") != 0


def _facts(step: Mapping[str, Any], agent: Mapping[str, Any]) -> Wire:
    """The attributes by which a step is found and counted; what is copied counts nothing."""
    parts, way = [*_said(step)], "output" if step["source"] == "agent" else "input"
    said = [{"role": _ROLES[step["source"]], "parts": parts}]
    found: Wire = {} if agent["name"] == UNKNOWN else {"gen_ai.agent.name": agent["name"]}
    order = ("text", "tool_call", "reasoning")
    shown = sorted(parts, key=lambda part: order.index(part["type"]))
    texts = [text for part in shown if (text := part.get("content") or part.get("name"))]
    # A text of its own, which ends between words: masking sees secrets whole.
    found |= {f"{way}.value": next(split(texts[0], SHOWN, SHOWN))} if texts else {}
    if len(dumps(said)) <= TEXT:
        found[f"gen_ai.{way}.messages"] = said
    if not _asked(step):
        return found
    ours = obj(obj(step.get("extra")).get("penstock"))
    found |= {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": step.get("model_name") or agent.get("model_name"),
        "gen_ai.response.id": ours.get("response_id"),
    } | _usage(obj(step.get("metrics")))
    return {key: value for key, value in found.items() if value is not None}


def _usage(metrics: Mapping[str, Any]) -> Wire:
    """Counts and cost of a step, or of all, by their names in the GenAI conventions."""
    more = obj(metrics.get("extra"))
    found = {
        "gen_ai.usage.input_tokens": metrics.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": metrics.get("completion_tokens"),
        "gen_ai.usage.cache_read.input_tokens": metrics.get("cached_tokens"),
        "gen_ai.usage.cache_write.input_tokens": more.get("cache_write_tokens"),
        "gen_ai.usage.reasoning.output_tokens": more.get("reasoning_tokens"),
        "gen_ai.usage.cost": metrics.get("cost_usd"),
    }
    return {key: value for key, value in found.items() if value is not None}


_ROLES: Final = {"agent": "assistant", "user": "user", "system": "system"}


def _said(step: Mapping[str, Any]) -> Iterator[Wire]:
    """The texts and tool calls of a step, as parts of a message of the GenAI conventions."""
    if thought := step.get("reasoning_content"):
        yield {"type": "reasoning", "content": thought}
    message = step["message"]
    texts = [message] if isinstance(message, str) else [part.get("text") for part in objs(message)]
    yield from ({"type": "text", "content": text} for text in texts if text)
    for call in objs(step.get("tool_calls")):
        named = {"id": call["tool_call_id"], "name": call["function_name"], "arguments": call["arguments"]}
        yield {"type": "tool_call", **named}


def _pieces(span: SpanOfStep, value: object, name: str, at: tuple[str, int]) -> Iterator[SpanOfStep]:
    """The span with as much of the packed JSON as it takes, and spans below it with the rest."""
    parts, room, count = [list[str]()], FIRST, 0
    for piece in pack(value):
        if len(piece) > room or len(parts[-1]) == MOST_PIECES:
            parts.append([])
            room = MORE
        parts[-1].append(piece)
        room -= len(piece)
    for count, own in enumerate(parts):
        place: Wire = {AT: at[0], STEP: at[1], PART: count, JSON: own}
        if count == 0:
            yield span._replace(attributes=span.attributes | place)
        else:
            yield SpanOfStep(_id(name, *at, count), span.span_id, "atif.part", span.start_ns, span.start_ns, place)


def pack(value: Any) -> list[str]:
    """JSON as texts that may be masked each for itself: how many pieces the skeleton has, the skeleton, and the pieces
    of the texts. In the skeleton `[I]` is the text in piece I, `[I, N]` that of N pieces, `[[A, B]]` an array and
    `[[K, V, ...], 0]` an object."""
    texts, known = list[str](), dict[str, list[int]]()

    def text_of(text: str) -> list[int]:
        if (found := known.get(text)) is None:
            pieces = [*split(text)]
            found = known[text] = [len(texts)] if len(pieces) == 1 else [len(texts), len(pieces)]
            texts.extend(pieces)
        return found

    def bare(value: Any) -> Any:
        if isinstance(value, str):
            return text_of(value)
        if isinstance(value, dict):
            return [[it for key, one in obj(value).items() for it in (text_of(key), bare(one))], 0]
        return [[bare(one) for one in arr(value)]] if isinstance(value, list) else value

    skeleton = [*split(json.dumps(bare(value), separators=(",", ":")))]
    return [str(len(skeleton)), *skeleton, *texts]


def unpack(pieces: Sequence[str]) -> Any:
    """The JSON that was packed. Raises ValueError, TypeError, IndexError or RecursionError if it is damaged."""
    end = 1 + int(pieces[0])
    texts = pieces[end:]

    def whole(value: Any) -> Any:
        match value:
            case [int(at)]:
                return texts[at]
            case [int(at), int(count)] if at + count <= len(texts):
                return "".join(texts[at : at + count])
            case [list()]:
                return [whole(one) for one in arr(value[0])]
            case [list(), 0]:
                members = arr(value[0])
                return {whole(key): whole(one) for key, one in zip(members[::2], members[1::2], strict=True)}
            case list():
                raise ValueError("its skeleton is damaged")
            case _:
                return value

    return whole(json.loads("".join(pieces[1:end])))


def dumps(value: object) -> str:
    """JSON that can be sent: half characters are escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        _ = text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text


def split(text: str, size: int = PIECE, back: int = LOOK_BACK) -> Iterator[str]:
    """Pieces of at most `size` characters that end behind a space or a comma, if one of the last `back` is one."""
    begin = 0
    while begin < len(text):
        end = begin + size
        if end < len(text):
            near = max(begin, end - back)
            end = max(text.rfind(" ", near, end), text.rfind(",", near, end)) + 1 or end
        yield text[begin:end]
        begin = end


class BrokenTrajectoryError(Exception):
    """Imported spans that do not make up the trajectory that was imported."""


def trajectory_of(spans: Iterable[Span]) -> Wire | None:
    """The trajectory that the spans of an attempt were imported from; None if they were not. Raises
    `BrokenTrajectoryError`."""
    found: defaultdict[str, dict[int, dict[int, list[Any]]]] = defaultdict(lambda: defaultdict(dict))
    counts: dict[str, list[Any]] = {}
    for span in spans:
        said = span.attributes or {}
        at, step, part = said.get(AT), said.get(STEP), said.get(PART)
        if span.kind == "otel" and isinstance(at, str) and isinstance(step, int) and isinstance(part, int):
            found[at][step][part] = arr(said.get(JSON))
            counts |= {at: arr(said[COUNTS])} if COUNTS in said else {}
    return _built(found, counts, "0") if found else None


Parts = Mapping[int, Mapping[int, list[Any]]]
"""Pieces of JSON by step and part."""


def _built(found: Mapping[str, Parts], counts: Mapping[str, list[Any]], at: str) -> Wire:
    match counts.get(at):
        case [int(steps), int(embedded)]:
            made: Wire = {}
            for name, value in _read(found[at], at, 0).items():
                made[name] = value
                if name == "agent":
                    made["steps"] = [_read(found[at], at, number) for number in range(1, steps + 1)]
            inner = [_built(found, counts, f"{at}.{number}") for number in range(1, embedded + 1)]
            return made | ({"subagent_trajectories": inner} if inner else {})
        case _:
            raise BrokenTrajectoryError(f"trajectory {at}: its head is missing")


def _read(own: Parts, at: str, step: int) -> Wire:
    where = f"trajectory {at}, {f'step {step}' if step else 'its head'}"
    parts = own.get(step, {})
    if not parts or set(parts) != set(range(len(parts))):
        raise BrokenTrajectoryError(f"{where}: a part is missing")
    try:
        value = unpack([str(text) for part in sorted(parts) for text in parts[part]])
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise BrokenTrajectoryError(f"{where}: {error}; a rule of masking may have cut into it") from None
    if not isinstance(value, dict):
        raise BrokenTrajectoryError(f"{where}: it is no object")
    return obj(value)
