"""Chooses the conversations to train on, in the model's own tokens. Pure; everything left out is counted.

A *lesson* is one unit of an update: for supervised fine-tuning a rollout that was good enough, for preferences the
better and the worse of a group. Groups, not lessons, are held out: a task that is evaluated was never trained on.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from penstock.adapters.chat import ChatConversation
from penstock.adapters.preferences import pairing_advice, pairs
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import SftSettings, TrainConfig
from penstock.trainer.mathematics.batch import Owner, TokenExample, admit


@dataclass(frozen=True, slots=True)
class AttemptConversations:
    """An attempt at a rollout, with all its conversations."""

    rollout: str
    attempt: str
    group: str
    reward: float | None
    chats: tuple[ChatConversation, ...]


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """One unit of an update: a rollout, or a pair."""

    group: str
    """Group of its rollouts, which is its task."""
    sides: tuple[tuple[TokenExample, ...], ...]
    """The examples: of a rollout one tuple; of a pair two, the chosen one first."""


@dataclass(slots=True)
class TrainingSet:
    """Everything that a run learns from, and counts of what was left out."""

    training: list[TrainingExample] = field(default_factory=list[TrainingExample])
    """Lessons to train on."""
    held_out: list[TrainingExample] = field(default_factory=list[TrainingExample])
    """Lessons to evaluate only."""
    dropped: Counter[str] = field(default_factory=Counter[str])
    """Number left out by kind and reason, such as `rollouts_reward`."""
    hints: list[str] = field(default_factory=list[str])
    """Advice that would give more pairs."""
    trouble: str | None = None
    """Why the model's template could not render a conversation: the first such error. None without one."""


def group_by_attempt(chats: Iterable[ChatConversation]) -> list[AttemptConversations]:
    """Group conversations by attempt, in the order of the attempts' first conversations. In a shuffled file the
    conversations of an attempt need not be adjacent."""
    by_attempt: dict[tuple[str, str, str, float | None], list[ChatConversation]] = defaultdict(list)
    for one in chats:
        by_attempt[one.rollout, one.attempt, one.group, one.reward].append(one)
    return [AttemptConversations(*key, tuple(own)) for key, own in by_attempt.items()]


def select_best(
    given: Sequence[AttemptConversations], wanted: SftSettings, dropped: Counter[str]
) -> list[AttemptConversations]:
    """Return the attempts with a reward of at least `sft.reward`, and of each group the `sft.best` highest, in their
    order. Of equal rewards the first count."""
    if wanted.reward is None and wanted.best is None:
        return list(given)
    rated = [(one.reward, one) for one in given if one.reward is not None]
    good = [(reward, one) for reward, one in rated if wanted.reward is None or reward >= wanted.reward]
    groups: dict[str, list[AttemptConversations]] = defaultdict(list)
    for _, one in sorted(good, key=lambda it: it[0], reverse=True):
        groups[one.group].append(one)
    kept = {id(one) for group in groups.values() for one in group[: wanted.best]}
    dropped.update(
        rollouts_no_reward=len(given) - len(rated), rollouts_reward=len(rated) - len(good),
        rollouts_beaten=len(good) - len(kept),
    )  # fmt: skip
    return [one for one in given if id(one) in kept]


