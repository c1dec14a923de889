"""Interactions on Google's SDK, in each way that it has. Prints what it got as JSON."""

from __future__ import annotations

import json
import sys

from google import genai

client = genai.Client(api_key="AIzaKey", http_options={"base_url": sys.argv[1]})
interactions, model = client.interactions, "gemini-3-pro"
look = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}
got: list[object] = []

# A tool of the client's, streamed.
asked = interactions.create(
    model=model, input="Where is it?", system_instruction="Be brief.", tools=[look], stream=True,
    generation_config={"max_output_tokens": 500},
)  # fmt: skip
events = [event for event in asked]
got.append([event.event_type for event in events])
first = events[-1].interaction
answered = interactions.create(
    model=model, previous_interaction_id=first.id,
    input=[{"type": "function_result", "call_id": "call_1", "name": "look", "result": {"seen": True}}],
)  # fmt: skip
got.append(answered.output_text)
# An agent in the background.
work = interactions.create(agent="deep-research-pro-preview", input="Find out.", background=True)
states = [work.status]
while states[-1] == "in_progress":
    states.append(interactions.get(work.id).status)
got.append(states)
# One that is given up.
given_up = interactions.create(model=model, input="Work.", background=True)
got.append(interactions.cancel(given_up.id).status)
# An error.
try:
    interactions.create(model=model, input="x", previous_interaction_id="v1_unknown")
except Exception as error:
    got.append(type(error).__name__)
print(json.dumps(got))
