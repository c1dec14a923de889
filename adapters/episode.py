"""The content of a rollout, read from its recorded bytes: an `Episode` of attempts, each with its calls in order.

    episode = read(summary, spans, bodies)      # bodies: span -> (request, response), decoded, or None

Expensive parts are read late: token ids when samples need them, messages when conversations do. A call keeps its bytes
as long as its episode lives and no longer. Messages take many times more memory as objects, and every call of a
conversation repeats all of them: those of large episodes are not kept, but read again each time. Odd bytes never raise:
a part that cannot be read is None, and its user reports that in a `SampleReport`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.gateway.model.rollout import Attempt, RolloutSummary
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Turn
from penstock.gateway.reading.diagnosis.rows import CallMessages, call_messages
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.loose_json import Json, loads, obj
from penstock.gateway.wire.dialects.parts import distribution_fields, forcing_field

if TYPE_CHECKING:
    from penstock.adapters.tokens import CompletionOutput

# A recorded answer without its tokens. Pure, and free of numpy; odd bytes never raise.

_TOKENS = ("prompt_token_ids", "token_ids", "logprobs")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_choices = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode


def strip_tokens(response: bytes) -> bytes:
    """A plain answer without ids and log-probabilities, which are most of it, so that a `Turn` can be read from it
    quickly. Any other body is returned as it is.
    """
    try:
        answer = _without_tokens(_fields(response))
        if "choices" in answer:
            choices = list(map(_without_tokens, _choices(answer["choices"])))
            answer["choices"] = msgspec.Raw(msgspec.json.encode(choices))
        return msgspec.json.encode(answer)
    except (ValueError, RecursionError):
        return response


def _without_tokens(fields: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    return {name: value for name, value in fields.items() if name not in _TOKENS}


Bodies = tuple[bytes, bytes]
"""Request and response of a call, content encodings removed."""
KEPT: Final = 1 << 20
"""The most bytes of an episode's calls whose messages are kept as objects."""


@dataclass(slots=True)
class MessageCache:
    """State that the calls of an episode share."""

    interned: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    """Their messages in the form that is compared, each once."""
    budget: int = KEPT
    """Bytes of calls whose messages may still be kept as objects."""

    def reserve(self, size: int) -> bool:
        """True if the messages of a call of `size` bytes may be kept; then the room is taken."""
        fits = size <= self.budget
        self.budget -= size if fits else 0
        return fits

    def intern(self, message: bytes) -> bytes:
        """The equal message that is already held, or this one, which is held from now on."""
        return self.interned.setdefault(message, message)


@dataclass(frozen=True)
class EpisodeCall:
    """A model call. Not slotted, because `cached_property` stores what was read."""

    span: Span
    """The span's head: agent, model, versions, finish, status, error, times."""
    bodies: Bodies | None
    """Its decoded bodies; None when they are not on the tape."""
    cache: MessageCache = field(default_factory=MessageCache, repr=False, compare=False)
    """State shared with the other calls of its episode."""
    _kept: list[Turn] = field(default_factory=list["Turn"], init=False, repr=False, compare=False)

    @cached_property
    def outputs(self) -> tuple[CompletionOutput, ...] | None:
        """The token ids and log-probabilities of its choices; None when there is nothing to read."""
        # Imported late: conversations do not need numpy.
        from penstock.adapters.tokens import read_outputs

        return None if self.bodies is None else read_outputs(self.bodies[1], self.span.stream)

    @property
    def turn(self) -> Turn | None:
        """Messages, tools, choices and sampling; None when its bytes are not on the tape."""
        if self.bodies is None:
            return None
        if self._kept:
            return self._kept[0]
        request, response = self.bodies
        said = response if self.span.stream else strip_tokens(response)
        turn = by_name(self.span.dialect).read(request, said, self.span.stream)
        if self.cache.reserve(len(request) + len(said)):
            self._kept.append(turn)
        return turn

    @cached_property
    def messages(self) -> CallMessages:
        """Its messages, in the form that is compared."""
        found = call_messages(self.turn)
        return found._replace(story=tuple(map(self.cache.intern, found.story)))

    @cached_property
    def forced(self) -> bool:
        """True if a grammar forced the answer: a tool that had to be called, a schema, a regular expression."""
        return self.bodies is not None and forcing_field(obj(loads(self.bodies[0]))) is not None

    @cached_property
    def skewing(self) -> Json:
        """Fields of its request that may change the distribution that was sampled from; see `distribution_changes`."""
        return {} if self.bodies is None else distribution_fields(obj(loads(self.bodies[0])))

    @property
    def version(self) -> str | None:
        """Version of the weights that served it; None when the model is no released resource."""
        return (self.span.versions or {}).get(self.span.model or "")

    @property
    def choices(self) -> int:
        """Number of its choices, as far as known without its tokens."""
        return self.span.choices if self.bodies is None or self.outputs is None else len(self.outputs)


@dataclass(frozen=True, slots=True)
class EpisodeAttempt:
    """An attempt with its calls and other spans."""

    attempt: Attempt
    """The attempt itself: status, reward and gaps."""
    calls: tuple[EpisodeCall, ...]
    """Its model calls, by sequence."""
    spans: tuple[Span, ...] = field(repr=False)
    """Heads of its calls, tool runs, rewards and, where they were loaded, its agent's own spans, by sequence."""


@dataclass(frozen=True, slots=True)
class Episode:
    """The content of a rollout: its attempts and their calls."""

    rollout: RolloutSummary
    """The rollout itself: the task, its group and its attempts."""
    attempts: tuple[EpisodeAttempt, ...]
    """Its attempts, oldest first."""

    @property
    def group(self) -> str:
        """The task that the rollout repeats; the rollout itself if it repeats none."""
        return self.rollout.group or self.rollout.id


def read_episode(rollout: RolloutSummary, spans: Iterable[Span], bodies: Callable[[Span], Bodies | None]) -> Episode:
    """Make an episode of a rollout and its spans, of which only model calls, tool runs, rewards and the agent's own
    spans are used. `bodies` is called once for each model call.
    """
    heads = sorted((s for s in spans if s.kind in ("llm", "tool", "reward", "otel")), key=lambda span: span.sequence)
    tries, shared = list[EpisodeAttempt](), MessageCache()
    for attempt in rollout.attempts:
        own = tuple(span for span in heads if span.attempt == attempt.id)
        calls = tuple(EpisodeCall(span, bodies(span), shared) for span in own if span.kind == "llm")
        tries.append(EpisodeAttempt(attempt, calls, own))
    return Episode(rollout, tuple(tries))