class ExampleBuilder:
    def __init__(self, config: TrainConfig, tokenizer: Tokenizer) -> None:
        self.lessons = TrainingSet()
        self._config, self._tokenizer = config, tokenizer

    def from_rollouts(self, given: Sequence[AttemptConversations]) -> TrainingSet:
        """Make lessons for supervised fine-tuning. Raises `ConfigError` when nothing is left."""
        chosen = select_best(given, self._config.sft, self.lessons.dropped)
        made = [TrainingExample(one.group, (examples,)) for one in chosen if (examples := self._encoded(one)[0])]
        return self._divided(made)

    def from_pairs(self, given: Sequence[AttemptConversations]) -> TrainingSet:
        """Make lessons for preferences: whole attempts, all of whose conversations must be usable. Raises `ConfigError`
        when nothing is left."""
        wanted = self._config.dpo
        found, unpaired = pairs(given, wanted.margin, wanted.pairs)
        self.lessons.dropped.update(f"groups_{reason}" for reason in unpaired.values())
        rollouts = {(one.group, one.rollout) for one in given}
        self.lessons.hints = pairing_advice(unpaired, Counter(group for group, _ in rollouts), wanted.margin)
        sides = {id(one): one for pair in found for one in (pair.chosen, pair.rejected)}
        encoded = {key: self._encoded(one) for key, one in sides.items()}
        made: list[TrainingExample] = []
        for pair in found:
            (chosen, whole), (rejected, other) = encoded[id(pair.chosen)], encoded[id(pair.rejected)]
            if whole and other:
                made.append(TrainingExample(pair.group, (chosen, rejected)))
        self.lessons.dropped["pairs_incomplete"] += len(found) - len(made)
        return self._divided(made)

    def _encoded(self, one: AttemptConversations) -> tuple[tuple[TokenExample, ...], bool]:
        """Return (the examples of an attempt, True if none of it was left out)."""
        made, unusable = tokenise(one.chats, self._tokenizer)
        kept, refused = admit(made, self._config.engine.batch_tokens)
        self.lessons.dropped.update(f"chats_{it.reason}" for it in (*unusable, *refused))
        if unusable and self.lessons.trouble is None:
            self.lessons.trouble = f"{one.rollout}: {unusable[0].detail}"
        return tuple(kept), not (unusable or refused)

    def _divided(self, made: Sequence[TrainingExample]) -> TrainingSet:
        lessons, data = self.lessons, self._config.data
        lessons.dropped = +lessons.dropped
        if not made:
            why = ", ".join(f"{name} {count}" for name, count in lessons.dropped.most_common()) or "nothing was read"
            trouble = [lessons.trouble] if lessons.trouble else []
            raise ConfigError("; ".join([f"data: there is nothing to learn from ({why})", *trouble, *lessons.hints]))
        out = held_out([one.group for one in made], data.held_out, self._config.run.seed)
        lessons.training = [one for one in made if one.group not in out]
        lessons.held_out = [one for one in made if one.group in out]
        return lessons


def held_out(groups: Sequence[str], share: float, seed: int) -> frozenset[str]:
    """Return the groups that are held out: at least one if `share` is above 0, and never all. Raises `ConfigError`."""
    names = sorted(set(groups))
    if share and len(names) == 1:
        raise ConfigError(f"data.held_out: there is one group only ({names[0]}); nothing of it can be held out")
    count = min(max(round(share * len(names)), 1), len(names) - 1) if share else 0
    order = np.random.default_rng(seed).permutation(len(names))
    return frozenset(names[place] for place in order[:count])


# Makes examples of conversations, by the model's own chat template.
#
# Each answer is trained on in the context that the model sees when it generates it. For each marked answer the
# template renders the messages before it with a generation prompt, and the messages including it; the answer is the
# text that only the second rendering has. If the prompt of the next answer continues this text, both share an
# example; if it does not (templates that drop earlier reasoning), the next answer begins its own. This needs no `{%
# generation %}` marks, which most templates lack, and works with them too. Training ends with the end-of-turn token:
# the model never samples the text that a template puts behind it.
#
# Text is tokenised piece by piece, prompt and answer apart, as by an engine that is given the prompt only. A
# conversation whose answers cannot be told from its prompts is reported, never guessed.

Message = Mapping[str, Any]
Reason = Literal["unmarked", "content", "template"]
"""Why a chat cannot be trained on: no answer is marked, it has more than text, or the template does not fit."""


class ChatRecord(Protocol):
    """The part of `adapters.chat.ChatConversation` that is needed here."""

    @property
    def rollout(self) -> str: ...
    @property
    def attempt(self) -> str: ...
    @property
    def messages(self) -> Sequence[Message]:
        """Messages in OpenAI's format; answers with `"weight": 0` are context only."""
        ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is needed here."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class UnusableChat:
    """A chat that is left out, and why."""

    owner: Owner
    reason: Reason
    detail: str


class _UnusableError(Exception):
    """Raised for a chat that cannot be used: reason and detail."""


@dataclass(slots=True)
class _ExampleDraft:
    """An example under construction: pieces of text, each with True if it is an answer."""

    text: str
    pieces: list[tuple[str, bool]] = field(default_factory=list[tuple[str, bool]])

    def add(self, text: str, answer: bool) -> None:
        self.text += text
        self.pieces.append((text, answer))


