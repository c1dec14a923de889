"""An agent on Pydantic AI."""

from __future__ import annotations

from pydantic_ai import Agent

agent = Agent("openai:gpt-5", instructions="Look.")


@agent.tool_plain
def look(name: str) -> str:
    """Look at something."""
    return f"{name} is there"


print(agent.run_sync("Look at both.").output)
