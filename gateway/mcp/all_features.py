"""The features of exchanges with servers, in the order in which they are asked, and in which they change answers."""

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
    """All there are: rules come first, and what a server says is held to what was approved before releases change
    it."""
    rules = shared.config.policy
    policing = [Policing(rules, definitions.annotations, questions, around)] if rules else []
    return *policing, HeldDefinitions(definitions, shared.metrics), ToolTexts(shared, definitions)
