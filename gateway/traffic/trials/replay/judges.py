"""Judges of how far an answer agrees with another: `exact`, a verifier function, or a judge model.

* `exact`: the same next action (`gateway.traffic.trials.replay.agreement`).
* `module:function`: called with both exchanges as dictionaries (the fields of `gateway.model.span.Turn`: messages,
  tools, choices ...), the recorded one first; it returns a number in [0, 1] or a bool. It runs on a thread and must
  return.
* the name of a model: asked through the routes. Answers that agree exactly are not asked about. Otherwise the model is
  asked twice, with the positions exchanged, and not told which answer was recorded; the score is the mean.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from penstock.gateway.model.attributes import LEG
from penstock.gateway.model.turn import Turn
from penstock.gateway.traffic.trials.replay.agreement import exact, judge_prompts, parse_agreement
from penstock.gateway.traffic.trials.replay.outbound_requests import JUDGE, OutboundRequest
from penstock.gateway.traffic.trials.replay.sender import ReleaseSender
from penstock.gateway.traffic.upstreams.routes import RouteTable, alias_at
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.family import ANTHROPIC, OPENAI
from penstock.gateway.wire.http.request import HttpRequest

_FUNCTION = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")
_TOKENS = 1024
"""Limit of a judge's answer in tokens, for APIs that want one."""


class JudgeError(Exception):
    """The judge cannot judge; the message says why and what to do."""


class JudgeResult(NamedTuple):
    """The result of a judge."""

    score: float | None
    """Between 0 and 1; None when the judge gave none."""
    requests: int = 0
    """Number of requests that it took."""


class AnswerJudge(Protocol):
    """One of the three judges."""

    requests: int
    """Number of requests that a judgement takes at most."""

    async def score(self, recorded: Turn, answered: Turn, of: Mapping[str, str]) -> JudgeResult:
        """Return how far two answers agree; `of`: attributes of the span, which name the call. Raises `JudgeError`."""
        ...


async def make_judge(name: str, sender: ReleaseSender, routes: RouteTable) -> AnswerJudge:
    """Return the judge of this name; raises `JudgeError`."""
    if name == "exact":
        return ExactJudge()
    found = _FUNCTION.fullmatch(name)
    if found is None:
        return ModelJudge(name, sender, routes)
    # A thread imports the function: that takes seconds where it needs a model of its own.
    return VerifierJudge(name, await asyncio.to_thread(_function, name, found[1], found[2]))


class ExactJudge:
    """The judge that compares next actions."""

    requests = 0

    async def score(self, recorded: Turn, answered: Turn, of: Mapping[str, str]) -> JudgeResult:
        return JudgeResult(exact(recorded, answered))


class VerifierJudge:
    """The judge that calls a user's function."""

    requests = 0

    def __init__(self, name: str, function: Callable[[Any, Any], Any]) -> None:
        self._name = name
        self._function = function

    async def score(self, recorded: Turn, answered: Turn, of: Mapping[str, str]) -> JudgeResult:
        one, other = recorded.model_dump(mode="json"), answered.model_dump(mode="json")
        try:
            found = await asyncio.to_thread(self._function, one, other)
        except (Exception, SystemExit) as error:
            raise JudgeError(f"verifier {self._name} failed on {_named(of)}: {error!r}") from error
        if inspect.iscoroutine(found):
            found.close()
            raise JudgeError(f"verifier {self._name} is a coroutine function; it must be a plain one")
        if not isinstance(found, int | float) or not 0 <= found <= 1:
            shown = repr(found)[:100]
            raise JudgeError(f"verifier {self._name} returned {shown} for {_named(of)}, not a number in [0, 1]")
        return JudgeResult(float(found))


def _named(of: Mapping[str, str]) -> str:
    return next(iter(of.values()), "a call")


def _function(name: str, module: str, function: str) -> Callable[[Any, Any], Any]:
    hint = "it is looked for where the gateway imports from (PYTHONPATH); a model of such a name needs a route to it"
    try:
        found = getattr(import_module(module), function)
    except (Exception, SystemExit) as error:
        # A user's script may exit; the gateway must not.
        raise JudgeError(f"verifier {name} cannot be loaded: {error!r}; {hint}") from error
    if not callable(found):
        raise JudgeError(f"verifier {name} is no function")
    return found


class ModelJudge:
    """The judge that asks a model."""

    requests = 2

    def __init__(self, name: str, sender: ReleaseSender, routes: RouteTable) -> None:
        # An Anthropic API is spoken where a route leads to one, or the name says so.
        route, chat, path = routes.find(name), by_name("chat"), "/v1/chat/completions"
        if route is None:
            spoken, alias = ANTHROPIC if name.startswith("claude") else OPENAI, None
            self._pool = routes.owner((spoken,), chat, path, [])
        else:
            either = (OPENAI, ANTHROPIC)
            self._pool = (routes.candidates(route, either, chat) or routes.refuse(either, path, route))[0]
            alias = alias_at(route, self._pool.name)
        self._name = alias or name
        self._anthropic = self._pool.config.family is ANTHROPIC
        self._asking = sender

    async def score(self, recorded: Turn, answered: Turn, of: Mapping[str, str]) -> JudgeResult:
        """Return the mean of two judgements."""
        if exact(recorded, answered):
            return JudgeResult(1.0)
        prompts = judge_prompts(recorded, answered)
        answers = await asyncio.gather(*(self._asking.ask(self._question(prompt, of)) for prompt in prompts))
        scores = [score for answer in answers if (score := parse_agreement(answer.turn)) is not None]
        return JudgeResult(sum(scores) / 2 if len(scores) == 2 else None, 2)

    def _question(self, prompt: str, of: Mapping[str, str]) -> OutboundRequest:
        asked: dict[str, Any] = {"model": self._name, "messages": [{"role": "user", "content": prompt}]}
        if self._anthropic:
            asked["max_tokens"] = _TOKENS
        request = HttpRequest()
        request.method = "POST"
        request.headers = [(b"content-type", b"Content-Type", b"application/json")]
        if self._anthropic:
            request.headers.append((b"anthropic-version", b"anthropic-version", b"2023-06-01"))
        return OutboundRequest(
            self._pool,
            by_name("messages" if self._anthropic else "chat"),
            request,
            "/v1/messages" if self._anthropic else "/v1/chat/completions",
            json.dumps(asked).encode(),
            {**of, LEG: JUDGE},
            self._name,
        )
