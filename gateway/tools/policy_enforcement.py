"""Policies on passing tool calls: these are refused, changed, or held until a person has decided.

A call that cannot be read counts as one that a rule may be about (`gateway.reading.policy.policy`), so no call
evades a rule by its size, its encoding or its form. A batch is sent only if all of its members may be.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Final, Protocol, cast

from penstock.gateway.model.base import NOBODY, Mode
from penstock.gateway.model.facts import POLICY_HARD, POLICY_RULE, TOOL
from penstock.gateway.model.span import POLICY_VIOLATION
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.reading.policy.policy import (
    ALLOWED,
    CALL,
    Decision,
    HintsOf,
    ToolCall,
    ToolPolicy,
    encode_messages,
    redacted,
    strict,
    tool_call,
)
from penstock.gateway.reading.policy.questions import PolicyAnswer, Question, QuestionEnd, QuestionQueue
from penstock.gateway.reading.policy.rules import PolicyRule, Redaction, UnreadableCall, text_of
from penstock.gateway.releases.driver import Driver
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tools.middleware import McpRequest
from penstock.gateway.traffic.proxy.proxy_context import CallPlan
from penstock.gateway.wire.dialects.json_scan import EVERYTHING
from penstock.gateway.wire.dialects.mcp import header_text
from penstock.gateway.wire.http.request import ClientFault, HttpRequest, Refusal, UpstreamFault
from penstock.gateway.work.dispatcher import Dispatcher

LARGE: Final = 256 << 10
"""Messages of more bytes are read on a thread."""
EVENT: Final = "policy"
"""Name of the event that records the decision on a call that has waited for a person."""
CODE: Final = -32010
"""JSON-RPC's code of a denied call, from the range that the protocol leaves to implementations."""
_VERDICT, _PROBLEM, _DRY, _WHO, _REASON, _QUESTION = (
    f"penstock.policy.{name}" for name in ("verdict", "problem", "dry", "who", "reason", "question")
)
_CHARSET: Final = re.compile(rb"""charset\s*=\s*"?(?:utf-?8|us-ascii)"?\s*(?=;|,|$)""", re.IGNORECASE)
_REMEMBERED: Final = 10_000
"""Most rollouts whose mode is remembered."""


@dataclass(frozen=True, slots=True)
class MessageDecision:
    """A message and the decision on it."""

    id: bytes
    """Id of the request; empty for a message that is none."""
    value: Any
    """The whole message, parsed."""
    call: ToolCall | None
    decision: Decision


class PolicyEnvironment(Protocol):
    """The gateway as policies need it."""

    def mode_of(self, rollout: str) -> Mode | None:
        """The mode of a rollout; None while it is not on the tape."""
        ...

    def record_event(self, entry: SpanEntry) -> None:
        """Writes an event to the tape."""
        ...

    def report_violation(self, rollout: str) -> None:
        """Called for a rollout with a hard violation."""
        ...

    @property
    def now_ns(self) -> Callable[[], int]:
        """The clock of the tape."""
        ...


