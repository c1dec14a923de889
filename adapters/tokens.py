"""Token ids and log-probabilities of a recorded answer, as arrays. Pure; odd bytes never raise.

`gateway.wire.dialects.tokens` defines where they are in an answer, and counts them for a diagnosis. Training needs
the values, of many long calls, so they are decoded straight into typed structs: the text of tokens, their bytes and
their alternatives are skipped and never become objects. Ids are the engine's own and are never computed from text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.gateway.reading.diagnosis.rows import TrainableTokens
from penstock.gateway.wire.dialects import sse
from penstock.gateway.wire.dialects.tokens import HIGHEST, UNKNOWN, has_content

Ids: TypeAlias = npt.NDArray[np.int32]
Logprobs: TypeAlias = npt.NDArray[np.float32]

LARGEST = 2**31 - 1
Index = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, gc=False):
    logprob: float | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Entry] | None = None
    token_logprobs: list[float | None] | None = None


class _CompletionChoice(msgspec.Struct, gc=False):
    index: Index | None = None
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    delta: msgspec.Raw = msgspec.Raw()
    message: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()

    @property
    def lacks_ids(self) -> bool:
        """True if the choice has content but no token ids."""
        if self.token_ids:
            return False
        said = {"delta": self.delta, "message": self.message, "text": self.text}
        return has_content({name: msgspec.json.decode(raw) for name, raw in said.items() if raw})


class _Completion(msgspec.Struct, gc=False):
    """A plain answer, or one event of a stream."""

    prompt_token_ids: list[int] | None = None
    choices: list[_CompletionChoice] | None = None
    usage: Any = None


_answer = msgspec.json.Decoder(_Completion)
_events = msgspec.json.Decoder(list[_Completion])


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice of an answer."""

    choice: int
    """Index of the choice among the n requested."""
    prompt: Ids
    """[P] Token ids of the prompt; empty when the engine gave none."""
    ids: Ids
    """[R] Token ids of the answer."""
    logprobs: Logprobs
    """[R] The engine's log-probabilities, in nats; nan where it gave none, or an impossible value."""
    finish: str | None
    """The finish reason, as the engine wrote it."""
    given: bool
    """True if the engine gave token ids; the answer may be empty."""
    usage: Any = None
    """The engine's usage for all choices together, unparsed."""
    partial_ids: bool = False
    """True if a part of the answer came without ids, and another part with them."""

    @property
    def trainable_tokens(self) -> TrainableTokens:
        """Its tokens in the form that is compared, without a copy."""
        return TrainableTokens(self.choice, _bytes(self.prompt), _bytes(self.ids))

    @property
    def scored(self) -> bool:
        """True if every generated token has a log-probability."""
        return not bool(np.isnan(self.logprobs).any())


def read_outputs(response: bytes, stream: bool) -> tuple[CompletionOutput, ...] | None:
    """The choices of a decoded response body by index, plain or streamed; empty for formats other than chat completions
    and completions; None when the body does not match its format.
    """
    try:
        answers = _events.decode(_listed(response)) if stream else [_answer.decode(response)]
        return _folded(answers)
    except (ValueError, OverflowError, RecursionError):
        return None


def _listed(body: bytes) -> bytes:
    """The data of a stream's events as one JSON array: decoding it once is faster than decoding each event."""
    return b"[" + b",".join(data for data in sse.first_data(body, len(body)) if data.strip() != b"[DONE]") + b"]"


def _folded(answers: Iterable[_Completion]) -> tuple[CompletionOutput, ...]:
    prompt: list[int] | None = None
    usage: Any = None
    pieces: dict[int, list[_CompletionChoice]] = {}
    for answer in answers:
        prompt, usage = prompt or answer.prompt_token_ids, answer.usage or usage
        for at, choice in enumerate(answer.choices or ()):
            pieces.setdefault(at if choice.index is None else choice.index, []).append(choice)
    whole = array(prompt or [])
    return tuple(_output(index, pieces[index], whole, usage) for index in sorted(pieces))


def _output(index: int, pieces: list[_CompletionChoice], prompt: Ids, usage: Any) -> CompletionOutput:
    own = next((piece.prompt_token_ids for piece in pieces if piece.prompt_token_ids), None)
    given = [piece.token_ids for piece in pieces if piece.token_ids is not None]
    ids = array([id for piece in given for id in piece])
    return CompletionOutput(
        choice=index,
        prompt=array(own) if own else prompt,
        ids=ids,
        logprobs=_logprobs(pieces, len(ids)),
        finish=next((piece.finish_reason for piece in pieces if piece.finish_reason), None),
        given=bool(given) and bool(own or len(prompt)),
        usage=usage,
        partial_ids=bool(len(ids)) and any(piece.lacks_ids for piece in pieces),
    )


def _logprobs(pieces: list[_CompletionChoice], size: int) -> Logprobs:
    """One log-probability for each token. If the engine gave more or fewer, all are nan, because it is unknown which
    belongs to which.
    """
    found: list[float | None] = []
    for logprobs in (piece.logprobs for piece in pieces if piece.logprobs is not None):
        found += [entry.logprob for entry in logprobs.content or ()] or logprobs.token_logprobs or []
    made = np.array(found, dtype=np.float32) if len(found) == size else np.full(size, np.nan, dtype=np.float32)
    known = np.isfinite(made) & (made > UNKNOWN) & (made <= HIGHEST)
    return np.where(known, made, np.float32(np.nan))


def _bytes(ids: Ids) -> bytes | memoryview:
    # A memoryview of an empty array cannot be cast.
    return memoryview(ids.data).cast("B") if len(ids) else b""


def array(ids: list[int]) -> Ids:
    """Token ids as 32-bit integers; raises ValueError or OverflowError for an invalid id."""
    made = np.array(ids, dtype=np.int32)
    if len(made) and made.min() < 0:
        raise ValueError(f"a token id is negative: {made.min()}")
    return made
