"""Calls of agents that speak messages or responses, to an engine that speaks chat completions only.

`translator` is the door: `checks` refuses what chat completions cannot say, `messages_request` and `responses_request`
make the request, `chat_pieces` reads the engine's answer, `messages_answer` and `responses_answer` tell it again in the
agent's own format, event by event, and `framing` is the way of the answer to the client. litellm knows the two formats
and is called by `litellm` only, which nothing imports but a gateway that translates.
"""
