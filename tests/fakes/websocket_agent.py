"""An agent that has a conversation of two requests on a WebSocket, as a program for `python -c`; HOST stands
for a name with a port.

By asyncio: websockets' client with threads reads and writes one TLS connection at the same time, which Python 3.11 does
not protect. Of 400 openings one to seven never send their request, without any sidecar too.
"""

from __future__ import annotations

from typing import Final

WEBSOCKET_AGENT: Final = """
import asyncio, json
from websockets.asyncio.client import connect
async def talk():
    async with connect("wss://HOST/v1/responses", additional_headers={"Authorization": "Bearer sk-real"}) as connection:
        for said in ("Hello", "And now?"):
            await connection.send(json.dumps({"type": "response.create", "model": "gpt-5", "input": said}))
            while (message := json.loads(await connection.recv()))["type"] != "response.completed":
                pass
            print(message["response"]["output"][0]["content"][0]["text"])
asyncio.run(talk())
"""
