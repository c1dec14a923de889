"""Kernels: policies of third parties, written in Python, that a rule asks (`verdict = "kernel"`). They run in threads.

A kernel is named `module:name`, which must be one of these; no package of Microsoft's is imported here:

    a function             takes a `KernelCall`; returns True or False, or (allowed, reason); it may be asynchronous
    `intercept_tool_call`  an `MCPGateway` of the Agent Governance Toolkit (`agent_os.mcp_gateway`)
    `evaluate`             a `PolicyEvaluator` of the same toolkit (`agent_os.policies`)

A kernel that fails denies the call.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, cast

from penstock.gateway.model.base import Mode
from penstock.gateway.model.toml import ConfigError

_log = logging.getLogger("penstock.mcp")
FAILED: Final = "it failed; the log of the gateway says why"


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


def load(rule: str, name: str) -> Kernel:
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


async def ask(kernel: Kernel, call: KernelCall, seconds: float) -> tuple[bool, str]:
    """Asks a kernel, on a thread. Denies the call if it fails or takes more than `seconds`."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(kernel, call), seconds)
    except TimeoutError:
        return False, f"it has not answered within {seconds:g} s (wait)"
    except Exception:
        # Third parties' code may raise anything: the call was not allowed.
        _log.exception("a kernel failed on a call of %s", call.tool)
        return False, FAILED
