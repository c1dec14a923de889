"""A call that may pass: whose it is, what it asks for, and what was read of it so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from penstock.gateway.calls.address import Address
from penstock.gateway.calls.conversations import Found
from penstock.gateway.calls.fingerprints import Read, Story
from penstock.gateway.dialects import form
from penstock.gateway.dialects.base import Dialect
from penstock.gateway.dialects.family import Family
from penstock.gateway.dialects.loose_json import LONGEST_LABEL, Peek, is_readable
from penstock.gateway.upstreams.pool import Pool

_UNREAD: Final = "\0"
"""Stands for a model name that was not read yet; no model is called that."""


@dataclass(slots=True)
class Admitted:
    """A call that may pass."""

    address: Address
    dialect: Dialect
    path: str
    """Path and query below the address."""
    body: bytes
    """The request's; without its content encoding where it has one that can be undone."""
    wanted: Pool | None = None
    """The host that its agent has called, behind a sidecar."""
    token: bool = False
    """Whether it came with the agent token of its rollout."""
    key: str | None = None
    """Name of the key that it came with, where that is one for calls."""
    baggage: str = ""
    """Its `baggage` header."""
    packed: bytes | None = None
    """The request's as it came, where that had a content encoding."""
    families: tuple[Family, ...] = ()
    """Those that it may be of, once it is known where it goes."""
    routed: bool = False
    """Whether the settings send it along a route of its model, or a release does."""
    form: str = field(default="", init=False)
    """Its content type, where its body is a form: then that names its model."""
    waits: bool = field(default=False, init=False)
    """Whether it must be followed (`Joining.follow`) before its rollout, or what it asks for, is known."""
    encodings: str | None = field(default=None, init=False)
    """The content encodings that are not undone yet."""
    anonymous: bool = field(default=False, init=False)
    """Whether its conversation decides the rollout."""
    story: Story | None = field(default=None, init=False)
    """Its conversation, if that decides the rollout; None if something else does, or while it was not read."""
    previous: str | None = field(default=None, init=False)
    """The `previous_response_id` that it names."""
    found: Found = field(default_factory=Found, init=False)
    """What the conversation told."""
    asked: Peek | None = field(default=None, init=False)
    """What was already read of its body, so that nobody reads it again."""
    _model: str | None = field(default=_UNREAD, init=False)

    def is_read(self, read: Read) -> None:
        """Takes what was read of its conversation."""
        self.asked, self.story, self.previous = read.items.asked, read.story, read.items.previous

    @property
    def model(self) -> str | None:
        """The model that it asks for. Read once, by the first who needs it: routes, releases, or the recorder."""
        if self._model is _UNREAD:
            self.asked = self.asked or self._peek()
            self._model = self.dialect.model(self.body, self.path, self.asked)
        return self._model

    def _peek(self) -> Peek | None:
        return form.peek(self.body, self.form) if self.form else self.dialect.peek(self.body)

    @property
    def unclear(self) -> tuple[str, str] | None:
        """(field, what is wrong) where nobody can say which model it asks for although it must name one; None of any
        other call."""
        if self.model is not None or (self.dialect.unknown and not self.form):
            return None
        if self.asked is not None and self.asked.model is not None:
            return "model", f"a model is named once, by a string of at most {LONGEST_LABEL} characters"
        return None if self.form or is_readable(self.body) else ("body", "it is no JSON object")