def tokenise(chats: Iterable[ChatRecord], tokenizer: Tokenizer) -> tuple[list[TokenExample], list[UnusableChat]]:
    """Return the examples of the chats, in their order, and the chats that cannot be used."""
    made, left = list[TokenExample](), list[UnusableChat]()
    for chat in chats:
        owner = (chat.rollout, chat.attempt)
        try:
            made += [_encoded(owner, draft, tokenizer) for draft in _drafts(chat, tokenizer)]
        except _UnusableError as unfit:
            left.append(UnusableChat(owner, *unfit.args))
    return made, left


def _drafts(chat: ChatRecord, tokenizer: Tokenizer) -> list[_ExampleDraft]:
    messages = [_readable(message) for message in chat.messages]
    marked = [place for place, message in enumerate(chat.messages) if _is_marked(message)]
    if not marked:
        raise _UnusableError("unmarked", "none of its answers is to be trained on")
    # transformers makes this attribute at run time.
    end = getattr(tokenizer, "eos_token", None)
    drafts: list[_ExampleDraft] = []
    for place in marked:
        prompt = _rendered(tokenizer, messages[:place], chat.tools, True)
        whole = _rendered(tokenizer, messages[: place + 1], chat.tools, False)
        if not whole.startswith(prompt):
            raise _UnusableError("template", f"message {place}: the template renders it otherwise than it asks for it")
        if not drafts or not prompt.startswith(drafts[-1].text):
            drafts.append(_ExampleDraft(""))
        answer, behind = _at_end_of_turn(whole[len(prompt) :], end)
        drafts[-1].add(prompt[len(drafts[-1].text) :], False)
        drafts[-1].add(answer, True)
        drafts[-1].add(behind, False)
    return drafts


def _is_marked(message: Message) -> bool:
    return message["role"] == "assistant" and message.get("weight", 1) != 0


def _readable(message: Message) -> dict[str, Any]:
    try:
        return _plain(message)
    # Messages of a file may have any shape.
    except (LookupError, TypeError, AttributeError) as error:
        raise _UnusableError("content", f"a message is not as OpenAI writes it: {error!r}") from None


def _plain(message: Message) -> dict[str, Any]:
    """Return a message in the form that templates expect: text in one piece, arguments of tools as an object."""
    made = {name: value for name, value in message.items() if name != "weight"}
    if isinstance(made.get("content"), list):
        made["content"] = _text(made["content"])
    if made.get("tool_calls"):
        made["tool_calls"] = [_opened(call) for call in made["tool_calls"]]
    return made


def _text(parts: Sequence[Mapping[str, Any]]) -> str:
    for part in parts:
        if part.get("type") != "text":
            raise _UnusableError(
                "content", f"it has content of the type {part.get('type')!r}; only text can be trained on"
            )
    return "\n".join(part["text"] for part in parts)


def _opened(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    # Broken JSON stays text, so that the model sees what it wrote.
    with suppress(ValueError, TypeError, RecursionError):
        function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}


def _rendered(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Any], prompt: bool) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt
        )
        _ = text.encode()
    except UnicodeEncodeError:
        # Arguments of tools may contain one as an escape.
        raise _UnusableError("content", "it has half a character, which no tokenizer reads") from None
    # A template is a program of the model's maker: it may fail in any way, mostly by `raise_exception`.
    except Exception as error:
        raise _UnusableError("template", f"the template cannot render {len(messages)} messages: {error}") from error
    return text


def _at_end_of_turn(text: str, eos: str | None) -> tuple[str, str]:
    """Split the sampled text from the text that the template puts behind it."""
    place = text.rfind(eos) if eos else -1
    end = len(text) if eos is None or place < 0 else place + len(eos)
    return text[:end], text[end:]


def _encoded(owner: Owner, draft: _ExampleDraft, tokenizer: Tokenizer) -> TokenExample:
    ids = [tokenizer.encode(text, add_special_tokens=False) for text, _ in draft.pieces]
    answers = [answer for _, answer in draft.pieces[1:]]
    sizes = [len(piece) for piece in ids[1:]]
    size = sum(sizes)
    return TokenExample(
        owner=owner,
        prompt=np.array(ids[0], np.int32),
        response=np.array([token for piece in ids[1:] for token in piece], np.int32),
        mask=np.repeat(np.array(answers, np.bool_), sizes),
        behaviour=np.full(size, np.nan, np.float32),
        advantages=np.zeros(size, np.float32),
        sequences=np.repeat(np.cumsum(answers, dtype=np.int32) - 1, sizes),
    )
