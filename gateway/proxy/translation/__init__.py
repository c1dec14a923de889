"""Calls of agents that speak messages or responses, to an engine that speaks chat completions only.

`translator` is the door: `checking` refuses what chat completions cannot say, `asking_messages` and `asking_responses`
make the request, `pieces` reads the engine's answer, `telling_messages` and `telling_responses` tell it again in the
agent's own format, event by event, and `passing` is the way of the answer to the client. litellm knows the two formats
and is called by `library` only, which nothing imports but a gateway that translates.
"""
