"""All features of exchanges with servers, in the order in which they plan an exchange and change its answers."""

from __future__ import annotations

from penstock.gateway.reading.policy.questions import QuestionQueue
from penstock.gateway.tools.definition_enforcement import DefinitionMiddleware, ToolTextMiddleware
from penstock.gateway.tools.definitions.service import DefinitionService
from penstock.gateway.tools.middleware import McpMiddleware
from penstock.gateway.tools.policy_enforcement import PolicyEnvironment, PolicyMiddleware
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext


def build_mcp_middleware(
    shared: ProxyContext, definitions: DefinitionService, questions: QuestionQueue, around: PolicyEnvironment
) -> tuple[McpMiddleware, ...]:
    """All features. Policy rules come first; a server's lists are held to their approved versions before releases
    change them."""
    rules = shared.config.policy
    policing = [PolicyMiddleware(rules, definitions.annotations, questions, around)] if rules else []
    return *policing, DefinitionMiddleware(definitions, shared.metrics), ToolTextMiddleware(shared, definitions)
