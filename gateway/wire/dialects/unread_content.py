"""Finds content in an answer's bytes that its dialect does not read: a net for changes that nobody knows of yet. Pure.

Wire formats change without notice. Keys that are in no table below are checked: does the value look like a model's
output, or like a count of tokens, and is it missing from the Turn that the dialect reads? So a dialect that learns to
read another key needs no row; a row only saves the check. Known keys are held against the summary: tool calls that it
does not count, texts where it has no answer, ids and log-probabilities that are impossible.

The ordinary answer has known keys only. It is decoded once, and checked place by place and not event by event.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from types import GenericAlias
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import orjson

from penstock.gateway.model.facts import UNREAD
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Turn
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.base import Dialect, Facts
from penstock.gateway.wire.dialects.bedrock import frames
from penstock.gateway.wire.dialects.loose_json import UNREADABLE, Json, arr, dumps, is_bulky, loads, obj, objs
from penstock.gateway.wire.dialects.sse import chunks
from penstock.gateway.wire.dialects.tokens import tokens_of

# -- the known keys of answers -----------------------------------------------------------------------------------------

# Those that are read, and those that hold nothing of the model's output (ids, fingerprints, citations, padding ...). A
# row is a path of keys, arrays left out, and the keys of the objects there. `~` marks a text, which is a string or
# null: any other value is checked. After a path `!` marks a place of the model's output, where any new key may hold
# some of it, and `#KEY` a place of tool calls, which that key tells apart. Events of kinds that are not in `KINDS` are
# checked as a whole.

Table: TypeAlias = Mapping[str, str]


@dataclass(slots=True)
class ObjectShape:
    """The objects at one place."""

    known: set[str] = field(default_factory=set[str])
    texts: set[str] = field(default_factory=set[str])
    inner: dict[str, ObjectShape] = field(default_factory=dict[str, "ObjectShape"])
    speaks: bool = False
    """True if the objects hold the model's output."""
    calls: str | None = None
    """Where each object is a tool call, the key that tells calls apart; else None."""


def shape(*tables: Table) -> ObjectShape:
    """Make a shape of tables, along which an answer is checked."""
    root = ObjectShape()
    for path, keys in (row for table in tables for row in table.items()):
        place, _, calls = path.partition("#")
        at = root
        for name in filter(None, place.rstrip("!").split(".")):
            at.known.add(name)
            at = at.inner.setdefault(name, ObjectShape())
        at.speaks, at.calls = at.speaks or place.endswith("!"), calls or at.calls
        at.known |= {key.rstrip("~") for key in keys.split()}
        at.texts |= {key.rstrip("~") for key in keys.split() if key.endswith("~")}
    return root


_SPOKEN: Final = (
    "role content~ refusal~ reasoning~ reasoning_content~ tool_calls function_call audio annotations citations "
    "images name obfuscation padding executed_tools"
)
_CALL: Final = "index id type extra_content provider_specific_fields"


def _said(place: str) -> Table:
    """The keys of a message of chat, or of a piece of one."""
    return {
        f"choices.{place}!": _SPOKEN,
        f"choices.{place}.tool_calls!#id": _CALL,
        f"choices.{place}.tool_calls.function!": "name~ arguments~",
        f"choices.{place}.tool_calls.custom!": "name~ input~",
        f"choices.{place}.function_call!": "name~ arguments~",
        f"choices.{place}.audio!": "id data transcript expires_at format",
    }