class PolicyMiddleware:
    """The feature that applies the policy rules to every exchange."""

    def __init__(
        self, rules: list[PolicyRule], hints_of: HintsOf, questions: QuestionQueue, around: PolicyEnvironment
    ) -> None:
        self._policy = ToolPolicy(rules, hints_of)
        self._questions = questions
        self._around = around
        self._modes: OrderedDict[str, Mode] = OrderedDict()
        self._kernels = {rule.name: load_kernel(rule.name, rule.kernel) for rule in rules if rule.kernel is not None}
        self._by_mode = any(rule.mode for rule in rules)

    def changes(self, server: str) -> bool:
        """True if a rule may redact results of this server."""
        return self._policy.redacts_results(server)

    def plan(self, asking: McpRequest, send: CallPlan) -> asyncio.Future[None] | None:
        """Decides on the messages that are sent; raises `Refusal`."""
        server, mode = asking.server.name, self._mode(asking)
        if not send.body or not self._policy.concerns(server, mode):
            return None
        if len(send.body) > LARGE:
            return asyncio.ensure_future(self._aside(asking, send, server, mode))
        return self._act(asking, send, self._judge(asking, send.body, server, mode))

    async def _aside(self, asking: McpRequest, send: CallPlan, server: str, mode: Mode) -> None:
        """Judges a large message on a thread."""
        judged = await asyncio.to_thread(self._judge, asking, send.body, server, mode)
        waited = self._act(asking, send, judged)
        if waited is not None:
            await waited

    def _mode(self, asking: McpRequest) -> Mode:
        """The rollout's mode from the tape, because an agent can put any mode into its address."""
        rollout, said = asking.address.rollout, asking.address.mode
        if not self._by_mode:
            return said
        known = self._modes.get(rollout) or self._around.mode_of(rollout)
        if known is not None:
            self._modes[rollout] = known
            if len(self._modes) > _REMEMBERED:
                self._modes.popitem(last=False)
        return known or said

    # Decisions ------------------------------------------------------------------------------------------------------

    def _judge(self, asking: McpRequest, body: bytes, server: str, mode: Mode) -> list[MessageDecision]:
        """The decision on each message."""
        agent = asking.address.agent
        try:
            _check_form(asking.request)
            value = strict(body)
            values = cast(list[Any], value) if isinstance(value, list) else [value]
            if len(values) != len(asking.messages):
                raise UnreadableCall("it can be read in two ways")
            made: list[MessageDecision] = []
            for sent, one in zip(asking.messages, values, strict=True):
                call = tool_call(one)
                _check_headers(asking.request, one, call)
                if call is not None and sent.method != CALL:
                    raise UnreadableCall("it can be read in two ways")
                decision = ALLOWED if call is None else _whole(call, self._policy.decide(server, mode, call, agent))
                made.append(MessageDecision(sent.id, one, call, decision))
            return made
        except UnreadableCall as unreadable:
            found = self._policy.decide_unreadable(server, mode, str(unreadable), agent)
            return [MessageDecision(b"", None, None, found)]

    def _act(self, asking: McpRequest, send: CallPlan, judged: list[MessageDecision]) -> asyncio.Future[None] | None:
        """Carries out the decisions. Returns a future if kernels or a person must be asked; raises `Refusal`."""
        for one in judged:
            _mark(asking, one.decision)
        denied = next((one for one in judged if one.decision.verdict == "deny"), None)
        if denied is not None:
            raise self._denied(asking, denied, len(judged))
        if any(one.decision.verdict == "redact" for one in judged):
            self._redact(asking, send, judged)
        if send.call.encoded_body is not None and send.body is send.call.body:
            # Sends the very bytes that were judged: an encoded body could hold others.
            send.body = bytes(memoryview(send.body))
        questions = [one for one in judged if one.decision.verdict == "ask"]
        kernels = [one for one in judged if one.decision.verdict == "kernel"]
        if kernels:
            return asyncio.ensure_future(self._ask_kernels(asking, kernels, questions))
        return self._ask(asking, questions) if questions else None

    def _denied(self, asking: McpRequest, one: MessageDecision, several: int) -> Refusal:
        rule = one.decision.rule
        assert rule is not None
        what = f"the tool {one.call.tool!r} was not run" if one.call is not None else "this message was not passed on"
        rest = f" (one of {several} messages sent together, of which none was passed on)" if several > 1 else ""
        return self._refusal(asking, rule, f"{what}: {one.decision.reason}{rest}")

    def _refusal(self, asking: McpRequest, rule: PolicyRule, message: str) -> Refusal:
        if rule.hard:
            asking.record.note({POLICY_HARD: True})
            self._around.report_violation(asking.address.rollout)
        # If the client expects no JSON-RPC answer in this exchange, the status reports the refusal.
        elsewhere = asking.server.own_path(asking.record.call.path) != ""
        asked = not elsewhere and any(one.kind == "request" for one in asking.messages)
        denied = ClientFault(200 if asked else 400, POLICY_VIOLATION, message)
        denied.code, denied.data = CODE, {"reason": "policy", "rule": rule.name}
        return denied

    # Redaction ------------------------------------------------------------------------------------------------------

    def _redact(self, asking: McpRequest, send: CallPlan, judged: list[MessageDecision]) -> None:
        """Redacts arguments now, and results when they pass."""
        values = [self._without_arguments(asking, one) for one in judged]
        for new, one in zip(values, judged, strict=True):
            if new is not one.value:
                send.body = self._written(asking, one, values, send.body.lstrip()[:1] == b"[")
        for one in judged:
            rule = one.decision.rule
            if rule is not None and rule.redact is not None and rule.redact.results and one.id:
                asking.transform_response(one.id, partial(_without_results, rule.name, rule.redact))

    def _written(self, asking: McpRequest, one: MessageDecision, values: list[Any], several: bool) -> bytes:
        try:
            return encode_messages(values, several)
        except UnreadableCall as unreadable:
            said = one.decision._replace(verdict="deny", problem=str(unreadable))
            raise self._denied(asking, replace(one, decision=said), len(values)) from None

    def _without_arguments(self, asking: McpRequest, one: MessageDecision) -> Any:
        rule, call = one.decision.rule, one.call
        if rule is None or rule.redact is None or call is None:
            return one.value
        try:
            arguments = redacted(call.arguments, rule.redact.arguments, rule.redact)
        except UnreadableCall as unreadable:
            said = one.decision._replace(verdict="deny", problem=str(unreadable))
            raise self._denied(asking, replace(one, decision=said), 1) from None
        if arguments is call.arguments:
            return one.value
        return {**call.message, "params": {**call.message["params"], "arguments": arguments}}

    # Questions ------------------------------------------------------------------------------------------------------

    async def _ask_kernels(
        self, asking: McpRequest, judged: list[MessageDecision], questions: list[MessageDecision]
    ) -> None:
        """Waits until kernels, and then a person, have allowed all of the calls."""
        address = asking.address
        for one in judged:
            rule, call = one.decision.rule, one.call
            assert rule is not None
            assert call is not None
            arguments: object = call.arguments
            if not isinstance(arguments, dict):
                raise self._refusal(asking, rule, f"the tool {call.tool!r} was not run: its arguments are no object")
            who = address.rollout, address.attempt, address.agent, self._mode(asking)
            made = KernelCall(asking.server.name, call.tool, cast(dict[str, Any], arguments), *who)
            allowed, reason = await ask_kernel(self._kernels[rule.name], made, rule.wait)
            asking.record.note({_REASON: reason})
            if not allowed:
                why = f"policy rule {rule.name!r} does not allow it" + (f": {reason}" if reason else "")
                raise self._refusal(asking, rule, f"the tool {call.tool!r} was not run: {why}")
        if questions:
            await self._ask(asking, questions)

    def _ask(self, asking: McpRequest, judged: list[MessageDecision]) -> asyncio.Future[None]:
        """Waits until a person has approved all of the calls."""
        waited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        open_ones: dict[str, Question] = {}

        def done(question: Question, rule: PolicyRule, end: QuestionEnd) -> None:
            del open_ones[question.id]
            self._answered(asking, question, end)
            if isinstance(end, PolicyAnswer) and end.verdict == "approve":
                if not open_ones and not waited.done():
                    waited.set_result(None)
            elif not waited.done():
                waited.set_exception(
                    self._refusal(asking, rule, f"the tool {question.tool!r} was not run: {_why(end)}")
                )

        def over(_: asyncio.Future[None]) -> None:
            for question in list(open_ones.values()):
                if self._questions.take_back(question.id):
                    self._answered(asking, question, "withdrawn")

        for rule, question in [self._question(asking, one) for one in judged]:
            open_ones[question.id] = question
            self._questions.ask(question, partial(done, question, rule))
        waited.add_done_callback(over)
        return waited

    def _question(self, asking: McpRequest, one: MessageDecision) -> tuple[PolicyRule, Question]:
        rule, call, now = one.decision.rule, one.call, self._around.now_ns()
        assert rule is not None
        assert call is not None
        try:
            arguments = text_of(call.arguments)
        except UnreadableCall as unreadable:
            said = one.decision._replace(verdict="deny", problem=str(unreadable))
            raise self._denied(asking, replace(one, decision=said), 1) from None
        return rule, Question(
            id=self._questions.new_id(),
            rule=rule.name,
            message=rule.message,
            server=asking.server.name,
            tool=call.tool,
            arguments=arguments,
            rollout=asking.address.rollout,
            attempt=asking.address.attempt,
            asked_ns=now,
            until_ns=now + int(rule.wait * 1e9),
        )

    def _answered(self, asking: McpRequest, question: Question, end: QuestionEnd | str) -> None:
        """Notes the decision on the span, and writes an event that says who made it."""
        verdict, who, reason = (
            (end.verdict, end.who or NOBODY, end.why or None) if isinstance(end, PolicyAnswer) else (end, None, None)
        )
        said = {POLICY_RULE: question.rule, _VERDICT: verdict, _WHO: who, _REASON: reason}
        given = {name: value for name, value in said.items() if value is not None}
        asking.record.note(given)
        address, now = asking.address, self._around.now_ns()
        entry = SpanEntry(address.rollout, address.attempt, address.origin, address.mode, kind="event", name=EVENT)
        entry.method, entry.status, entry.start_ns, entry.end_ns = "", "ok", now, now
        entry.parent_id, entry.upstream = asking.record.span_id, question.server
        entry.attributes = {**given, TOOL: question.tool, _QUESTION: question.id}
        self._around.record_event(entry)


