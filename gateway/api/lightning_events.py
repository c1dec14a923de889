"""Reads the tape for Agent Lightning 1.0's server API: rollouts, the order in which they ended, and events.

Model calls are events that nobody had to send: `model_request` is made of a call's bytes when it is read. What engines
said in a stream is a list of its events there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, Final

from penstock.gateway.api.guard import ApiError
from penstock.gateway.model.lightning import Json, unpack
from penstock.gateway.model.lightning_server import (
    FIRST,
    WORDS,
    EventListing,
    ServerListing,
    ServerRecord,
    TerminalListing,
    last_attempt,
    rollout_answer,
    terminal_answer,
)
from penstock.gateway.model.rollout import FINAL, Reward, Rollout
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.turn import Exchange
from penstock.gateway.reading.turns import plain_bodies
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.tape.store.view import ChangeFilter, TapeView
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.loose_json import arr, loads, obj, objs
from penstock.gateway.wire.dialects.sse import chunks
from penstock.gateway.work.lightning_server import REWARD, event_answer, server_record

_PAGE: Final = 1000
_ROUTES: Final = "routed_experts"
_ROLLOUTS: Final = ChangeFilter(["rollout"])
Models = Sequence[tuple[int, Mapping[str, Json]]]
"""(Time in ns from which they serve, engine by upstream), oldest first."""


class LightningServerReader:
    """Reads a tape in the words of Agent Lightning's server; thread-safe."""

    def __init__(self, tape: StoreReader) -> None:
        self._tape = tape
        self._lock = Lock()
        self._cursor: int | None = None
        self._open: dict[str, None] = {}
        """Rollouts that have not ended, oldest first."""
        self._ended: list[str] = []
        """Rollouts in the order in which they ended."""
        self._known = set[str]()

    # -- rollouts ----------------------------------------------------------------------------------------------------

    def rollout(self, name: str) -> Json:
        """A rollout with the names of the attempts of which there is anything; raises `ApiError`."""
        with self._tape.view() as view:
            found, _ = self._found(view, name)
            attempts = [one.id for one in view.attempts(name) if one.spans]
        return {"rollout": found, "attempts": attempts}

    def rollouts(self, asked: ServerListing) -> list[Json]:
        """Rollouts in these states, oldest first."""
        self._catch_up()
        wanted = {status for status, word in WORDS.items() if word in asked.state_in}
        with self._lock:
            names = [*(self._ended if wanted & FINAL else ()), *(self._open if wanted - FINAL else ())]
        mixed = bool(wanted & FINAL and wanted - FINAL)
        answers: list[Json] = []
        for name in dict.fromkeys(names):
            if not mixed and len(answers) >= asked.limit:
                break
            with self._tape.view() as view:
                rollout, record = view.rollout(name), self._record(view, name)
                if rollout is not None and record is not None and rollout.status in wanted:
                    answers.append(rollout_answer(rollout, record, view.attempts(name)))
        answers.sort(key=lambda one: one["status"]["created_at"])
        return answers[: max(0, asked.limit)]

    def ended(self, asked: TerminalListing) -> Json:
        """Rollouts that have ended, in that order, and where to go on. One that is gone keeps its place."""
        self._catch_up()
        after = max(0, asked.after)
        with self._lock:
            names, total = self._ended[after : after + max(1, asked.limit)], len(self._ended)
        items: list[Json] = []
        for name in names:
            with self._tape.view() as view:
                rollout = None if self._record(view, name) is None else view.rollout(name)
            if rollout is not None and rollout.status in FINAL:
                items.append(terminal_answer(rollout))
        return {"items": items, "next_after": after + len(names), "total_terminal": total}

    def _catch_up(self) -> None:
        """Follow the change feed; the first time, read all rollouts of this API."""
        with self._lock:
            if self._cursor is None:
                self._cursor = self._tape.cursor()
                prefix = keys.LIGHTNING_SERVED
                names = [key[1:-1].decode() for key, _ in self._tape.records("lightning", prefix) if key[:1] == prefix]
                found = [rollout for _, rollout in reversed(self._tape.named(names))]
                self._known = {one.id for one in found}
                self._open = {one.id: None for one in found if one.status not in FINAL}
                ended = [one for one in found if one.status in FINAL]
                self._ended = [one.id for one in sorted(ended, key=lambda one: one.ended_ns or 0)]
            while True:
                changes, after = self._tape.changes(self._cursor, _PAGE, _ROLLOUTS)
                for change in changes:
                    if change.rollout is not None:
                        self._note(change.rollout)
                if after == self._cursor:
                    return
                self._cursor = after

    def _note(self, rollout: Rollout) -> None:
        name = rollout.id
        if name not in self._known:
            with self._tape.view() as view:
                if not view.has("lightning", keys.LIGHTNING_SERVED + keys.rollout_key(name)):
                    return
            self._known.add(name)
            self._open[name] = None
        if rollout.status not in FINAL:
            self._open[name] = None
        elif name in self._open:
            del self._open[name]
            self._ended.append(name)

    def _found(self, view: TapeView, name: str) -> tuple[Json, str]:
        """(A rollout, the attempt that counts); raises `ApiError`."""
        rollout, record = view.rollout(name), self._record(view, name)
        if rollout is None or record is None:
            raise ApiError(404, f"Rollout not found: {name}", "rollout_id", name)
        answer = rollout_answer(rollout, record, view.attempts(name))
        return answer, last_attempt(rollout, record) or FIRST

    def _record(self, view: TapeView, name: str) -> ServerRecord | None:
        found = server_record(view.get("lightning", keys.LIGHTNING_SERVED + keys.rollout_key(name)))
        return None if found is None or found.hidden else found

    # -- events ------------------------------------------------------------------------------------------------------

    def events(self, name: str, asked: EventListing) -> list[Json]:
        """The events of the attempt that counts, in the order in which they ended."""
        with self._tape.view() as view:
            _, attempt = self._found(view, name)
            origins = view.origins(name)
            assert origins is not None, name
            prefix = keys.LIGHTNING_EVENT + keys.attempt_record_key(origins.number, attempt)
            sent = {int.from_bytes(key[-4:]): unpack(value) for key, value in view.scan("lightning", prefix)}
        found = sorted(self._events(name, attempt, sent, asked.event_type), key=lambda one: one["timestamp"])
        found = _without_superseded(found) if asked.include_routed_experts else list(map(_without_routes, found))
        return _last_of_each_prompt(list(map(_trimmed, found))) if asked.format == "triplet" else found

    def _events(self, name: str, attempt: str, sent: Mapping[int, Json], wanted: str | None) -> Iterator[Json]:
        models = self.models()
        spans = [one for one in self._tape.spans(name, attempt) if one.status != SpanStatus.OPEN]
        requests = [one for one in spans if one.kind == "llm" and by_name(one.dialect).generates]
        for span in spans:
            event = sent.get(span.sequence)
            if event is not None:
                kind, data = event["event_type"], event["data"]
            elif span.kind == "reward" and not (Reward.of(span).key or "").startswith(REWARD):
                kind, data = "reward", _reward(span)
            else:
                continue
            if wanted in (None, kind):
                yield event_answer((name, attempt), kind, span.end_ns or span.start_ns, data)
        for span, exchange in self._tape.exchanges(requests if wanted in (None, "model_request") else ()):
            data = _model_request(span, exchange, models)
            yield event_answer((name, attempt), "model_request", span.end_ns or span.start_ns, data)

    def models(self) -> Models:
        """The engines that were registered, with the time of each registration."""
        with self._tape.view() as view:
            found = [
                (int.from_bytes(key[1:]), unpack(value)) for key, value in view.scan("lightning", keys.LIGHTNING_MODELS)
            ]
        return [(at, {one["upstream"]: one for one in engines}) for at, engines in found]