_CHAT: Final[Table] = {
    "": "id object created model choices usage error system_fingerprint service_tier provider request_id obfuscation "
    "prompt_token_ids prompt_logprobs prompt_text kv_transfer_params prompt_filter_results prompt_annotations timings "
    "citations search_results web_search metadata nvext moderation type code",
    "x_groq": "id error debug",
    "choices": "index finish_reason native_finish_reason stop_reason matched_stop error seed logprobs token_ids "
    "prompt_token_ids prompt_logprobs content_filter_results content_filter_offsets hidden_states routed_experts",
}
_BLOCK: Final = (
    "type id name text~ thinking~ signature input data citations caller content tool_use_id is_error cache_control "
    "source title context server_name"
)
_MESSAGE: Final = (
    "id type role model content stop_reason stop_sequence stop_details usage container context_management "
)
_ANTHROPIC: Final[Table] = {"": _MESSAGE + "error request_id diagnostics", "content!#id": _BLOCK}
_ANTHROPIC_EVENTS: Final[Table] = {
    "": "type index message content_block delta usage error context_management request_id p",
    "message": _MESSAGE + "diagnostics",
    "content_block!#id": _BLOCK,
    "delta!": "type text~ thinking~ signature partial_json~ citation stop_reason stop_sequence stop_details container "
    "estimated_tokens",
}
_RESPONSE: Final = (
    "id object created_at completed_at status background billing error incomplete_details instructions "
    "max_output_tokens max_tool_calls metadata model output parallel_tool_calls previous_response_id conversation "
    "prompt prompt_cache_key prompt_cache_retention reasoning safety_identifier service_tier store temperature text "
    "tool_choice tools top_logprobs top_p truncation usage tool_usage user output_text moderation frequency_penalty "
    "presence_penalty kv_transfer_params input_messages output_messages image access_programs input_transformations "
    "prompt_cache_diagnostics prompt_cache_options content_filters"
)
_ITEM: Final = (
    "id type status role content summary arguments call_id name namespace input output action results queries code "
    "container_id encrypted_content result error phase operation pending_safety_checks acknowledged_safety_checks "
    "outputs server_label approval_request_id tools created_by caller environment max_output_length revised_prompt "
    "size quality background output_format execution reasoning text agent author recipient"
)
_PART: Final = "type text~ refusal~ annotations logprobs"
_RESPONSES: Final[Table] = {"": _RESPONSE, "output!#call_id": _ITEM, "output.content!": _PART}
_RESPONSES_EVENTS: Final[Table] = {
    "": "type sequence_number response output_index item_id content_index summary_index annotation_index item part "
    "delta text~ refusal~ arguments~ input~ name logprobs obfuscation annotation error code message param status "
    "stream_id event_id",
    "response": _RESPONSE,
    "response.output!#call_id": _ITEM,
    "response.output.content!": _PART,
    "item!#call_id": _ITEM,
    "item.content!": _PART,
    "part!": _PART,
}
_DECISIONS: Final[Table] = {
    "": "id object created_at model usage answers error",
    "answers!": "type name probability probabilities choice confidence score",
}
_GEMINI: Final[Table] = {
    "": "candidates promptFeedback usageMetadata modelVersion responseId createTime error modelStatus",
    "candidates": "content finishReason finishMessage index safetyRatings citationMetadata tokenCount avgLogprobs "
    "logprobsResult groundingMetadata groundingAttributions urlContextMetadata urlRetrievalMetadata",
    "candidates.content": "role parts",
    "candidates.content.parts!": "text~ thought thoughtSignature functionCall inlineData fileData executableCode "
    "codeExecutionResult videoMetadata mediaResolution partMetadata toolCall toolResponse",
    "candidates.content.parts.functionCall!#id": "id name args willContinue",
}
_STEP: Final = (
    "type id name arguments content summary signature call_id result is_error error server_name search_type "
    "retrieval_type"
)
_CONTENT: Final = "type text~ annotations data mime_type uri resolution channels rate sample_rate file_name"
_INTERACTION: Final = (
    "id object status model agent created updated role steps outputs usage errors error service_tier labels input "
    "system_instruction tools generation_config agent_config response_format response_mime_type response_modalities "
    "safety_settings previous_interaction_id environment environment_id continuation_token cached_content "
    "webhook_config background store"
)


