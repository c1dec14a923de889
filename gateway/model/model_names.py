"""Tells which names mean the same model, and which names a pattern covers. Pure.

Names that differ in a provider's prefix, a region, or the day of a snapshot mean the same model: `openai/gpt-5`,
`gpt-5-2025-08-07` and `gpt-5` are one, and so are `us.anthropic.claude-opus-4-5-20251101-v1:0` and
`anthropic/claude-opus-4.5`. Another version or another size is another model, so that a newer one never has an older
one's price.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_STATE: Final = re.compile(r"(?:[-@]20\d\d-?[01]\d-?[0-3]\d(?:-v\d+)?|-v\d+|@default|-00\d)(?::\d+)?$")
"""Matches the suffix of a model's name for one state of it: a day, or a number."""
_NEWEST: Final = "-latest"
_HOSTS: Final = re.compile(
    r"(?:[a-z0-9_.-]+/)*(?:openai|anthropic|google|gemini|vertex_ai|models|mistralai|mistral|deepseek|xai|x-ai|moonshotai|"
    r"moonshot|qwen|dashscope|cohere|amazon|bedrock|converse|azure|azure_ai|voyage|openrouter|foundation-model|"
    r"inference-profile|[a-z]{2}(?:-[a-z]+)+-\d)/"
)
_REGION: Final = re.compile(r"(?:us|eu|apac|global|jp|au|ca|sa|me|us-gov)\.")
_VENDOR: Final = re.compile(r"(?:anthropic|amazon|mistral|cohere|openai)\.(?=[a-z])")
_POINT: Final = re.compile(r"(?<=\d)\.(?=\d)")
_SIZE: Final = re.compile(r"(?:0-)?\d+[bmk](?![a-z0-9])")
_SEPARATORS: Final = "-_:@/"


def hyphened(name: str) -> str:
    """A name in lower case with hyphens in its version."""
    return _POINT.sub("-", name.lower())


def stem(name: str) -> str:
    """The hyphened name without the state of the model."""
    name = hyphened(name)
    while (cut := _STATE.sub("", name)) != name:
        name = cut
    cut = name.removesuffix(_NEWEST)
    # A `-latest` without a version is a different model every year.
    return cut if any(map(str.isdigit, cut)) else name


def lookup_names(name: str) -> Iterator[str]:
    """The names under which a model may be listed, the most specific first: its own name, without the state, without
    the server, without the region and the vendor."""
    name = name.strip().lower()
    if name.startswith("arn:"):
        name = name.rpartition("/")[2]
    elif name.startswith("ft:"):
        name = ":".join(name.split(":")[:2])
    known = dict.fromkeys((name, hyphened(name), stem(name)))
    for prefix in (_HOSTS, _REGION, _VENDOR):
        known |= dict.fromkeys(one[found.end() :] for one in list(known) if (found := prefix.match(one)))
    yield from known


class ModelPattern:
    """A name with `*` and `?`. Where the text before a `*` has a version in it, the `*` stands for states of that
    model, or after a separator for the rest of its name, but for no other version."""

    def __init__(self, text: str) -> None:
        # A bracket is a part of the name.
        pieces = [re.escape(piece).replace(r"\?", ".") for piece in hyphened(text).split("*")]
        self._find = re.compile("(.*?)".join(pieces), re.DOTALL)
        self._stars = len(pieces)

    def matches(self, name: str) -> bool:
        """True if a name, in lower case, is one of the model."""
        name = hyphened(name)
        found = self._find.fullmatch(name)
        stars = range(1, self._stars)
        return found is not None and all(_goes_on(name[: found.start(at)], found[at]) for at in stars)


def _goes_on(before: str, rest: str) -> bool:
    """True if the name with the rest is still the model that the text before it names."""
    named = before.rpartition("/")[2]
    if not rest or not any(map(str.isdigit, named)):
        return True
    separated = before[-1] in _SEPARATORS
    if stem(f"0{before[-1] if separated else ''}{rest}") == "0":
        return True
    return separated and (not rest[0].isdigit() or _SIZE.match(rest) is not None)
