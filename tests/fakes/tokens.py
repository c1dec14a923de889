"""Conversations of tokens as an engine answers them: requests and responses with ids and log-probabilities.

    story = Talk()                        # a gateway's tape of one rollout, in memory
    one = story.call([1, 2], [(3, 4)])    # a prompt and the answers to it
    story.call([*one.whole(), 5], [(6,)]) # goes on from it
    story.episode()

Messages are made so that they agree with the tokens: the words of a message are its ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fakes.memory_tape import call as head

from penstock.adapters.episode import Bodies, Episode, read_episode
from penstock.gateway.model.rollout import Attempt, AttemptStatus, RolloutStatus, RolloutSummary, Totals
from penstock.gateway.model.span import Span

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Made:
    """A call that was made."""

    span: Span
    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    messages: tuple[Json, ...]

    def whole(self, choice: int = 0) -> tuple[int, ...]:
        """Prompt and answer."""
        return (*self.prompt, *self.answers[choice])

    def said(self, choice: int = 0) -> tuple[Json, ...]:
        """The conversation with the answer."""
        return (*self.messages, message("assistant", self.answers[choice]))


def message(role: str, ids: Sequence[int]) -> Json:
    """Its words are the ids."""
    return {"role": role, "content": " ".join(map(str, ids))}


def logprob(id: int, place: int) -> float:
    """What the engine says of a token: exact in 32 bits."""
    return -(id % 7 + 1) / 8 - place / 1024


def answer(prompt: Sequence[int] | None, answers: Sequence[Sequence[int]], logprobs: bool = True) -> Json:
    """A chat completion as vLLM gives it."""
    choices: list[Json] = []
    for index, ids in enumerate(answers):
        content = [{"token": str(id), "logprob": logprob(id, at), "bytes": [65]} for at, id in enumerate(ids)]
        said: Json = {"index": index, "message": message("assistant", ids), "finish_reason": "stop"}
        choices.append(said | {"logprobs": {"content": content} if logprobs else None, "token_ids": list(ids)})
    return {"id": "c", "model": "m", "prompt_token_ids": None if prompt is None else list(prompt), "choices": choices}


def streamed(answer: Json) -> bytes:
    """The same as a stream: prompt ids first, then a token an event, the choices by turns."""
    first: Json = {key: value for key, value in answer.items() if key != "choices"} | {"choices": []}
    events: list[Json] = [first]
    longest = max(len(choice["token_ids"]) for choice in answer["choices"])
    for at in range(longest):
        for choice in answer["choices"]:
            if at < len(choice["token_ids"]):
                events.append({"choices": [_piece(choice, at)]})
    events += [
        {"choices": [{"index": c["index"], "delta": {}, "token_ids": [], "finish_reason": c["finish_reason"]}]}
        for c in answer["choices"]
    ]
    return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"


def _piece(choice: Json, at: int) -> Json:
    space, logprobs = " " if at else "", choice["logprobs"]
    return {
        "index": choice["index"],
        "delta": {"role": "assistant", "content": space + str(choice["token_ids"][at])},
        "token_ids": [choice["token_ids"][at]],
        "logprobs": None if logprobs is None else {"content": [logprobs["content"][at]]},
    }


@dataclass(slots=True)
class Talk:
    """A rollout's calls, in one attempt or several."""

    reward: float | None = 1.0
    rollout: str = "r1"
    group: str | None = "g1"
    status: AttemptStatus = AttemptStatus.SUCCEEDED
    gaps: int = 0
    heads: list[Span] = field(default_factory=list[Span])
    bodies: dict[tuple[str, int], Bodies] = field(default_factory=dict[tuple[str, int], Bodies])
    attempts: dict[str, Attempt] = field(default_factory=dict[str, Attempt])

    def call(
        self,
        prompt: Sequence[int],
        answers: Sequence[Sequence[int]] = ((7,),),
        messages: Sequence[Json] | None = None,
        *,
        attempt: str = "a1",
        ids: bool = True,
        logprobs: bool = True,
        asked: Mapping[str, Any] | None = None,
        **about: Any,
    ) -> Made:
        """A call; messages are one of the user with the prompt's words if not given. `about` is of its head."""
        sent = tuple(messages) if messages is not None else (message("user", prompt),)
        about = {"model": "m", "choices": len(answers)} | about
        span = head(len(self.heads) + 1, rollout=self.rollout, attempt=attempt, **about)
        given = answer(prompt if ids else None, answers, logprobs)
        request = {"model": "m", "messages": list(sent), **(asked or {})}
        response = streamed(given) if span.stream else json.dumps(given).encode()
        self.record(span, (json.dumps(request).encode(), response))
        return Made(span, tuple(prompt), tuple(map(tuple, answers)), sent)

    def record(self, span: Span, bodies: Bodies | None = None) -> Span:
        """Any span."""
        self.heads.append(span)
        if bodies is not None:
            self.bodies[span.attempt, span.sequence] = bodies
        self.attempts.setdefault(
            span.attempt,
            Attempt(
                rollout=self.rollout,
                id=span.attempt,
                sequence=len(self.attempts) + 1,
                status=self.status,
                reward=self.reward,
                totals=Totals(gaps=self.gaps),
            ),
        )
        return span

    def judge(self, attempt: str = "a1", **about: Any) -> Span:
        """A reward, as a span; anything may stand in it."""
        attributes = {f"penstock.reward.{name}": value for name, value in about.items()}
        return self.record(
            head(len(self.heads) + 1, rollout=self.rollout, attempt=attempt, kind="reward", attributes=attributes)
        )

    def episode(self) -> Episode:
        """As adapters read it."""
        rollout = RolloutSummary(
            id=self.rollout,
            origin="queued",
            mode="train",
            status=RolloutStatus.SUCCEEDED,
            group=self.group,
            attempts=list(self.attempts.values()),
            reward=self.reward,
        )
        return read_episode(rollout, self.heads, lambda span: self.bodies.get((span.attempt, span.sequence)))
