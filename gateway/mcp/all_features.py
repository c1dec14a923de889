"""The features of exchanges with servers, in the order in which they are asked, and in which they change answers."""

from __future__ import annotations

from penstock.gateway.definitions.service import Definitions
from penstock.gateway.mcp.definitions import HeldDefinitions
from penstock.gateway.mcp.features import McpFeature
from penstock.gateway.mcp.tool_texts import ToolTexts
from penstock.gateway.proxy.shared import Shared


def all_features(shared: Shared, definitions: Definitions) -> tuple[McpFeature, ...]:
    """All there are: what a server says is held to what was approved before releases change it."""
    return HeldDefinitions(definitions, shared.metrics), ToolTexts(shared, definitions)
