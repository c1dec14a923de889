"""A tool-calling agent on LangChain: `ChatOpenAI` with a bound tool, then a streamed summary.

OPENAI_BASE_URL and OPENAI_API_KEY say where the model is, as they always do.
"""

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


def ask(model: ChatOpenAI, messages: list[BaseMessage], question: str) -> str:
    """One question: run the tool as often as the model wants it, then return its words."""
    able = model.bind_tools([multiply])  # pyright: ignore[reportUnknownMemberType]
    messages.append(HumanMessage(question))
    while True:
        reply: AIMessage = able.invoke(messages)
        messages.append(reply)
        if not reply.tool_calls:
            return reply.text
        messages.extend(multiply.invoke(call) for call in reply.tool_calls)


def main() -> None:
    model = ChatOpenAI(model="gpt-5-mini")
    messages: list[BaseMessage] = [SystemMessage("You are good with numbers.")]
    print(ask(model, messages, "How much is 19 times 23?"))
    for chunk in model.stream([*messages, HumanMessage("Thank you, that is all.")]):
        print(chunk.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