def _steps(place: str) -> Table:
    """The keys of steps at a place of an interaction, or of its stream."""
    return {f"{place}!#id": _STEP, f"{place}.content!": _CONTENT, f"{place}.summary!": _CONTENT}


_INTERACTIONS: Final[Table] = {"": _INTERACTION, **_steps("steps"), "outputs!": _CONTENT}
_INTERACTIONS_EVENTS: Final[Table] = {
    "": "event_type event_id index step delta interaction interaction_id status usage step_usage metadata error "
    "continuation_token",
    "interaction": _INTERACTION,
    **_steps("interaction.steps"),
    **_steps("step"),
    "delta!": f"{_CONTENT} {_STEP}",
    "delta.content!": _CONTENT,
    "metadata": "total_usage",
}
_CODEASSIST: Final[Table] = {
    "": "response traceId metadata error consumedCredits remainingCredits",
    **{f"response.{path}".rstrip("."): keys for path, keys in _GEMINI.items()},
}
_REALTIME: Final[Table] = {
    "": "type event_id response_id item_id previous_item_id output_index content_index item part response session "
    "conversation delta text~ transcript~ arguments~ name call_id usage error logprobs rate_limits audio_start_ms "
    "audio_end_ms sequence_number obfuscation id speaker start end languages event received_at",
    "response": "id object status status_details output conversation_id modalities output_modalities voice audio "
    "output_audio_format temperature max_output_tokens metadata usage",
    "response.output!#call_id": f"{_ITEM} object format",
    "response.output.content!": "type text~ transcript~ audio format",
    "part!": "type text~ transcript~ audio",
}
_LIVE: Final[Table] = {
    "": "setupComplete serverContent toolCall toolCallCancellation usageMetadata goAway sessionResumptionUpdate "
    "voiceActivityDetectionSignal voiceActivity code reason",
    "serverContent": "modelTurn turnComplete interrupted groundingMetadata generationComplete inputTranscription "
    "outputTranscription interimInputTranscription urlContextMetadata turnCompleteReason waitingForInput "
    "interactionStatus",
    "serverContent.modelTurn": "role parts",
    "serverContent.modelTurn.parts!": _GEMINI["candidates.content.parts!"],
    "serverContent.outputTranscription!": "text~ finished languageCode",
    "toolCall": "functionCalls",
    "toolCall.functionCalls!#id": "id name args willContinue",
}
_TOOL_USE: Final = "toolUseId name input type"
_CONVERSE: Final[Table] = {
    "": "output stopReason usage metrics additionalModelResponseFields trace performanceConfig serviceTier message "
    "Message error",
    "output": "message",
    "output.message": "role content",
    "output.message.content!": "text~ image document video audio toolUse toolResult guardContent cachePoint "
    "reasoningContent citationsContent searchResult toolAddition toolRemoval",
    "output.message.content.toolUse!#toolUseId": _TOOL_USE,
}
_CONVERSE_FRAMES: Final[Table] = {
    "": "messageStart contentBlockStart contentBlockDelta contentBlockStop messageStop metadata",
    "messageStart": "role p",
    "contentBlockStart": "start contentBlockIndex p",
    "contentBlockStart.start!": "toolUse toolResult image",
    "contentBlockStart.start.toolUse!#toolUseId": _TOOL_USE,
    "contentBlockDelta": "delta contentBlockIndex p",
    "contentBlockDelta.delta!": "text~ toolUse toolResult reasoningContent citation image",
    "contentBlockDelta.delta.toolUse!": "input~",
    "contentBlockDelta.delta.reasoningContent!": "text~ signature redactedContent",
    "contentBlockStop": "contentBlockIndex p",
    "messageStop": "stopReason additionalModelResponseFields p",
    "metadata": "usage metrics trace performanceConfig serviceTier p",
}
_PROMPT: Final[Table] = {
    "": "generation~ completion~ prompt_token_count generation_token_count stop_reason type stop id model error log_id",
    "outputs!": "text~ stop_reason",
    "choices!": "text~ stop_reason finish_reason index",
}
SHAPES: Final[Mapping[str, tuple[ObjectShape, ObjectShape]]] = {
    "chat": (shape(_CHAT, _said("message")), shape(_CHAT, _said("delta"))),
    "completions": (shape(_CHAT, {"choices": "text~"}), shape(_CHAT, {"choices": "text~"})),
    "messages": (shape(_ANTHROPIC), shape(_ANTHROPIC_EVENTS)),
    "responses": (shape(_RESPONSES), shape(_RESPONSES_EVENTS)),
    "responses_compaction": (shape(_RESPONSES), shape(_RESPONSES_EVENTS)),
    "decisions": (shape(_DECISIONS), shape(_DECISIONS)),
    "gemini": (shape(_GEMINI), shape(_GEMINI)),
    "codeassist": (shape(_CODEASSIST), shape(_CODEASSIST)),
    "interactions": (shape(_INTERACTIONS), shape(_INTERACTIONS_EVENTS)),
    "converse": (shape(_CONVERSE), shape(_CONVERSE_FRAMES)),
    "prompt": (shape(_PROMPT), shape(_PROMPT)),
    "text_completions": (shape(_PROMPT), shape(_PROMPT)),
    "realtime": (shape(_REALTIME), shape(_REALTIME)),
    "gemini_live": (shape(_LIVE), shape(_LIVE)),
}
"""Shapes by dialect: of plain answers, and of the events of a stream."""
_DELTAS: Final = ("output_text", "refusal", "function_call_arguments", "custom_tool_call_input")
_DELTAS_OF_REASONING: Final = ("reasoning_text", "reasoning_summary_text")
_TRANSCRIPTION: Final = "conversation.item.input_audio_transcription"
_HEARD: Final = ("committed", "cleared", "speech_started", "speech_stopped", "timeout_triggered", "dtmf_event_received")
_STEPS: Final = ("in_progress", "completed", "failed")
_SPOKEN_DELTAS: Final = (
    "output_text", "text", "output_audio", "audio", "output_audio_transcript", "audio_transcript",
    "function_call_arguments", "mcp_call_arguments",
)  # fmt: skip
KINDS: Final[Mapping[str, frozenset[str]]] = {
    "messages": frozenset(
        {"message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta"}
        | {"message_stop", "ping", "error"}
    ),
    "responses": frozenset(
        {f"response.{end}" for end in ("created", "queued", "in_progress", "completed", "incomplete", "failed")}
        | {"response.cancelled", "response.metadata", "error", "keepalive", "ping", "codex.rate_limits"}
        | {f"response.{item}.{end}" for item in ("output_item", "content_part") for end in ("added", "done")}
        | {f"response.reasoning_summary_part.{end}" for end in ("added", "done")}
        | {f"response.{item}.{end}" for item in (*_DELTAS, *_DELTAS_OF_REASONING) for end in ("delta", "done")}
        | {"response.output_text.annotation.added"}
    ),
    "realtime": frozenset(
        {"response.created", "response.done", "error", "rate_limits.updated", "conversation.created"}
        | {f"session.{end}" for end in ("created", "updated")}
        | {f"conversation.item.{end}" for end in ("created", "added", "done", "deleted", "truncated", "retrieved")}
        | {f"{_TRANSCRIPTION}.{end}" for end in ("delta", "completed", "failed", "segment")}
        | {f"input_audio_buffer.{end}" for end in _HEARD}
        | {f"output_audio_buffer.{end}" for end in ("started", "stopped", "cleared")}
        | {f"mcp_list_tools.{end}" for end in _STEPS}
        | {f"response.mcp_call.{end}" for end in _STEPS}
        | {f"response.{item}.{end}" for item in ("output_item", "content_part") for end in ("added", "done")}
        | {f"response.{item}.{end}" for item in _SPOKEN_DELTAS for end in ("delta", "done")}
    ),
}
"""By dialect: the kinds of events that are read, or have no content."""


