"""The sampling parameters of an answer, read from the request (and from answers that repeat them). Pure.

Two things matter for training. First, tokens that are sampled from another distribution than the model's own
(temperature 1, nothing cut off) have another probability than the one that engines report: vLLM's log-probabilities are
those before temperature and top-p, unless it was started to give the others. Second, a grammar (a tool that must be
called, a schema, an expression) forces tokens: it is applied before the log-probabilities are taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from penstock.gateway.model.turn import Sampling
from penstock.gateway.wire.dialects.loose_json import Json, arr, count, obj, objs

_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "temperature": ("temperature",),
    "top_p": ("top_p", "topP"),
    "top_k": ("top_k", "topK"),
    "max_tokens": ("max_completion_tokens", "max_tokens", "max_output_tokens", "maxOutputTokens", "maxTokens"),
    "seed": ("seed",),
    "n": ("n", "candidateCount"),
}
"""The names of a parameter in the APIs, the one that counts first."""
_STOPS: Final = ("stop", "stop_sequences", "stopSequences")
_REPEATED: Final = ("temperature", "top_p", "max_output_tokens")
"""The parameters that answers of the responses API repeat."""
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "min_tokens": (0,),
}
"""Fields that change the distribution, and the values with which they do not."""
_FORMATS: Final = (("response_format", None), ("format", "text"), ("format", "output_config"), ("output_format", None))
"""The fields that hold a format of the answer: in chat, in responses, in messages."""
_GRAMMARS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The keys of vLLM's `structured_outputs`."""
_FIELDS: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "regex", "ebnf")
"""Fields of older vLLMs, and of SGLang."""
_FREE: Final = frozenset({"auto", "none", "text", "allowed_tools"})


def sampling_parameters(said: Json, answer: Json) -> Sampling:
    """The sampling parameters. `said`: those that the request set; a value that the answer repeats counts before it."""
    known = said | {name: answer[name] for name in _REPEATED if answer.get(name) is not None}
    found = {name: _first(known, names) for name, names in _NAMES.items()}
    return Sampling(
        temperature=_number(found["temperature"]),
        top_p=_number(found["top_p"]),
        top_k=_whole(found["top_k"]),
        max_tokens=_whole(found["max_tokens"]),
        seed=_whole(found["seed"]),
        n=count(found["n"]) or 1,
        stop=_texts(_first(known, _STOPS)),
    )


def distribution_fields(asked: Json) -> Json:
    """Only those fields of a request that may change the distribution."""
    return {name: asked[name] for name in _NEUTRAL if asked.get(name) is not None}


def distribution_changes(asked: Json, temperature: float = 1.0) -> list[str]:
    """The fields of a request that make it sample from another distribution than the model's at this temperature, as
    `name value`. A request without a temperature samples at 1."""
    known = {"temperature": 1} | distribution_fields(asked)
    return [
        f"{name} {known[name]}" if isinstance(known[name], int | float | str) else name
        for name, neutral in (_NEUTRAL | {"temperature": (temperature,)}).items()
        if name in known and known[name] not in neutral
    ]


def forcing_field(asked: Json) -> str | None:
    """The field of a request that makes a grammar force tokens; None when nothing does."""
    return next(_forces(asked), None)


def _forces(asked: Json) -> Iterator[str]:
    choice = asked.get("tool_choice")
    kind = obj(choice).get("type", "function") if isinstance(choice, dict) else choice
    allowed = obj(obj(choice).get("allowed_tools")).get("mode", obj(choice).get("mode"))
    if kind not in (None, *_FREE) or (kind == "allowed_tools" and allowed == "required"):
        yield f"tool_choice {kind if isinstance(kind, str) else 'of a kind that is not known'}"
    for name, where in _FORMATS:
        format = obj(obj(asked.get(where) if where else asked).get(name)).get("type")
        if format not in (None, "text"):
            yield f"{where or name} {format if isinstance(format, str) else 'of a kind that is not known'}"
    structured = obj(asked.get("structured_outputs"))
    yield from (f"structured_outputs.{name}" for name in _GRAMMARS if structured.get(name) not in (None, False))
    yield from (name for name in _FIELDS if asked.get(name) is not None)
    if choice != "none" and any(
        obj(tool.get("function", tool)).get("strict") is True for tool in objs(asked.get("tools"))
    ):
        yield "a strict tool"


def _first(known: Json, names: tuple[str, ...]) -> Any:
    return next((known[name] for name in names if known.get(name) is not None), None)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < 1 << 63 else None


def _texts(value: Any) -> list[str]:
    return [one for one in ([value] if isinstance(value, str) else arr(value)) if isinstance(one, str)]