def _reward(span: Span) -> Json:
    reward = Reward.of(span)
    said = {"value": reward.value, "source": reward.source, "reason": reward.reason, "message": None}
    return said | ({"dimensions": reward.dimensions} if reward.dimensions else {})


def _model_request(span: Span, exchange: Exchange | None, models: Models) -> Json:
    """The data of a model call."""
    asked, answered = (b"", b"") if exchange is None else plain_bodies(exchange)
    request, response = obj(loads(asked)), list(chunks(answered, [])) if span.stream else obj(loads(answered))
    pieces = response if isinstance(response, list) else [response]
    routes = next((one.pop(_ROUTES) for it in pieces for one in objs(it.get("choices")) if one.get(_ROUTES)), None)
    at = bisect_right(models, span.start_ns, key=lambda one: one[0]) - 1
    engine = models[at][1].get(span.upstream or "", {}) if at >= 0 else {}
    model = span.model_served or span.model
    version = (span.versions or {}).get(span.model or "", engine.get("version", 0))
    usage = next((one["usage"] for one in reversed(pieces) if one.get("usage")), None)
    return {
        "model": engine.get("model") or model,
        "model_version": version,
        "request": request,
        "response": response,
        "server": {"model": engine.get("model") or model, "endpoint": engine.get("endpoint"), "version": version},
        "latency_ms": (span.duration_ns or 0) / 1e6,
        "http_status": span.http_status,
        "status": "ok" if span.status == SpanStatus.OK else "error",
        "retry_count": 0,
        "usage": usage,
        "finish_reason": span.finish,
        "error": span.error,
    } | ({} if routes is None else {_ROUTES: routes})