# -- the check ---------------------------------------------------------------------------------------------------------

Kind: TypeAlias = Literal["text", "tool_calls", "token_ids", "token_counts", "logprobs", "usage"]
Gaps: TypeAlias = dict[str, Kind]
"""The kind of content that was not read, by the path of its keys."""
GAP_DESCRIPTIONS: Final[Mapping[Kind, str]] = {
    "text": "holds text that was not read",
    "tool_calls": "holds tool calls that were not read",
    "token_ids": "holds token ids that were not read",
    "token_counts": "does not hold the ids of all tokens that the engine counted",
    "logprobs": "holds numbers that are no log-probabilities",
    "usage": "holds counts that were not read",
}
MOST: Final = 8
"""Most paths of one answer that are named."""
DEEPEST: Final = 12
"""Levels below an unknown key that are checked."""
LONGEST: Final = 120
"""Most characters of a path."""
_DATA = re.compile(rb"^data: ?(.*)$", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_$](?:[\w.$-]{0,46}[\w$-])?", re.ASCII)
_WORD = re.compile(r"[\w.:/-]{1,32}")
_BINARY = re.compile(r"[A-Za-z0-9+/=_-]{40,}")
_SILENT = re.compile(
    r"(?:^|_)(?:id|object|type|role|status|index|format|signature|fingerprint|obfuscation|encrypted\w*|redacted\w*|"
    r"metadata|annotations?|citations?|bytes|url|version|model|name|created\w*|extra_content|json_?path)$"
    r"|Id$|[jJ]sonPath$|Signature$|Metadata$|Ratings$|reason$|Reason$|filter|safety|grounding|fingerprint"
)
"""Matches keys whose values are never a model's words, wherever they stand."""
_MADE = re.compile(
    r"(?i)text|content|reasoning|think|thought|argument|refus|transcript|delta|message|answer|output|completion|parts"
)
"""Matches keys under which a model's words may stand."""
_CALLED = re.compile(r"(?i)tool|function|(?:^|_)calls?$|argument")
_COUNTED = re.compile(r"(?i)usage|tokens$|token_?counts?$")
_IDS = re.compile(r"(?i)(?:token|output|prompt|input)_?ids$|(?:^|_)tokens$")
_OBJECT = re.compile(r"((?:usage|Usage\w*|arguments|args|input)(?:\[\])?)[.\[].*")
"""Matches a path below an object of counts, or of arguments, whose keys are an agent's own: such an object is named as
a whole."""
_USAGE_OBJECT = re.compile(rb'"(?:usage|usageMetadata)": ?\{')
_USAGE: Final = frozenset({"usage", "usageMetadata"})
_TEXTS: Final = frozenset({str, type(None)})


