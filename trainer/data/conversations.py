"""The conversations that `train sft` and `train dpo` learn from: of the tape, or of a file.

A run reads them when it begins and keeps them in its directory; when it goes on from a checkpoint it reads that copy.
So late rewards, new rollouts and retention change nothing for it, and people can look at the training data:
`data/chats.jsonl` has the columns of `penstock samples --form chat`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from penstock.adapters.chat import ChatConversation
from penstock.adapters.export import Row, of_conversations
from penstock.adapters.report import SampleReport
from penstock.adapters.samples import Options
from penstock.adapters.source import load
from penstock.adapters.training_rows import rows
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.connection import brief
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import DataSettings
from penstock.trainer.data.tasks import json_lines
from penstock.trainer.engines import CheckpointError
from penstock.trainer.engines.checkpoint import write_directory

Tuning = Literal["sft", "dpo"]
FILTERS: dict[Tuning, str] = {"sft": "mode:train status:succeeded", "dpo": "mode:train status:ended"}
"""Default filters for rollouts. A preference needs rollouts that went wrong too."""
REFUSED = 400


@dataclass(frozen=True, slots=True)
class TuningData:
    """All that a run may learn from."""

    chats: list[ChatConversation]
    """Conversations in the order of reading, rollout by rollout."""
    read: dict[str, float]
    """Metrics: how much was read, and how much was already left out."""
    digest: str
    """Digest of the file with the chats: a run that goes on must have the same."""


async def load_tuning_data(
    directory: Path, kind: Tuning, data: DataSettings, client: Client, goes_on: bool
) -> TuningData:
    """Return the material of a run. `goes_on`: read the copy made when the run began. Raises `ConfigError` when the
    source cannot be read, `CheckpointError` when the copy cannot, and `ClientError`."""
    place = directory / "data"
    if not goes_on:
        made, read = await _of_tape(kind, data, client) if data.file is None else _of_file(kind, data.file)
        shutil.rmtree(place, ignore_errors=True)
        write_directory(place, lambda beside: _write(beside, made, read))
    try:
        text, told = (place / "chats.jsonl").read_bytes(), (place / "read.json").read_bytes()
        chats = [_conversation(json.loads(line)) for line in text.splitlines()]
        return TuningData(chats, json.loads(told), sha256(text).hexdigest())
    except OSError as error:
        raise CheckpointError(f"what the run has learnt from cannot be read: {error}") from None
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{place} is not as the run has written it, and it cannot go on: {error!r}") from None


def _write(directory: Path, made: Iterable[Row], read: dict[str, float]) -> None:
    (directory / "chats.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in made))
    (directory / "read.json").write_bytes(orjson.dumps(read))


def _conversation(row: Row) -> ChatConversation:
    fields: dict[str, Any] = row | {"calls": tuple(row["calls"])}
    return ChatConversation(**fields)


# -- from the tape -----------------------------------------------------------------------------------------------------


async def _of_tape(kind: Tuning, data: DataSettings, client: Client) -> tuple[list[Row], dict[str, float]]:
    report, weights, gone = SampleReport(), data.rewards or None, list[str]()
    options = Options(data.model, data.agent, weights=weights, allow=frozenset(data.allow))
    wanted = client.rollouts(FILTERS[kind] if data.rollouts is None else data.rollouts)
    try:
        async with aclosing(load(client, wanted, gone.append)) as episodes:
            made = [row async for row in rows(episodes, "chat", options, 0.0, report)]
    except ClientError as error:
        if error.status == REFUSED:
            raise ConfigError(f"data.rollouts: {error}") from None
        raise
    read = {"rollouts": float(report.rollouts)} | ({"rollouts/forgotten": float(len(gone))} if gone else {})
    return made, read | {f"calls/{reason}": float(count) for reason, count in report.reasons.items()}


# -- from a file -------------------------------------------------------------------------------------------------------


def _said(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise ValueError("a message needs a role")
    return message


Message = Annotated[dict[str, Any], AfterValidator(_said)]
Messages = Annotated[list[Message], Field(min_length=1)]


class ChatLine(BaseModel):
    """A line of a file of chats. Only its messages must be there, as OpenAI's files for fine-tuning have them."""

    messages: Messages
    rollout: str | None = None
    attempt: str = ""
    group: str | None = None
    agent: str | None = None
    model: str = ""
    calls: list[int] = []
    tools: list[dict[str, Any]] = []
    reward: float | None = Field(default=None, allow_inf_nan=False)
    rewards: dict[str, float] = {}


class PreferenceLine(BaseModel):
    """A line of a file of preferences, as TRL has them too. Answers in the prompt are not trained on."""

    prompt: list[Message] = []
    chosen: Messages
    rejected: Messages
    tools: list[dict[str, Any]] = []
    chosen_reward: float = 1.0
    rejected_reward: float = 0.0


def _of_file(kind: Tuning, path: Path) -> tuple[list[Row], dict[str, float]]:
    made: list[ChatConversation] = []
    for number, value in json_lines("data.file", path):
        try:
            made += _of_line(kind, value, f"line-{number}")
        except ValueError as error:
            said = brief(error) if isinstance(error, ValidationError) else str(error)
            raise ConfigError(f"data.file: {path}, line {number}: {said}") from None
    return list(of_conversations(made)), {"rollouts": float(len({(one.rollout, one.attempt) for one in made}))}


def _of_line(kind: Tuning, value: Any, name: str) -> Iterator[ChatConversation]:
    """Yield the conversations of a line. Raises `ValueError`."""
    if isinstance(value, dict) and "chosen" in value:
        pair = PreferenceLine.model_validate(value)
        if kind == "sft":
            raise ValueError("it is a preference, and sft learns from chats; dpo learns from these")
        yield from _of_pair(pair, name)
    else:
        chat = ChatLine.model_validate(value)
        rollout = chat.rollout or name
        yield _conversation(chat.model_dump() | {"rollout": rollout, "group": chat.group or rollout})


def _of_pair(pair: PreferenceLine, name: str) -> Iterator[ChatConversation]:
    told = [one | ({"weight": 0} if one["role"] == "assistant" else {}) for one in pair.prompt]
    sides = (("chosen", pair.chosen, pair.chosen_reward), ("rejected", pair.rejected, pair.rejected_reward))
    for side, said, reward in sides:
        chat = ChatLine(messages=[*told, *said], tools=pair.tools, reward=reward)
        yield _conversation(chat.model_dump() | {"rollout": f"{name}-{side}", "group": name})
