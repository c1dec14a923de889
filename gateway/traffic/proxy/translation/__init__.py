"""Translates calls of agents that speak messages or responses for an engine that speaks chat completions only.

`messages` and `responses` refuse requests that chat completions cannot express, make the request, and write the answer
in the agent's own format, event by event. `framing` has the checks of requests, reads the engine's answer, and frames
the agent's for the client. litellm knows the two formats; only `litellm` calls it, and only a gateway that translates
imports that module. Begin with `translator`.
"""
