"""The known keys of answers, as tables: those that are read, and those that hold nothing of the model's output (ids,
fingerprints, citations, padding ...). `unread_content` checks all others.

A row is a path of keys, arrays left out, and the keys of the objects there. `~` marks a text, which is a string or
null: any other value is checked. After a path `!` marks a place of the model's output, where any new key may hold some
of it, and `#KEY` a place of tool calls, which that key tells apart. Events of kinds that are not in `KINDS` are checked
as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

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


_CHAT: Final[Table] = {
    "": "id object created model choices usage error system_fingerprint service_tier provider request_id obfuscation "
    "prompt_token_ids prompt_logprobs prompt_text kv_transfer_params prompt_filter_results prompt_annotations timings "
    "citations search_results web_search metadata nvext moderation type code",
    "x_groq": "id error debug",
    "choices": "index finish_reason native_finish_reason stop_reason matched_stop error seed logprobs token_ids "
    "prompt_token_ids prompt_logprobs content_filter_results content_filter_offsets hidden_states routed_experts",
}
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
    "presence_penalty kv_transfer_params input_messages output_messages"
)
_ITEM: Final = (
    "id type status role content summary arguments call_id name namespace input output action results queries code "
    "container_id encrypted_content result error phase operation pending_safety_checks acknowledged_safety_checks "
    "outputs server_label approval_request_id tools created_by caller environment max_output_length revised_prompt "
    "size quality background output_format"
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
_GEMINI: Final[Table] = {
    "": "candidates promptFeedback usageMetadata modelVersion responseId createTime error modelStatus",
    "candidates": "content finishReason finishMessage index safetyRatings citationMetadata tokenCount avgLogprobs "
    "logprobsResult groundingMetadata groundingAttributions urlContextMetadata urlRetrievalMetadata",
    "candidates.content": "role parts",
    "candidates.content.parts!": "text~ thought thoughtSignature functionCall inlineData fileData executableCode "
    "codeExecutionResult videoMetadata mediaResolution partMetadata toolCall toolResponse",
    "candidates.content.parts.functionCall!#id": "id name args willContinue",
}
_TOOL_USE: Final = "toolUseId name input type"
_CONVERSE: Final[Table] = {
    "": "output stopReason usage metrics additionalModelResponseFields trace performanceConfig serviceTier message "
    "Message error",
    "output": "message",
    "output.message": "role content",
    "output.message.content!": "text~ image document video audio toolUse toolResult guardContent cachePoint "
    "reasoningContent citationsContent searchResult",
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

SHAPES: Final[Mapping[str, tuple[ObjectShape, ObjectShape]]] = {
    "chat": (shape(_CHAT, _said("message")), shape(_CHAT, _said("delta"))),
    "completions": (shape(_CHAT, {"choices": "text~"}), shape(_CHAT, {"choices": "text~"})),
    "messages": (shape(_ANTHROPIC), shape(_ANTHROPIC_EVENTS)),
    "responses": (shape(_RESPONSES), shape(_RESPONSES_EVENTS)),
    "gemini": (shape(_GEMINI), shape(_GEMINI)),
    "converse": (shape(_CONVERSE), shape(_CONVERSE_FRAMES)),
}
"""Shapes by dialect: of plain answers, and of the events of a stream."""

_DELTAS: Final = ("output_text", "refusal", "function_call_arguments", "custom_tool_call_input")
_DELTAS_OF_REASONING: Final = ("reasoning_text", "reasoning_summary_text")
KINDS: Final[Mapping[str, frozenset[str]]] = {
    "messages": frozenset(
        {"message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta"}
        | {"message_stop", "ping", "error"}
    ),
    "responses": frozenset(
        {f"response.{name}" for name in ("created", "queued", "in_progress", "completed", "incomplete", "failed")}
        | {"response.cancelled", "response.metadata", "error", "keepalive", "ping", "codex.rate_limits"}
        | {f"response.{name}.{end}" for name in ("output_item", "content_part") for end in ("added", "done")}
        | {f"response.reasoning_summary_part.{end}" for end in ("added", "done")}
        | {f"response.{name}.{end}" for name in (*_DELTAS, *_DELTAS_OF_REASONING) for end in ("delta", "done")}
        | {"response.output_text.annotation.added"}
    ),
}
"""By dialect: the kinds of events that are read, or have no content."""
