"""An agent on the OpenAI Agents SDK: responses."""

from __future__ import annotations

import asyncio

from agents import Agent, Runner, function_tool


@function_tool
def look(name: str) -> str:
    """Look at something."""
    return f"{name} is there"


done = asyncio.run(Runner.run(Agent(name="Looker", instructions="Look.", model="gpt-5", tools=[look]), "Look at both."))
print(done.final_output)