class _UnknownKey(NamedTuple):
    """The values under a key that is in no table."""

    path: str
    values: list[Any]
    speaks: bool
    counts: bool
    """True if only numbers are checked."""


class _AnswerCheck:
    """One answer while it is checked."""

    def __init__(self, read: Callable[[], Turn], facts: Facts, counted: bool) -> None:
        """`counted`: counts of tokens were read."""
        self.facts = facts
        self._read = read
        self.places: list[_UnknownKey] = []
        self.calls: dict[str, set[str]] = {}
        """Ids of tool calls, by the path of the calls."""
        self.ids = False
        """True if token ids came."""
        self._empty = facts.choices == 0
        """True if known texts are checked, too: the dialect read nothing of the answer."""
        self._counted = counted

    @cached_property
    def turn(self) -> Turn:
        """The answer as the dialect reads it; costs many times as much as the rest."""
        return self._read()

    @cached_property
    def said(self) -> str:
        """All texts of the answer that the dialect reads."""
        leaves = _leaves("", self.turn.model_dump(include={"choices", "error"}), 0)
        return "\0".join(value for _, value in leaves if isinstance(value, str))

    @property
    def turn_calls(self) -> int:
        """Number of tool calls that the dialect reads."""
        parts = (part for choice in self.turn.choices for part in choice.message.parts)
        return sum(part.type == "tool_call" for part in parts)

    def walk(self, layer: Sequence[Json], shape: ObjectShape, path: str) -> None:
        """Check the objects of one place, all of them together."""
        keys = set[str]().union(*layer)
        self.ids |= "token_ids" in keys
        for key in sorted(keys - shape.known):
            self._note(layer, key, path, shape.speaks)
        for key in () if self._counted else sorted(keys & _USAGE & shape.known):
            self._note(layer, key, path, False, counts=True)
        for key in sorted(keys & shape.texts):
            if self._empty or not _TEXTS.issuperset(map(type, [one.get(key) for one in layer])):
                self._note(layer, key, path, True)
        if shape.calls is not None and shape.calls in keys:
            ids = {one[shape.calls] for one in layer if _is_call(one) and isinstance(one.get(shape.calls), str)}
            self.calls.setdefault(path.rstrip("."), set()).update(ids - {""})
        for key in keys & shape.inner.keys():
            values: list[Any] = [value for one in layer if (value := one.get(key))]
            below = [it for value in values for it in (arr(value) or (value,))]
            if objects := objs(below):
                self.walk(objects, shape.inner[key], f"{path}{key}{'[]' * isinstance(values[0], list)}.")

    def _note(self, layer: Sequence[Json], key: str, path: str, speaks: bool, counts: bool = False) -> None:
        values = [value for one in layer if (value := one.get(key))]
        if values:
            self.places.append(_UnknownKey(f"{path}{_named(key)}", values, speaks, counts))

    def gaps(self) -> Iterator[tuple[str, Kind]]:
        """Yield the content that was not read, in the order of its keys."""
        for place in self.places:
            if _CALLED.search(place.path) and all(map(self._has, place.values)):
                continue
            found: dict[str, list[Any]] = {}
            for value in place.values:
                for path, leaf in _leaves("", value, 0):
                    if not (place.counts and isinstance(leaf, str)):
                        found.setdefault(path, []).append(leaf)
            for path, leaves in found.items():
                names = [place.path.rpartition(".")[2].removesuffix("[]"), *re.split(r"\.|\[\]", path)]
                names, listed = [name for name in names if name], path.endswith("[]")
                if (kind := self._kind(names, leaves, place.speaks, listed)) is not None:
                    whole = place.path + path
                    yield _OBJECT.sub(r"\1", whole)[:LONGEST], kind
        for path, ids in self.calls.items():
            counted = self.facts.tool_calls
            if len(ids) > counted or (len(ids) > 1 and self.turn_calls != counted):
                yield path, "tool_calls"

    def _has(self, value: Any) -> bool:
        """True if an object was read as JSON text, as arguments of tool calls are."""
        return isinstance(value, dict | list) and dumps(value) in self.said

    def _kind(self, names: Sequence[str], leaves: Sequence[Any], speaks: bool, listed: bool) -> Kind | None:
        """The kind of content that was not read under a path of unknown keys; None where it is no content, or was read.
        `listed`: the values are the entries of a list."""
        texts = [leaf for leaf in leaves if isinstance(leaf, str)]
        if not texts:
            return self._number(names, leaves, listed)
        if any(map(_SILENT.search, names)) or not (speaks or any(map(_MADE.search, names))):
            return None
        whole = "".join(texts)
        called = any(map(_CALLED.search, names))
        word = len({*texts}) == 1 and _WORD.fullmatch(texts[0]) and not (called or _MADE.search(names[-1]))
        if word or not whole.strip() or _BINARY.fullmatch(whole):
            return None
        several = len(self.turn.choices) > 1 and all(one in self.said for one in texts)
        # Some servers repeat with each event all text so far.
        grown = texts[-1] in self.said and all(after.startswith(one) for one, after in pairwise(texts))
        if several or grown or whole in self.said or dumps(whole)[1:-1] in self.said:
            return None
        return "tool_calls" if called else "text"

    def _number(self, names: Sequence[str], leaves: Sequence[Any], listed: bool) -> Kind | None:
        if listed:
            ids = _IDS.search(names[-1]) and len(leaves) > 1 and all(isinstance(leaf, int) for leaf in leaves)
            return "token_ids" if ids else None
        if _SILENT.search(names[-1]):
            return None
        if any(map(_COUNTED.search, names)):
            return "usage" if not self._counted and any(leaves) else None
        return "tool_calls" if any(map(_CALLED.search, names)) and any(map(_MADE.search, names)) else None