def _why(end: QuestionEnd) -> str:
    """The reason why a call that has waited is not run, for the agent's model."""
    if isinstance(end, PolicyAnswer):
        return "a person refused it" + (f": {end.why}" if end.why else "")
    return "nobody approved it in time" if end == "timeout" else "the gateway stops"


def _mark(asking: McpRequest, decision: Decision) -> None:
    if decision is ALLOWED:
        return
    said: dict[str, Any] = {_DRY: list(decision.dry)} if decision.dry else {}
    if decision.rule is not None:
        said |= {POLICY_RULE: decision.rule.name, _VERDICT: decision.verdict}
    if decision.problem is not None:
        said[_PROBLEM] = decision.problem
    asking.record.note(said)


def _whole(call: ToolCall, decision: Decision) -> Decision:
    """The decision; a denial if results must be redacted that come later, as a task's."""
    rule = decision.rule
    if call.as_task and rule is not None and rule.redact is not None and rule.redact.results:
        return decision._replace(verdict="deny", problem="its result is to come later, as that of a task")
    return decision


def _without_results(name: str, redact: Redaction, raw: bytes) -> bytes:
    """An answer with its result redacted. Raises `UpstreamFault` if it cannot be read."""
    try:
        answer = strict(raw)
        result = answer.get("result")
        if isinstance(result, Mapping) and ("task" in result or answer["result"].get("resultType") == "task"):
            raise UnreadableCall("it is to come later, as that of a task")
        made = dict(answer)
        if "result" in answer:
            made["result"] = redacted(result, redact.results, redact)
        if "error" in answer and EVERYTHING in redact.results:
            made["error"] = redacted(answer["error"], ["message", "data"], redact)
        return raw if all(made[key] is answer[key] for key in made) else encode_messages([made], several=False)
    except UnreadableCall as unreadable:
        message = f"policy rule {name!r} must read the result, and it cannot be read: {unreadable}"
        raise UpstreamFault(502, "unreadable", message) from None


