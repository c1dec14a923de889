"""An agent on the official OpenAI SDK that looks facts up: the model picks a tool, the agent calls it, the model says.

It knows nothing of any gateway or trainer: OPENAI_BASE_URL and OPENAI_API_KEY say where the model is. `reward` is the
judge of `penstock run --reward examples.lookup:reward`: did it find the right number?
"""

import json
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletionToolParam

MODEL = "policy"
TOPICS = ("population", "altitude", "founded", "bridges")
CITIES = (
    "Oslo", "Lima", "Cairo", "Quito", "Hanoi", "Accra", "Turin", "Perth", "Delhi", "Dakar",
    "Sofia", "Tunis", "Paris", "Tokyo", "Seoul", "Milan", "Porto", "Malmo", "Izmir", "Basra",
    "Kyoto", "Osaka", "Lagos", "Abuja", "Tampa", "Miami", "Dover", "Leeds", "Ghent", "Essen",
    "Kazan", "Minsk", "Vilna", "Split", "Sucre", "Cusco", "Macau", "Amman", "Doha", "Rabat",
)  # fmt: skip
QUESTIONS = {
    "population": "How many people live in {city}?",
    "altitude": "How high above the sea is {city}?",
    "founded": "In which year was {city} founded?",
    "bridges": "How many bridges does {city} have?",
}
TURNS = 3
"""Questions to the model, at most."""


def fact(topic: str, city: str) -> str:
    """What the world says; three digits."""
    return str(100 + (TOPICS.index(topic) * 211 + CITIES.index(city) * 97) % 900)


def tool(topic: str) -> ChatCompletionToolParam:
    """The tool that knows of a topic."""
    city: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": topic, "parameters": city}}


TOOLS = [tool(topic) for topic in TOPICS]


def look_up(name: str, arguments: str) -> str:
    """A tool's answer; what the model gets wrong is said to it."""
    try:
        city = json.loads(arguments)["city"]
    except (ValueError, KeyError, TypeError):
        return "unknown city"
    return fact(name, city) if name in TOPICS and city in CITIES else "unknown city"


def agent(task: dict[str, Any], client: OpenAI | None = None) -> dict[str, Any]:
    """One task: its question, asked and answered."""
    client = OpenAI() if client is None else client
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(TURNS):
        reply = (
            client.chat.completions.create(
                model=MODEL, messages=messages, tools=TOOLS, max_tokens=48, temperature=task.get("temperature", 1.0)
            )
            .choices[0]
            .message
        )
        if not reply.tool_calls:
            return {"answer": (reply.content or "").strip()}
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls:
            assert call.type == "function"
            content = look_up(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return {"answer": ""}


def reward(task: dict[str, Any], output: dict[str, Any]) -> float:
    """1 for the right number, else 0."""
    return float(output["answer"] == fact(task["topic"], task["city"]))


def tasks(temperature: float) -> list[dict[str, Any]]:
    """Every question about every city."""
    return [
        {"topic": topic, "city": city, "question": QUESTIONS[topic].format(city=city), "temperature": temperature}
        for topic in TOPICS
        for city in CITIES
    ]