def recheck_unread(span: Span, request: bytes, response: bytes) -> Gaps:
    """The content of an answer that this version does not read either; empty for calls of which all was read when they
    were recorded. Request and response are decoded."""
    if UNREAD not in (span.attributes or {}):
        return {}
    dialect, stream = by_name(span.dialect), span.stream
    return find_unread(dialect, request, response, stream, dialect.facts(request, response, stream), response)


_SPOKEN_TYPES: Final = Literal[
    "text", "thinking", "redacted_thinking", "message", "reasoning", "model_output", "thought", "thought_summary",
    "thought_signature",
]  # fmt: skip
"""Types of objects that are no tool calls, in places where a tool call may stand."""


def _strict(shape: ObjectShape, kinds: frozenset[str] | None = None) -> type[msgspec.Struct]:
    """A struct that accepts a shape and nothing else, without tool calls and token ids."""
    made: list[Any] = []
    for key in sorted(shape.known):
        kind: Any = msgspec.Raw
        if key == "type" and (kinds or shape.calls):
            made.insert(0, (key, Literal[*sorted(kinds)] if kinds else _SPOKEN_TYPES))
            continue
        if key in shape.inner:
            inner = _strict(shape.inner[key])
            kind = list[inner] | inner | None
        elif key in shape.texts:
            kind = str | None
        elif key == "token_ids":
            kind = None
        made.append((key, kind, msgspec.Raw() if kind is msgspec.Raw else None))
    if shape.calls and "type" not in shape.known:
        made.insert(0, ("type", _SPOKEN_TYPES))
    return msgspec.defstruct("Known", made, forbid_unknown_fields=True, gc=False)


