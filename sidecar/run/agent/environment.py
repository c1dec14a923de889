"""Makes the arguments, variables and stdin of an agent from its claim. Pure.

The variables that an agent's client reads lead an unmodified agent to its rollout (docs/running-agents.md has the
table). API keys become the rollout's own token. Inherited variables that could lead a client past the gateway, or give
an agent the runner's own key, are removed; `--env` comes last and may set anything.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, urlsplit

from penstock.gateway.model.queue import Claim
from penstock.gateway.model.rollout import Attempt, Rollout
from penstock.gateway.model.span import span_id, trace_id
from penstock.sidecar.intercept.rules import HINTS, KEYS, LOGINS
from penstock.sidecar.run.settings import AgentSettings

# Templates of arguments and variables: `{question}` is a field of the task. Pure.
#
#     {question}  {item.id}  {choices.0}    a field of the task, a field of a field, an item of a list
#     {input}  {input.token}                the whole task as JSON; a field whose name is one of the next line
#     {rollout} {attempt} {openai_url} {anthropic_url} {token}
#     {{  }}                                a brace
#
# Text is inserted as it is, everything else as JSON. A brace that begins none of these stays, so JSON can be written
# without escapes. A field that the task does not have is an error: an agent must not get half a question.

_FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*)\}")


class TaskTemplateError(ValueError):
    """Raised when a template names a field that the task does not have."""


def fill(template: str, task: Any, names: Mapping[str, str]) -> str:
    """The template filled with the task's fields and the other `names`; raises `TaskTemplateError`."""

    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        return names[match[1]] if match[1] in names else _text(_find(template, match[1], task))

    return _FIELD.sub(value, template)


def to_json(value: Any) -> str:
    """A value in the form that agents get: one line of JSON, in readable text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value)


def _find(template: str, path: str, task: Any) -> Any:
    first, *rest = path.split(".")
    steps = rest if first == "input" else [first, *rest]
    value = task
    for step in steps:
        if isinstance(value, dict) and step in value:
            value = cast(dict[str, Any], value)[step]
        elif isinstance(value, list) and step.isdigit() and int(step) < len(cast(list[Any], value)):
            value = cast(list[Any], value)[int(step)]
        else:
            raise TaskTemplateError(f"{template!r} asks for {path!r}, which the task does not have: {_has(value)}")
    return value


def _has(value: Any) -> str:
    if isinstance(value, dict):
        return f"its fields are {', '.join(sorted(map(str, cast(dict[str, Any], value)))[:20]) or 'none'}"
    if isinstance(value, list):
        return f"there is a list of {len(cast(list[Any], value))}"
    return f"there is {to_json(value)[:60]}"


CALLABLES = "penstock.sidecar.run.agent.callables"
"""The program that runs functions."""
LARGEST_VARIABLE = 100_000
"""The most bytes of a task that go into a variable; Linux allows 128 KiB for one."""
OPENAI_URLS = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "HOSTED_VLLM_API_BASE")
BARE_URLS = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE", "GOOGLE_GEMINI_BASE_URL")
CA_FILES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "CODEX_CA_CERTIFICATE", "NODE_EXTRA_CA_CERTS")
"""Variables for clients that do not read SSL_CERT_FILE."""
UNREACHABLE_URL = "http://127.0.0.1:9/made-when-the-module-was-imported"
"""Base URL of a client that is made before there is an attempt: the discard port, where nothing answers."""
UNREACHABLE_URLS = dict.fromkeys((*OPENAI_URLS, *BARE_URLS), UNREACHABLE_URL)
REMOVED = frozenset(
    {
        "PENSTOCK_ADMIN_KEY",
        "PENSTOCK_READ_KEY",
        "PENSTOCK_AUDIT_KEY",
        "PENSTOCK_INPUT",
        "PENSTOCK_INPUT_FILE",
        *LOGINS,
        "CLAUDE_CODE_USE_BEDROCK",
        "CLAUDE_CODE_USE_VERTEX",
        "OPENAI_ORG_ID",
        "OPENAI_PROJECT_ID",
        *(
            f"OTEL_EXPORTER_OTLP_{signal}_{what}"
            for signal in ("TRACES", "LOGS", "METRICS")
            for what in ("ENDPOINT", "HEADERS", "PROTOCOL")
        ),
    }
)
"""Inherited variables that would lead past the gateway or that the agent must not see."""
PLACEHOLDER_CLAIM = Claim(
    rollout=Rollout(id="preflight"), attempt=Attempt(rollout="preflight", id="a1"), address="/preflight", token="none"
)
"""The claim that stands for an attempt before there is one."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The arguments, variables and stdin of an agent."""

    argv: tuple[str, ...]
    """Command and arguments."""
    own: dict[str, str]
    """The variables that the runner sets; the others are inherited."""
    task: str
    """The task as JSON."""
    file: Path | None
    """The file for a task that is too large for a variable; None when it is not."""
    stdin: bytes | None
    """The bytes on the agent's stdin; None closes stdin at once."""


