"""All features of exchanges with servers, in the order in which they plan an exchange and change its answers."""

from __future__ import annotations

from penstock.gateway.definitions.service import Definitions
from penstock.gateway.mcp.definitions import HeldDefinitions
from penstock.gateway.mcp.features import McpFeature
from penstock.gateway.mcp.policing import Around, Policing
from penstock.gateway.mcp.tool_texts import ToolTexts
from penstock.gateway.policy.questions import Questions
from penstock.gateway.proxy.shared import Shared


def all_features(
    shared: Shared, definitions: Definitions, questions: Questions, around: Around
) -> tuple[McpFeature, ...]:
    """All features. Policy rules come first; a server's lists are held to their approved versions before releases
    change them."""
    rules = shared.config.policy
    policing = [Policing(rules, definitions.annotations, questions, around)] if rules else []
    return *policing, HeldDefinitions(definitions, shared.metrics), ToolTexts(shared, definitions)