_KNOWN: Final[Mapping[str, tuple[msgspec.json.Decoder[Any], msgspec.json.Decoder[Any]]]] = {
    name: (
        msgspec.json.Decoder(_strict(plain)),
        msgspec.json.Decoder(GenericAlias(list, _strict(event, KINDS.get(name)))),
    )
    for name, (plain, event) in SHAPES.items()
}
"""Decoders by dialect, of answers and of events of a stream; what they accept needs no check."""


def find_unread(dialect: Dialect, request: bytes, response: bytes, stream: bool, facts: Facts, brief: bytes) -> Gaps:
    """The content in a good answer's bytes that its dialect does not read. `facts`: the answer's summary; `brief`: the
    response, of a stream the distinct events are enough."""
    if dialect.nested:
        unwrapped = dialect.unwrap(request, response, stream)
        if unwrapped is None:
            return {}
        dialect, response = unwrapped
        brief = response
    if dialect.name not in SHAPES or not dialect.generates:
        return {}
    events = stream and dialect.streaming_content_type.startswith(b"text/")
    usage, some = facts.usage, _listed(brief) if events else brief
    counted = usage is not None and (usage.output_tokens is not None or usage.input_tokens is not None)
    if facts.choices and (counted or not _USAGE_OBJECT.search(some)):
        try:
            # An answer with known keys only, without tool calls and token ids. It costs a fraction of the check.
            _KNOWN[dialect.name][stream].decode(some)
            return {}
        except UNREADABLE:
            pass
    pieces = pieces_of(dialect, response, _listed(response) if events else response, stream)
    answer = _AnswerCheck(lambda: dialect.read(request, response, stream), facts, counted)
    known = KINDS.get(dialect.name) if stream else None
    if known is not None and not known.issuperset(map(_kind_of, pieces)):
        _other_kinds(answer, pieces, known)
        pieces = [one for one in pieces if _kind_of(one) in known]
    answer.walk(pieces, SHAPES[dialect.name][stream], "")
    found = dict(answer.gaps())
    if answer.ids and dialect.token_fields:
        found |= _odd_tokens(pieces)
    return dict(list(found.items())[:MOST])