def _check_form(request: HttpRequest) -> None:
    """Raises `UnreadableCall` for a request that its server could read differently."""
    if request.method != "POST":
        raise UnreadableCall(f"it is a {request.method} with a body")
    for name, _, value in request.headers:
        if name == b"content-type" and len(_CHARSET.findall(value)) != value.lower().count(b"charset"):
            raise UnreadableCall(f"its content type is {value.decode('latin-1')[:80]!r}, and the charset must be utf-8")


def _check_headers(request: HttpRequest, message: Any, call: ToolCall | None) -> None:
    """Raises `UnreadableCall` if headers (of revision 2026-07-28) name another call than the body."""
    method = message.get("method")
    for name, _, value in request.headers:
        said = value.decode("latin-1").strip()
        if name == b"mcp-method" and said != method and CALL in (said, method):
            raise UnreadableCall("its header Mcp-Method names another method than its body")
        if name == b"mcp-name" and call is not None and header_text(value) != call.tool:
            raise UnreadableCall("its header Mcp-Name names another tool than its body")


# -- events of policies on the tape, and releases that react to them; no call waits for any of this -------------------

_TURNS: Final = 8
_log = logging.getLogger("penstock.mcp")


class PolicyAudit:
    """The gateway as policies need it (`policy_enforcement.PolicyEnvironment`)."""

    def __init__(
        self, store: Store, recorder: Recorder, dispatcher: Dispatcher, releases: Driver, now_ns: Callable[[], int]
    ) -> None:
        self._store, self._recorder = store, recorder
        self._dispatcher, self._releases = dispatcher, releases
        self.now_ns = now_ns
        self._running: set[asyncio.Future[object]] = set()

    def mode_of(self, rollout: str) -> Mode | None:
        """The mode of a rollout; None while it is not on the tape."""
        found = self._store.rollout(rollout)
        return None if found is None else found.mode

    def record_event(self, entry: SpanEntry) -> None:
        """Writes an event to the tape."""
        self._begin(self._dispatcher.add([entry]))

    def report_violation(self, rollout: str) -> None:
        """Called on a hard violation: once it is on the tape, releases react to it."""
        self._begin(self._react(rollout))

    async def _react(self, rollout: str) -> None:
        # The violating call's span is put in one of the next turns of the loop.
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        await self._recorder.flush()
        await self._releases.on_violation(rollout)

    def _begin(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Future[object]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("what became of a tool call could not be noted: %s", error)

    async def finish(self, seconds: float) -> None:
        """Waits for running work for at most `seconds`."""
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)


