"""A recorded answer without its tokens. Pure, and free of numpy; odd bytes never raise."""

from __future__ import annotations

import msgspec

_TOKENS = ("prompt_token_ids", "token_ids", "logprobs")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_choices = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode


def strip_tokens(response: bytes) -> bytes:
    """A plain answer without ids and log-probabilities, which are most of it, so that a `Turn` can be read from it
    quickly. Any other body is returned as it is.
    """
    try:
        answer = _without_tokens(_fields(response))
        if "choices" in answer:
            choices = list(map(_without_tokens, _choices(answer["choices"])))
            answer["choices"] = msgspec.Raw(msgspec.json.encode(choices))
        return msgspec.json.encode(answer)
    except (ValueError, RecursionError):
        return response


def _without_tokens(fields: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    return {name: value for name, value in fields.items() if name not in _TOKENS}