# -- triplets ----------------------------------------------------------------------------------------------------------
#
# As Agent Lightning makes them of the same events, but streams have log-probabilities, too.


def _trimmed(event: Json) -> Json:
    """An event as training uses it."""
    if event["event_type"] == "model_request":
        return event | {"data": _tokens(event["data"])}
    if event["event_type"] == "reward":
        data = event["data"]
        more = {key: data[key] for key in ("source", "reason") if data.get(key) is not None}
        return event | {"data": {"value": data.get("value"), **more}}
    return event


def _tokens(data: Json) -> Json:
    response: Any = data.get("response")
    pieces = objs(response) if isinstance(response, list) else [obj(response)]
    choices = [one for it in pieces for one in objs(it.get("choices"))[:1] if not one.get("index")]
    both = [*pieces, *choices]
    prompts = [ids for it in both if (ids := arr(it.get("prompt_token_ids")))]
    ids = [id for one in choices for id in arr(one.get("token_ids"))]
    server = obj(data.get("server"))
    found: Json = {
        "prompt_token_ids": prompts[0] if prompts else [],
        "response_token_ids": ids,
        "response_log_probs": _log_probs(choices),
        "server": {"model": server.get("model"), "version": server.get("version")},
    }
    found |= {key: data[key] for key in ("http_status", "status") if key in data}
    if data.get(_ROUTES) is not None:
        found[_ROUTES] = data[_ROUTES]
    error = next((it["error"] for it in pieces if it.get("error") is not None), None)
    return found if error is None else found | {"error": error}


def _log_probs(choices: Iterable[Json]) -> list[float] | None:
    """The log-probabilities of a choice and its pieces; None where one is missing or is no finite number."""
    found: list[Any] = []
    for said in (obj(one["logprobs"]) for one in choices if one.get("logprobs") is not None):
        entries, values = said.get("content"), said.get("token_logprobs")
        if not isinstance(entries, list) and not isinstance(values, list):
            return None
        found += [obj(one).get("logprob") for one in arr(entries)] if isinstance(entries, list) else arr(values)
    good = all(isinstance(one, int | float) and math.isfinite(one) for one in found)
    return [float(one) for one in found] if good and found else None


def _last_of_each_prompt(events: Sequence[Json]) -> list[Json]:
    """The last request of each prompt. One without ids is never taken for another."""
    last: dict[tuple[int, ...], int] = {}
    kept = set[int]()
    for at, event in enumerate(events):
        ids = arr(event["data"].get("prompt_token_ids")) if event["event_type"] == "model_request" else []
        if ids and all(type(one) is int for one in ids):
            last[tuple(ids)] = at
        else:
            kept.add(at)
    kept.update(last.values())
    return [event for at, event in enumerate(events) if at in kept]


def _without_routes(event: Json) -> Json:
    return event | {"data": {key: it for key, it in event["data"].items() if key != _ROUTES}}


def _without_superseded(events: Sequence[Json]) -> list[Json]:
    """Events with the experts of a growing conversation at its last request only: these cover the others."""
    made, before = list(events), -1
    for at, event in enumerate(events):
        if event["event_type"] != "model_request":
            continue
        if before >= 0 and event["data"].get(_ROUTES) is not None:
            new, old = _tokens(event["data"]), _tokens(events[before]["data"])
            context = [*old["prompt_token_ids"], *old["response_token_ids"]]
            prompt = new["prompt_token_ids"]
            if prompt == old["prompt_token_ids"] or prompt[: len(context)] == context:
                made[before] = _without_routes(events[before])
        before = at
    return made
