"""An agent on LangChain's client of OpenAI."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def look(name: str) -> str:
    """Look at something."""
    return f"{name} is there"


model = ChatOpenAI(model="gpt-4o").bind_tools([look])  # pyright: ignore[reportUnknownMemberType]
said: list[Any] = [HumanMessage("Look at both.")]
for _ in range(3):
    answer = model.invoke(said)
    said.append(answer)
    for call in answer.tool_calls:
        said.append(ToolMessage(look.invoke(call["args"]), tool_call_id=call["id"]))
    print(answer.content)