# -- kernels: policies of third parties, written in Python, that a rule asks (`verdict = "kernel"`) -------------------
#
# They run in threads. A kernel is named `module:name`, which must be one of these; no package of Microsoft's is
# imported here:
#
#     a function             takes a `KernelCall`; returns True or False, or (allowed, reason); it may be asynchronous
#     `intercept_tool_call`  an `MCPGateway` of the Agent Governance Toolkit (`agent_os.mcp_gateway`)
#     `evaluate`             a `PolicyEvaluator` of the same toolkit (`agent_os.policies`)
#
# A kernel that fails denies the call.

KERNEL_FAILED: Final = "it failed; the log of the gateway says why"


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A tool call on which a kernel decides."""

    server: str
    tool: str
    arguments: dict[str, Any]
    rollout: str
    attempt: str
    agent: str | None
    """Name of the agent, if its address gave one."""
    mode: Mode

    @property
    def agent_id(self) -> str:
        """The caller, as kernels count calls: an attempt."""
        return f"{self.rollout}/{self.attempt}"


Kernel = Callable[[KernelCall], tuple[bool, str]]
"""Returns (allowed, reason)."""


def load_kernel(rule: str, name: str) -> Kernel:
    """Imports the kernel of a rule; raises `ConfigError`."""
    module, _, attribute = name.partition(":")
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        hint = "it must be importable: put its folder into PYTHONPATH"
        raise ConfigError(f"policy rule {rule!r}: kernel {name!r} cannot be loaded ({error}); {hint}") from None
    asked = _as_kernel(found)
    if asked is None:
        wanted = "a function, an MCPGateway or a PolicyEvaluator"
        raise ConfigError(f"policy rule {rule!r}: kernel {name!r} is of type {type(found).__name__}, not {wanted}")
    return asked


def _as_kernel(found: Any) -> Kernel | None:
    if hasattr(found, "intercept_tool_call"):
        return lambda call: _verdict(found.intercept_tool_call(call.agent_id, call.tool, call.arguments))
    if hasattr(found, "evaluate"):
        return lambda call: _verdict(found.evaluate(_context(call)))
    return (lambda call: _verdict(found(call))) if callable(found) else None


def _context(call: KernelCall) -> dict[str, Any]:
    """The variables of the toolkit's rules. No argument of the call can replace a value of the gateway's."""
    known = {"agent_id": call.agent_id, "tool_name": call.tool, "server": call.server, "mode": call.mode}
    return {**call.arguments, "params": call.arguments, **known}


def _verdict(answer: Any) -> tuple[bool, str]:
    if inspect.iscoroutine(answer):
        answer = asyncio.run(cast(Coroutine[Any, Any, Any], answer))
    if isinstance(answer, tuple):
        allowed, reason = cast(tuple[Any, Any], answer)
    else:
        allowed, reason = getattr(answer, "allowed", answer), getattr(answer, "reason", "")
    # Only True allows the call, not any truthy object.
    return allowed is True, str(reason or "")


async def ask_kernel(kernel: Kernel, call: KernelCall, seconds: float) -> tuple[bool, str]:
    """Asks a kernel, on a thread. Denies the call if it fails or takes more than `seconds`."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(kernel, call), seconds)
    except TimeoutError:
        return False, f"it has not answered within {seconds:g} s (wait)"
    except Exception:
        # Third parties' code may raise anything: the call was not allowed.
        _log.exception("a kernel failed on a call of %s", call.tool)
        return False, KERNEL_FAILED
