"""A model for those who have no key: it can multiply, and answers as the system text asks it to.

It speaks OpenAI's chat completions, without streams, at http://127.0.0.1:8000/v1; `--port` names another port.
"""

import argparse
import json
import re
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def say(asked: dict[str, Any]) -> str:
    """The product, in a sentence or alone."""
    system, question = asked["messages"][0]["content"], asked["messages"][-1]["content"]
    found = re.search(r"(\d+) times (\d+)", question)
    if found is None:
        return "I can only multiply: ask me how much 19 times 23 is."
    product = int(found[1]) * int(found[2])
    return str(product) if "number alone" in system else f"{found[0]} is {product}."


def completion(asked: dict[str, Any]) -> dict[str, Any]:
    """The chat completion; a word is a token."""
    text = say(asked)
    read, written = len(json.dumps(asked).split()), len(text.split())
    message = {"role": "assistant", "content": text}
    return {
        "id": f"chatcmpl-{time.time_ns()}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": asked["model"],
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
    }


class Model(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        status, said = self.answer(self.rfile.read(int(self.headers["Content-Length"] or 0)))
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @staticmethod
    def answer(body: bytes) -> tuple[int, dict[str, Any]]:
        """The status and the body of the answer."""
        try:
            asked = json.loads(body)
            if not asked.get("stream"):
                return 200, completion(asked)
            wrong = "this model does not stream: leave `stream` out"
        except (ValueError, LookupError, TypeError, AttributeError):
            wrong = "this model wants a `model` and `messages` with texts as `content`"
        return 400, {"error": {"message": wrong, "type": "invalid_request_error"}}

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--port", type=int, default=8000)
    port = options.parse_args().port
    try:
        opened = ThreadingHTTPServer(("127.0.0.1", port), Model)
    except (OSError, OverflowError) as error:
        other = "choose another with --port, and name it in base_url of penstock.toml: http://127.0.0.1:PORT/v1"
        sys.exit(f"port {port} of 127.0.0.1 cannot be opened ({getattr(error, 'strerror', error)}):\n{other}")
    with opened as server:
        print(f"a model at http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")


if __name__ == "__main__":
    main()
