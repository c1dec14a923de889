"""Rewards and other spans that are no calls, as operations inside a write transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.gateway.model.known_secrets import Secrets, with_distinct_keys
from penstock.gateway.model.lifecycle import LIVE, after_attempt
from penstock.gateway.model.queue import RewardAnswer
from penstock.gateway.model.rollout import AttemptStatus, Judgement, Reward, Rollout, RolloutStatus
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.cache import CachedAttempt
from penstock.gateway.tape.store.operation import OperationRefusedError
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.wire.http import redaction
from penstock.gateway.work.queue.attempts import AttemptRecords, decides, get, put, status_of


class SpanOperations(AttemptRecords):
    """The operations on spans in one transaction."""

    def reward(self, name: tuple[str, str], judgement: Judgement, trusted: bool, now: int) -> tuple[RewardAnswer, bool]:
        """Keep a reward; returns its answer, and True if it is new. A reward whose key the attempt has already seen was
        kept then."""
        live = self._attempt(name)
        check_span(live, judgement)
        sequence, reward, new = self.judge(live, judgement, trusted, now)
        answer = RewardAnswer(sequence=sequence, trusted=reward.trusted, late=reward.late, reward=get(live, "reward"))
        return answer, new

    def judge(
        self, live: CachedAttempt, judgement: Judgement, trusted: bool, now: int, known_new: bool = False
    ) -> tuple[int, Reward, bool]:
        """Write a reward's span; returns (the span's sequence, the reward, True if it is new). `known_new` skips the
        search for its key."""
        late = status_of(live) not in LIVE
        reward = Reward(**dict(judgement), trusted=trusted, late=late)
        # An agent's reward must not keep a trusted one with the same key out.
        key = None if reward.key is None else live.key + (b"t" if trusted else b"u") + _digest(reward.key)
        earlier = None if key is None or known_new else self._tape.get("rewards", key)
        if earlier is not None:
            return int.from_bytes(earlier), reward, False
        entry = SpanEntry(*live.name, kind="reward", name="reward", method="", status="ok", start_ns=now, end_ns=now)
        secrets = self._tape.secrets.for_call()
        entry.attributes = without_secrets(reward, secrets).attributes() | secrets.span_attributes
        self._tape.record(entry, seen_ns=0)
        if key is not None:
            self._tape.put("rewards", key, keys.u32(entry.sequence))
        if reward.trusted and reward.value is not None:
            put(live, reward=reward.value)
            self._tape.touch_and_log(live)
        return entry.sequence, reward, True

    def reward_failure(self, rollout: Rollout, live: CachedAttempt, end: AttemptStatus, now: int) -> bool:
        """Give the attempt whose end fails the rollout the configured `reward_on_failure`, unless it has a reward
        already. Returns True if it did. An attempt ends once, so this happens once."""
        own = rollout.config.reward_on_failure
        value = get(live, "reward_on_failure") if own is None else own
        fails = after_attempt(end, rollout.tries, rollout.config) == RolloutStatus.FAILED
        if value is None or not (fails and decides(rollout, live)) or get(live, "reward") is not None:
            return False
        reason = f"reward_on_failure: it ended as {end}"
        self.judge(live, Judgement(value=value, source="rule", reason=reason), True, now)
        return True

    def add(self, entries: Sequence[SpanEntry], now: int, known: bool = False) -> list[int]:
        """Add spans that are no calls; returns their sequences. `known`: refuse spans of attempts that do not exist."""
        for name in {(entry.rollout, entry.attempt) for entry in entries} if known else ():
            self._attempt(name)
        made = [self._without_secrets(entry) for entry in entries]
        for entry in made:
            self._tape.record(entry, seen_ns=now)
        return [entry.sequence for entry in made]

    def _without_secrets(self, entry: SpanEntry) -> SpanEntry:
        """A copy of a span as it may be kept; the original may still be read."""
        secrets, said = self._tape.secrets.for_call(), entry.attributes
        kept: dict[str, Any] | None = (
            None if said is None else secrets.json(redaction.attributes(said, by_name=entry.kind == "otel"))
        )
        name, error = secrets.texts((entry.name, entry.error))
        if secrets.span_attributes:
            kept = (kept or {}) | secrets.span_attributes
        return replace(entry, sequence=0, name=name, error=error, attributes=kept)


def _digest(key: str) -> bytes:
    """A hash that stands for the key of a reward, which may contain text that must not be on the tape."""
    return hashlib.sha256(key.encode()).hexdigest().encode()


def without_secrets(reward: Reward, secrets: Secrets) -> Reward:
    """A reward without secrets. Numbers and values of a fixed set stay as they are, or it would be no reward any
    more."""
    reason, key = secrets.texts((reward.reason, reward.key))
    dimensions = with_distinct_keys((secrets.text(name), score) for name, score in reward.dimensions.items())
    return reward.model_copy(update={"reason": reason, "key": key, "dimensions": dimensions})


def check_span(live: CachedAttempt, judgement: Judgement) -> None:
    spans = get(live, "spans")
    if judgement.span is not None and judgement.span > spans:
        message = f"attempt {'/'.join(live.name)} has no span {judgement.span}: the last is {spans}"
        raise OperationRefusedError("invalid", message, "span", str(judgement.span))
