"""`penstock audit`: lists who changed what; and the options with which commands state who wants a change, and why."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.console.commands.resources import person
from penstock.console.commands.terminal import show
from penstock.gateway.client.console import LOCAL, Json, Limit, Url, limited_rows, validated_model, with_client

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.audit import ActionRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOptions:
    """Who wants a change, and why."""

    who: str | None = None
    """Who wants it; the name you are logged in with if not given."""
    why: str = ""
    """Why, in a sentence; `penstock audit` shows it."""

    def request(self) -> ActionRequest:
        """The options as the gateway takes them."""
        from penstock.gateway.model.audit import ActionRequest

        return validated_model(ActionRequest, who=person(self.who), why=self.why)


ACTION_DEFAULTS = ActionOptions()


def audit(*, limit: Limit = 50, json: Json = False, gateway: Url = LOCAL) -> None:
    """List who changed what, and why, newest first."""
    from penstock.console.views import audit

    async def ask(client: Client) -> None:
        rows = await limited_rows(limit, client.audit_log)
        show(rows, json, lambda: audit.entries(rows, time.time_ns()), "Nobody has changed anything yet.")

    with_client(gateway, ask)
