"""An agent on Google's SDK, which calls its tools itself."""

from __future__ import annotations

from google import genai
from google.genai import types


def look(name: str) -> str:
    """Look at something."""
    return f"{name} is there"


client = genai.Client()
config = types.GenerateContentConfig(tools=[look])
print(client.models.generate_content(model="gemini-2.5-flash", contents="Look at both.", config=config).text)
