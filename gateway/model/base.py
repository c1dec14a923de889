"""The common base of all nouns: ids, modes, kinds of spans, the base class, and that of requests for a change."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, StringConstraints

ID_PATTERN = r"^[A-Za-z0-9._-]{1,128}$"


def _no_dots(value: str) -> str:
    if value in (".", ".."):
        raise ValueError("it may not be . or ..: no path could name it")
    return value


Id = Annotated[str, StringConstraints(pattern=ID_PATTERN), AfterValidator(_no_dots)]


LONGEST_S = 10 * 365 * 86400
"""Ten years, in seconds: longer than anything waits."""


Mode = Literal["train", "val", "test", "online"]


Origin = Literal["queued", "header", "implicit"]


SpanKind = Literal["llm", "tool", "mcp", "reward", "event", "otel"]


CALLS: tuple[SpanKind, ...] = ("llm", "tool", "mcp")
"""Kinds of spans that are calls: of a model, of a tool, and other requests to a server of tools."""
TOOLS: tuple[SpanKind, ...] = ("tool", "mcp")
"""Kinds of calls to a server of tools."""


class Noun(BaseModel):
    """Base of every noun: unknown fields are refused, so that a misspelt one is an error and not a silence.

    pydantic builds what checks it at first use: to build it for all of them takes a third of a command's start.
    """

    model_config = ConfigDict(extra="forbid", defer_build=True)


N = TypeVar("N", bound=BaseModel)


def parse_record(noun: type[N], record: bytes | None) -> N | None:
    """A noun from its record; None where there is none, or it is damaged: a damaged record must not stop others."""
    try:
        return None if record is None else noun.model_validate_json(record)
    except ValueError:
        return None


# A request that changes something may say who wants it and why. Both are the client's own claims. Only the name of
# the key that it came with is known for sure.

Role = Literal["read", "operate", "release", "admin"]
"""What a key may do at the control API: read; also operate the queue, upstreams and tools, and make agent tokens; also
register versions and decide on releases; everything, calls included. Each may do what those before it may."""
CALL: Final = "call"
"""The role of a key that opens calls, and nothing at the control API."""
ROLES: tuple[Role, ...] = get_args(Role)
NOBODY: Final = "api"
"""The `who` of a client that gives no name."""


GATEWAY = "gateway"
"""The `who` of decisions by the rules."""


def _person(name: str) -> str:
    if name == GATEWAY:
        raise ValueError(f"{GATEWAY!r} is what decides by the rules; give the name of a person or a program")
    return name


Person = Annotated[str, Field(max_length=200), AfterValidator(_person)]


class AuthenticatedRequest(Noun):
    """A change that is asked for, and the key that it came with. Only the gateway sets the key: it is no field."""

    _key: str = PrivateAttr(default="")

    @property
    def key(self) -> str:
        """Name of the key; empty where the gateway has none."""
        return self._key

    def set_key(self, key: str) -> None:
        self._key = key


class ActionRequest(AuthenticatedRequest):
    """The author and the reason of a change."""

    who: Person = ""
    """Who; `gateway` is what decides by the rules."""
    why: str = Field(default="", max_length=4000)
    """Why, in a sentence."""


EMPTY_ACTION: Final = ActionRequest()
"""A change without a person or a reason."""
