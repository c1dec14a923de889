"""Whose call is it, and may it pass? The first two steps in the life of a call; nothing here touches a socket.

An address in the path, the headers or the baggage comes first, then an agent token, then the conversation that the
request continues, or the connection it comes on.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote

import msgspec

from gateway.address import Address, AddressError, from_headers, from_path
from gateway.auth import Auth, AuthError
from gateway.dialects import find
from gateway.dialects.base import Dialect
from gateway.dialects.wire import Peek
from gateway.errors import ClientFault
from gateway.heads import CREDENTIALS
from gateway.implicit import Conversations, new_rollout
from gateway.redact import url as redact_url
from gateway.request import Request

_UNREAD: Final = "\0"
"""No model is called that."""


@dataclass(slots=True)
class Admitted:
    """A call that may pass."""

    address: Address
    dialect: Dialect
    path: str
    """Path and query below the address."""
    body: bytes
    messages: list[bytes]
    """The conversation's fingerprint sources; only of implicit calls."""
    token: bool = False
    """Whether it came with the agent token of its rollout."""
    asked: Peek | None = field(default=None, init=False)
    """What was read of its body on the way: nobody has to read that again."""
    _model: str | None = field(default=_UNREAD, init=False)

    @property
    def model(self) -> str | None:
        """The model that it asks for. Read once, by whoever asks first: routes, releases, or the recorder."""
        if self._model is _UNREAD:
            self.asked = self.asked or self.dialect.peek(self.body)
            self._model = self.dialect.model(self.body, self.path, self.asked)
        return self._model


class Admission:
    """Knows the keys and the conversations."""

    def __init__(self, auth: Auth, conversations: Conversations, token_required: bool) -> None:
        self._auth = auth
        self._conversations = conversations
        self._token_required = token_required

    def admit(self, request: Request, session: str | None) -> Admitted:
        """Finds the address; raises `ClientFault`. `session` is the implicit rollout that the connection has had."""
        target = request.target.decode("latin-1")
        _check_target(target)
        path, mark, query = target.partition("?")
        headers = {low: value for low, _, value in request.headers}
        try:
            address, below = from_path(path)
            address = address or from_headers(headers)
        except AddressError as error:
            raise ClientFault(400, "address", str(error), error.part) from None
        admitted = Admitted(_NOWHERE, find(request.method, below), below + mark + query, request.body(), [])
        if admitted.dialect.name == "opaque":
            _check_path(below)
        token = self._authorize(headers)
        if address is None:
            address = Address(token) if token is not None else self._follow(admitted, session)
        elif token is not None and token != address.rollout:
            message = f"the agent token is for another rollout than {address.rollout!r}"
            raise ClientFault(403, "token", message, "authorization")
        admitted.address, admitted.token = address, token is not None
        return admitted

    def _authorize(self, headers: Mapping[bytes, bytes]) -> str | None:
        """The rollout that a token names; None without one, if none is needed."""
        token = _agent_token(headers)
        try:
            if token is not None:
                return self._auth.rollout_of(token, time.time())
        except AuthError as error:
            raise ClientFault(401, "token", f"{error}; make a new one with `penstock token`", "authorization") from None
        if self._token_required and not self._auth.is_admin(_text(headers)):
            message = "an agent token is needed: `penstock token ROLLOUT` makes one, give it as the API key"
            raise ClientFault(401, "token", message, "authorization")
        return None

    def _follow(self, call: Admitted, session: str | None) -> Address:
        """The implicit rollout of a call that names none."""
        call.messages = call.dialect.conversation(call.body)
        previous = _previous_response(call.body) if call.dialect.name == "responses" else None
        if previous is not None:
            rollout = self._conversations.find_response(previous)
        else:
            rollout = self._conversations.find(call.messages)
        if rollout is None and not call.messages:
            rollout = session
        return Address(rollout or new_rollout(), origin="implicit")

    def remember(self, call: Admitted, response: bytes, stream: bool) -> None:
        """What a later request would continue."""
        if call.messages:
            reply = call.dialect.reply(response, stream)
            self._conversations.remember(call.messages, reply, call.address.rollout)
        if call.dialect.name == "responses":
            found = call.dialect.facts(b"", response, stream).response_id
            if found:
                self._conversations.remember_response(found, call.address.rollout)


_NOWHERE = Address("nowhere")


def _check_target(target: str) -> None:
    if not target.startswith("/"):
        shown = redact_url(target[:80])
        raise ClientFault(400, "target", f"the request target {shown!r} must be a path, starting with /", "target")
    if "/." in target or "%2" in target:
        path = target.partition("?")[0].lower().replace("%2e", ".").replace("%2f", "/")
        if {".", ".."} & set(path.split("/")):
            raise ClientFault(400, "target", "the path may not hold the segments . and ..", "target")


_OPERATION = re.compile(
    r"/+((inference/)?v1/)?(load_lora_adapter|unload_lora_adapter|adapters|pause|resume|sleep|wake_up|abort_requests|"
    r"collective_rpc|init_weight_transfer_engine|start_weight_update|update_weights|finish_weight_update|"
    r"update_weight_version|weight_checker|release_kv_cache_memory|reset_[a-z]+_cache|scale_elastic_ep)(/.*)?"
)
"""What operates a vLLM server: some of it asks for no key, and for the rest the gateway would give its own."""


def _check_path(path: str) -> None:
    """An agent may ask a model, not change the server that all ask."""
    if _OPERATION.fullmatch(unquote(path)):
        message = f"the path {redact_url(path[:80])!r} operates the model server; agents may not do that"
        raise ClientFault(403, "path", message, "path")


def _agent_token(headers: Mapping[bytes, bytes]) -> str | None:
    for name in CREDENTIALS:
        value = headers.get(name)
        if value is not None and b"pst_" in value:
            return value[value.index(b"pst_") :].decode("latin-1").strip()
    return None


def _text(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}


class _Previous(msgspec.Struct):
    previous_response_id: str | None = None


_previous = msgspec.json.Decoder(_Previous)


def _previous_response(body: bytes) -> str | None:
    try:
        return _previous.decode(body).previous_response_id
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