def launch_plan(
    claim: Claim, url: str, agents: AgentSettings, file: Path, front: dict[str, str] | None = None
) -> LaunchPlan:
    """The plan of an attempt; raises `TaskTemplateError`. `url`: the gateway's. `file`: the place for a large task.
    `front`: variables that lead to the agent's own front, in place of base URLs.
    """
    task = to_json(claim.rollout.input)
    large = len(task.encode()) > LARGEST_VARIABLE
    names = _names(claim, url, task)
    expanded = tuple(fill(template, claim.rollout.input, names) for template in agents.args)
    own = variables(claim, url) if front is None else _without_urls(variables(claim, url)) | front
    own |= {"PENSTOCK_INPUT_FILE": str(file)} if large else {"PENSTOCK_INPUT": task}
    own |= {name: fill(value, claim.rollout.input, names) for name, value in agents.env}
    stdin = task.encode() + b"\n" if agents.stdin else None
    return LaunchPlan((*command(agents), *expanded), own, task, file if large else None, stdin)


def _without_urls(made: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in made.items() if name not in (*OPENAI_URLS, *BARE_URLS)}


def without_templates(agents: AgentSettings) -> AgentSettings:
    """The agents without the arguments made of a task; their variables keep templates as literal text."""
    env = tuple((name, value.replace("{", "{{").replace("}", "}}")) for name, value in agents.env)
    return replace(agents, args=(), env=env)


def command(agents: AgentSettings) -> tuple[str, ...]:
    """The command of all attempts, without the arguments made of a task."""
    python = "python" if agents.image else sys.executable
    return agents.command if agents.callable is None else (python, "-m", CALLABLES, agents.callable)


def _names(claim: Claim, url: str, task: str) -> dict[str, str]:
    base = url + claim.address
    return {
        "input": task,
        "rollout": claim.rollout.id,
        "attempt": claim.attempt.id,
        "openai_url": f"{base}/v1",
        "anthropic_url": base,
        "token": claim.token,
    }


def variables(claim: Claim, url: str) -> dict[str, str]:
    """The variables that lead every client to the rollout's own address."""
    base, rollout, attempt = url + claim.address, claim.rollout.id, claim.attempt.id
    return {
        **dict.fromkeys(OPENAI_URLS, f"{base}/v1"),
        **dict.fromkeys(BARE_URLS, base),
        **dict.fromkeys(KEYS, claim.token),
        "PENSTOCK_URL": base,
        "PENSTOCK_TOKEN": claim.token,
        "PENSTOCK_ROLLOUT_ID": rollout,
        "PENSTOCK_ATTEMPT_ID": attempt,
        "PENSTOCK_MODE": claim.rollout.mode,
        **_telemetry(base, claim),
    }


def _telemetry(base: str, claim: Claim) -> dict[str, str]:
    """OpenTelemetry's own variables: with them the agent's spans join the trace of its calls, and its logs go to the
    gateway.
    """
    rollout, attempt = claim.rollout.id, claim.attempt.id
    trace = trace_id(rollout, attempt)
    ids = f"penstock.rollout_id={rollout},penstock.attempt_id={attempt}"
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": base,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization={quote(f'Bearer {claim.token}')}",
        "OTEL_LOGS_EXPORTER": "otlp",
        # The gateway stores no metrics.
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_RESOURCE_ATTRIBUTES": ids,
        # The runner is the root: span 0 of the attempt, before the first call.
        "TRACEPARENT": f"00-{trace}-{span_id(trace, rollout, attempt, 0)}-01",
    }


def environment(inherited: Mapping[str, str], own: Mapping[str, str], key: str | None) -> dict[str, str]:
    """All variables of an agent on this machine. `key`: the gateway's admin key, which no variable may hold."""
    kept = _kept(inherited, key)
    made = {**HINTS, **kept, **own}
    if (before := kept.get("OTEL_RESOURCE_ATTRIBUTES")) and own["OTEL_RESOURCE_ATTRIBUTES"]:
        made["OTEL_RESOURCE_ATTRIBUTES"] = f"{before},{own['OTEL_RESOURCE_ATTRIBUTES']}"
    if "SSL_CERT_FILE" in made:
        made = dict.fromkeys(CA_FILES, made["SSL_CERT_FILE"]) | made
    return made | _past_proxies(made, urlsplit(own["PENSTOCK_URL"]).hostname or "")


def import_environment(inherited: Mapping[str, str], key: str | None) -> dict[str, str]:
    """All variables of a process that imports a module before there is an attempt: its clients lead nowhere."""
    return _kept(inherited, key) | UNREACHABLE_URLS | dict.fromkeys(KEYS, "none")


def _kept(inherited: Mapping[str, str], key: str | None) -> dict[str, str]:
    return {name: value for name, value in inherited.items() if name not in REMOVED and (not key or key != value)}


def _past_proxies(made: Mapping[str, str], host: str) -> dict[str, str]:
    """Variables that add the gateway's host to `NO_PROXY`, so that a proxy for other hosts is not used for it."""
    if not any(made.get(name) for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy")):
        return {}
    listed = ",".join(filter(None, (made.get("NO_PROXY") or made.get("no_proxy"), host)))
    return {"NO_PROXY": listed, "no_proxy": listed}
