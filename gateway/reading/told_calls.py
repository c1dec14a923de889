"""Model calls that only an agent's own telemetry tells of: their tokens and costs are the rollout's. Pure.

An instrumented agent may call a model past the gateway. Its OpenTelemetry spans then say what the call has used, by the
GenAI conventions (also by names that these had before), by OpenInference or by OpenLLMetry. A call counts once:

* A call that the gateway has recorded too counts as recorded. Both have the id of the response. In an attempt with
  recorded calls, a span without such an id counts nothing, because it may be one of them.
* Where several instrumentations report one call, their spans contain each other, or have the same response id. The
  innermost counts, so that the sums in spans of agents, chains and workflows count nothing.
* A span that was sent again has the same span id.
* What a provider itself tells of a call or a hosted agent's turn counts nothing: that is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from penstock.gateway.model.prices import Prices, TokenCounts
from penstock.gateway.model.rollout import Totals
from penstock.gateway.model.span import Span, SpanNode, is_provider_span
from penstock.gateway.wire.dialects.tokens import quantity

_INPUT: Final = (
    "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt", "llm.usage.prompt_tokens",
)  # fmt: skip
"""Names of a count, in the order in which they are looked for."""
_OUTPUT: Final = (
    "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion",
    "llm.usage.completion_tokens",
)  # fmt: skip
_TOTAL: Final = ("llm.usage.total_tokens", "gen_ai.usage.total_tokens", "llm.token_count.total")
_CACHED: Final = (
    "gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens",
    "llm.token_count.prompt_details.cache_read",
)  # fmt: skip
_CACHE_WRITE: Final = (
    "gen_ai.usage.cache_write.input_tokens", "gen_ai.usage.cache_creation.input_tokens",
    "gen_ai.usage.cache_creation_input_tokens", "llm.token_count.prompt_details.cache_write",
)  # fmt: skip
_REASONING: Final = (
    "gen_ai.usage.reasoning.output_tokens", "gen_ai.usage.reasoning_tokens", "llm.usage.reasoning_tokens",
    "llm.token_count.completion_details.reasoning",
)  # fmt: skip
_MEDIA: Final = {
    "input_audio": ("gen_ai.usage.audio.input_tokens", "llm.token_count.prompt_details.audio"),
    "output_audio": ("gen_ai.usage.audio.output_tokens", "llm.token_count.completion_details.audio"),
    "cached_audio": ("gen_ai.usage.audio.cache_read.input_tokens",),
    "input_image": ("gen_ai.usage.image.input_tokens",),
    "output_image": ("gen_ai.usage.image.output_tokens",),
    "cached_image": ("gen_ai.usage.image.cache_read.input_tokens",),
}
"""Parts of the counts that have prices of their own."""
_COST: Final = ("llm.cost.total", "gen_ai.usage.cost")
_COSTS: Final = ("llm.cost.prompt", "llm.cost.completion")
_MODEL: Final = ("gen_ai.request.model", "llm.model_name", "llm.request.model")
_SERVED: Final = ("gen_ai.response.model", "llm.response.model")
_MODELS: Final = frozenset({"LLM", "EMBEDDING"})
"""Values of `openinference.span.kind` of calls of models."""
_OTHER_OPERATIONS: Final = frozenset(
    {
        "create_agent", "invoke_agent", "invoke_workflow", "execute_tool", "plan", "retrieval", "fetch_response",
        "create_memory", "update_memory", "upsert_memory", "delete_memory", "search_memory", "create_memory_store",
        "delete_memory_store",
    }
)  # fmt: skip
"""Values of `gen_ai.operation.name` of what calls no model itself."""


class ToldCall(NamedTuple):
    """A model call as a span of an agent tells of it."""

    response_id: str | None
    model: str | None
    served: str | None
    start_ns: int
    tokens: TokenCounts


def told_call(span: Span) -> ToldCall | None:
    """The model call that a span of kind `otel` tells the tokens or the cost of; None if it tells none."""
    attributes = span.attributes or {}
    if not _calls_model(attributes) or is_provider_span(attributes):
        return None
    given, made, total = (_count(attributes, names) for names in (_INPUT, _OUTPUT, _TOTAL))
    if total is not None and (given is None) != (made is None):
        given, made = (max(0, total - (made or 0)), made) if given is None else (given, max(0, total - given))
    cost = _cost(attributes)
    if given is None and made is None and total is None and cost is None:
        return None
    billed: dict[str, Any] = {
        name: count for name, names in _MEDIA.items() if (count := _count(attributes, names)) is not None
    }
    billed |= {} if cost is None else {"cost": cost}
    cached, written, thought = (_count(attributes, names) for names in (_CACHED, _CACHE_WRITE, _REASONING))
    return ToldCall(
        SpanNode.of(span).response_id, _text(attributes, _MODEL), _text(attributes, _SERVED), span.start_ns,
        TokenCounts(given, made, cached, written, thought, billed or None),
    )  # fmt: skip


def _calls_model(attributes: Mapping[str, Any]) -> bool:
    kind = attributes.get("openinference.span.kind")
    if kind is not None:
        return str(kind).upper() in _MODELS
    operation = attributes.get("gen_ai.operation.name")
    if operation is not None:
        return operation not in _OTHER_OPERATIONS
    return "traceloop.span.kind" not in attributes


def _count(attributes: Mapping[str, Any], names: Iterable[str]) -> int | None:
    return next((count for name in names if (count := quantity(attributes.get(name))) is not None), None)


def _text(attributes: Mapping[str, Any], names: Iterable[str]) -> str | None:
    return next((text for name in names if isinstance(text := attributes.get(name), str) and text), None)


def _cost(attributes: Mapping[str, Any]) -> float | None:
    whole = next((cost for name in _COST if (cost := _dollars(attributes.get(name))) is not None), None)
    parts = [cost for name in _COSTS if (cost := _dollars(attributes.get(name))) is not None]
    return sum(parts) if whole is None and len(parts) == len(_COSTS) else whole


def _dollars(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and 0 <= value < 1e9 else None


class ToldCalls:
    """The told calls of one attempt, while its spans are read. A span may be added twice."""

    def __init__(self) -> None:
        self._told = dict[str, ToldCall]()
        """Spans that tell of a call, by span id."""
        self._parents = dict[str, str]()
        """Span ids of agents' spans, with those of their parents."""
        self._calling = set[str]()
        """Span ids in which recorded calls were made, as their `traceparent` says."""
        self._recorded = set[int]()
        """Hashes of the response ids of recorded calls."""
        self._records = False

    def add(self, span: Span) -> None:
        """Add a span of the attempt: a recorded model call, or a span of the agent's."""
        if span.kind == "llm":
            self._records = True
            if span.response_id:
                self._recorded.add(hash(span.response_id))
            if span.parent_id:
                self._calling.add(span.parent_id)
        elif span.kind == "otel" and span.span_id:
            if span.parent_id:
                self._parents[span.span_id] = span.parent_id
            if (call := told_call(span)) is not None:
                self._told[span.span_id] = call

    def totals(self, prices: Prices) -> Totals:
        """The sums over the calls that only telemetry tells of."""
        sums = Totals()
        for call in self._counted():
            given, made = call.tokens[:2]
            sums.told += 1
            sums.input_tokens = (sums.input_tokens or 0) + (given or 0)
            sums.output_tokens = (sums.output_tokens or 0) + (made or 0)
            sums.uncounted += given is None or made is None
            cost = prices.cost(call.served, call.model, call.start_ns, call.tokens)
            sums.unpriced += cost is None and (given, made) != (None, None)
            if cost is not None:
                sums.cost = (sums.cost or 0.0) + cost
                sums.reported += call.tokens.own_cost is not None
        return sums

    def _counted(self) -> Iterator[ToldCall]:
        # Copies: another thread may add the spans of the same attempt.
        told = list(self._told.items())
        above = set[str]()
        for inner in (*list(self._calling), *(parent for name, _ in told if (parent := self._parents.get(name)))):
            around: str | None = inner
            while around is not None and around not in above:
                above.add(around)
                around = self._parents.get(around)
        seen = set(self._recorded)
        for name, call in told:
            if name in above or (self._records and call.response_id is None):
                continue
            if call.response_id is not None:
                if hash(call.response_id) in seen:
                    continue
                seen.add(hash(call.response_id))
            yield call
