"""Translates calls of agents that speak messages or responses for an engine that speaks chat completions only.

`checks` refuses requests that chat completions cannot express, `messages_request` and `responses_request` make the
request, `chat_pieces` reads the engine's answer, `messages_answer` and `responses_answer` write it in the agent's own
format, event by event, and `framing` frames it for the client. litellm knows the two formats; only `litellm` calls it,
and only a gateway that translates imports that module. The package may import what `proxy` may. Begin with
`translator`.
"""
