"""Translates calls of agents that speak messages or responses for an engine that speaks chat completions only.

`messages` and `responses` refuse requests that chat completions cannot express (with the checks in `chat_pieces`), make
the request, and write the answer in the agent's own format, event by event. `chat_pieces` reads the engine's answer,
and `framing` frames the agent's for the client. litellm knows the two formats; only `litellm` calls it, and only a
gateway that translates imports that module. Begin with `translator`.
"""
