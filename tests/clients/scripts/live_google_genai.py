"""Google's SDK in a live session: a question, a tool and its result."""

import asyncio
import os

from google import genai
from google.genai import types

client = genai.Client(http_options={"base_url": os.environ["BASE_URL"]})
config = {
    "response_modalities": ["TEXT"],
    "system_instruction": "Be brief.",
    "tools": [{"function_declarations": [{"name": "weather", "parameters": {"type": "OBJECT", "properties": {}}}]}],
}


async def talk() -> None:
    async with client.aio.live.connect(model="gemini-live", config=config) as session:
        await session.send_realtime_input(audio=types.Blob(data=b"\0\1" * 500, mime_type="audio/pcm;rate=16000"))
        await session.send_client_content(turns={"role": "user", "parts": [{"text": "Weather?"}]}, turn_complete=True)
        async for message in session.receive():
            if message.tool_call:
                (call,) = message.tool_call.function_calls
                result = types.FunctionResponse(id=call.id, name=call.name, response={"sky": "rain"})
                await session.send_tool_response(function_responses=[result])
            if message.text:
                print(message.text)


asyncio.run(talk())
