"""The options with which commands state who wants a change, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.console.commands.resources import person
from penstock.gateway.client.console import validated_model

if TYPE_CHECKING:
    from penstock.gateway.model.base import ActionRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOptions:
    """Options of every command that changes something: the author and the reason of the change."""

    who: str | None = None
    """Who wants it; the name you are logged in with if not given."""
    why: str = ""
    """Why, in a sentence; `penstock audit` shows it."""

    def request(self) -> ActionRequest:
        """The options as the gateway takes them."""
        from penstock.gateway.model.base import ActionRequest

        return validated_model(ActionRequest, who=person(self.who), why=self.why)


ACTION_DEFAULTS = ActionOptions()
