"""Tools and a prompt that need the client's input: revision 2026-07-28.

The server answers with what it asks for (`input_required`); the client sends the same request again with the answers
and with the state that it was given. The state is sealed and checked by the SDK before it comes here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mcp_types as types
from conformance.fixtures import Context, Json, capable, said, text

Answers = Mapping[str, types.InputResponse]
Outcome = types.CallToolResult | types.InputRequiredResult
Round = Callable[[Context, Answers, str | None], Outcome]

NAME: Json = {"name": {"type": "string"}}
ROOTS = types.ListRootsRequest(params=types.RequestParams())


def _form(message: str, properties: Json) -> types.ElicitRequest:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return types.ElicitRequest(params=types.ElicitRequestFormParams(message=message, requested_schema=schema))


def _sample(question: str, max_tokens: int) -> types.CreateMessageRequest:
    asked = types.SamplingMessage(role="user", content=text(question))
    return types.CreateMessageRequest(params=types.CreateMessageRequestParams(messages=[asked], max_tokens=max_tokens))


def _wanted(requests: dict[str, types.InputRequest], state: str | None = None) -> types.InputRequiredResult:
    return types.InputRequiredResult(input_requests=requests, request_state=state)


def _accepted(answers: Answers, key: str, field: str) -> object | None:
    """What the user has filled in, or None when that was not answered."""
    answer = answers.get(key)
    if not isinstance(answer, types.ElicitResult) or answer.action != "accept":
        return None
    return (answer.content or {}).get(field)


def elicitation(ctx: Context, answers: Answers, state: str | None) -> Outcome:
    name = _accepted(answers, "user_name", "name")
    return _wanted({"user_name": _form("What is your name?", NAME)}) if name is None else said(f"Hello, {name}!")


def sampling(ctx: Context, answers: Answers, state: str | None) -> Outcome:
    answer = answers.get("capital_question")
    if not isinstance(answer, types.CreateMessageResult):
        return _wanted({"capital_question": _sample("What is the capital of France?", 100)})
    return said(answer.content.text if isinstance(answer.content, types.TextContent) else "no text")


def list_roots(ctx: Context, answers: Answers, state: str | None) -> Outcome:
    answer = answers.get("client_roots")
    if not isinstance(answer, types.ListRootsResult):
        return _wanted({"client_roots": ROOTS})
    return said("Roots: " + ", ".join(str(root.uri) for root in answer.roots))


def with_state(ctx: Context, answers: Answers, state: str | None) -> Outcome:
    confirmed = _accepted(answers, "confirm", "ok")
    if confirmed is None or state is None:
        return _wanted({"confirm": _form("Please confirm", {"ok": {"type": "boolean"}})}, "asked")
    return said(f"state-ok: {state}, confirmed: {confirmed}")


def several(ctx: Context, answers: Answers, state: str | None) -> Outcome:
    if not {"user_name", "greeting", "client_roots"} <= set(answers):
        wanted: dict[str, types.InputRequest] = {
            "user_name": _form("What is your name?", NAME),
            "greeting": _sample("Generate a greeting", 50),
            "client_roots": ROOTS,
        }
        return _wanted(wanted, "asked three things")
    return said("All three were answered.")


def several_rounds(ctx: Context, answers: Answers, state: str | None) -> Outcome:
    if state == "two" and (color := _accepted(answers, "step2", "color")) is not None:
        return said(f"Your favourite colour is {color}.")
    if state == "one" and _accepted(answers, "step1", "name") is not None:
        question = _form("Step 2: What is your favorite color?", {"color": {"type": "string"}})
        return _wanted({"step2": question}, "two")
    return _wanted({"step1": _form("Step 1: What is your name?", NAME)}, "one")


def by_capability(ctx: Context, answers: Answers, state: str | None) -> Outcome:
    """Asks only for what the client has declared."""
    if answers:
        return said("Answered.")
    requests: dict[str, types.InputRequest] = {}
    if capable(ctx, "sampling"):
        requests["greeting"] = _sample("Generate a greeting", 50)
    if capable(ctx, "elicitation"):
        requests["user_name"] = _form("What is your name?", NAME)
    return _wanted(requests) if requests else said("The client can be asked nothing.")


TOOLS: dict[str, Round] = {
    "test_input_required_result_elicitation": elicitation,
    "test_input_required_result_sampling": sampling,
    "test_input_required_result_list_roots": list_roots,
    "test_input_required_result_request_state": with_state,
    "test_input_required_result_multiple_inputs": several,
    "test_input_required_result_multi_round": several_rounds,
    "test_input_required_result_tampered_state": with_state,
    "test_input_required_result_capabilities": by_capability,
    "test_streaming_elicitation": elicitation,
}
PROMPT = "test_input_required_result_prompt"


def prompt(answers: Answers) -> types.GetPromptResult | types.InputRequiredResult:
    context = _accepted(answers, "user_context", "context")
    if context is None:
        question = _form("What context should the prompt use?", {"context": {"type": "string"}})
        return _wanted({"user_context": question})
    message = types.PromptMessage(role="user", content=text(f"Work in this context: {context}"))
    return types.GetPromptResult(messages=[message])