def _listed(body: bytes) -> bytes:
    """The data of a stream's events as one JSON array, since one decoding is faster than one for each event; assumes
    one line of data for each event."""
    if body.lstrip()[:1] == b"[":
        return b"[%b]" % body.strip()[1:-1]
    data = _DATA.findall(body)
    if data and data[-1].startswith(b"[DONE]"):
        data.pop()
    return b"[%b]" % b",".join(data)


def pieces_of(dialect: Dialect, response: bytes, body: bytes, stream: bool) -> list[Json]:
    """The objects of an answer: the events of a stream, decoded at once, or the whole answer. `body`: the events of a
    stream as one array."""
    if is_bulky(body):
        return []
    if stream and body is response and body[:1] != b"[":
        return [{frame.name: obj(loads(frame.payload))} for frame in frames(response, []) if frame.kind == "event"]
    try:
        value = orjson.loads(body)
    except UNREADABLE:
        return list(chunks(response, [])) if stream else []
    return [one for one in (arr(value) or [value]) if isinstance(one, dict)]


def _other_kinds(answer: _AnswerCheck, events: Iterable[Json], known: frozenset[str]) -> None:
    """Check events of unknown kinds."""
    kinds: dict[str, list[Json]] = {}
    for event in events:
        if (kind := _kind_of(event)) not in known:
            kinds.setdefault(_named(kind), []).append(event)
    for kind, some in kinds.items():
        answer.walk(some, ObjectShape({"type"}, speaks=True), f"({kind}).")


def _kind_of(event: Json) -> str:
    return kind if isinstance(kind := event.get("type"), str) else ""


def _odd_tokens(pieces: Sequence[Json]) -> Gaps:
    """Ids that do not cover all tokens, and log-probabilities that are not valid."""
    tokens = tokens_of(pieces)
    found: Gaps = {"choices[].token_ids": "token_counts"} if tokens.count_mismatch else {}
    if any(output.invalid_logprobs for output in tokens.outputs.values()):
        found["choices[].logprobs"] = "logprobs"
    return found


def _is_call(one: Mapping[str, Any]) -> bool:
    kind, made = one.get("type"), obj(one.get("function") or one.get("custom") or one)
    if not made.get("name"):
        # Some servers give each piece of a call an id of its own.
        return False
    own = isinstance(kind, str) and kind.endswith("_call") and not kind.startswith("mcp_")
    return own or kind in (None, "", "function", "custom", "tool_use")


def _named(key: str) -> str:
    """A key as it may stand in a path; `*` for one that is no name, which may be a user's words."""
    return key if _NAME.fullmatch(key) else "*"


def _leaves(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Strings and numbers in a value, each with its path."""
    if isinstance(value, dict):
        if depth < DEEPEST:
            for key, inner in obj(value).items():
                yield from _leaves(f"{path}.{_named(key)}", inner, depth + 1)
    elif isinstance(value, list):
        if depth < DEEPEST:
            for inner in arr(value):
                yield from _leaves(f"{path}[]", inner, depth + 1)
    elif value is not None and not isinstance(value, bool):
        yield path, value
