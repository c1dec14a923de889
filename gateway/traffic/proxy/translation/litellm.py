"""Imports litellm, which knows the formats; nothing else does, and only when a gateway that translates starts.

Its release is pinned exactly: the functions used here are not its public interface, and two releases on PyPI (1.82.7
and 1.82.8) were malware. Only functions from JSON to JSON are used; nothing here uses a network. By itself litellm
would fetch a price list when it is imported, read a `.env` file, and write contents to the log: all three are turned
off.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from penstock.gateway.model.codes import install_hint
from penstock.gateway.model.toml import ConfigError

VERSION: Final = "1.106.2"
"""The release that this translation was written and tested with."""
_QUIET: Final = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION"}
_LOGGERS: Final = ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy")
_SILENT: Final = logging.CRITICAL + 1


@dataclass(frozen=True, slots=True)
class LiteLlmApi:
    """The functions and classes of litellm that are used. They have no types that could be relied on."""

    messages: Any
    """Requests and plain answers of messages: `LiteLLMAnthropicMessagesAdapter`."""
    names: Any
    """Function that maps the tool names which `messages` cuts to the full ones; names that are not cut are not in
    it."""
    events: Any
    """A stream of messages: `AnthropicStreamWrapper`."""
    responses: Any
    """Requests and plain answers of responses: `LiteLLMCompletionResponsesConfig`."""
    answer: Any
    """A plain answer of chat completions: `ModelResponse`."""
    chunk: Any
    """A chunk of a streamed answer: `ModelResponseStream`."""


def missing() -> str | None:
    """The reason why litellm cannot be used here; None if it can. Looks without importing it."""
    try:
        found = version("litellm")
    except PackageNotFoundError:
        return f"litellm is not installed: {install_hint('providers')}"
    if found != VERSION:
        return f"litellm {found} is installed and {VERSION} is needed: {install_hint('providers')}"
    return None


def load() -> LiteLlmApi:
    """Import litellm, which takes seconds. Raises `ConfigError` if it is not installed."""
    problem = missing()
    if problem is not None:
        raise ConfigError(problem)
    os.environ.update(_QUIET)
    litellm: Any = import_module("litellm")
    litellm.suppress_debug_info = True
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(_SILENT)
    adapters = "litellm.llms.anthropic.pass_through.adapters."
    messages, types = import_module(adapters + "transformation"), import_module("litellm.types.utils")
    return LiteLlmApi(
        messages.LiteLLMAnthropicMessagesAdapter(),
        messages.create_tool_name_mapping,
        import_module(adapters + "streaming_iterator").AnthropicStreamWrapper,
        import_module(
            "litellm.responses.litellm_completion_transformation.transformation"
        ).LiteLLMCompletionResponsesConfig,
        types.ModelResponse,
        types.ModelResponseStream,
    )
