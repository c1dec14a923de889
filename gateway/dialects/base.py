"""What a dialect is: one wire format, in one file, pure. Bytes in, values out.

A dialect owns its routes, says which model a request names, reads a recorded exchange into a `Turn`, draws the few
facts that a list shows out of it (`Facts`, cheap: it must not parse every event of a stream), fingerprints the
conversation so that clients that say nothing can be followed, and phrases the gateway's own errors in the API's shape.

A conversation is fingerprinted in two ways: message by message, from what was read of it (`conversation`, `reply`), and
item by item from the raw JSON (`items`, `source`, `replies`), which costs a call next to nothing where its items have
been seen before.

Nothing here raises on odd bytes: `read` puts what it could not understand into `Turn.problems`, `facts` leaves it None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.gateway.dialects.ending import Failed
from penstock.gateway.dialects.items import Items
from penstock.gateway.dialects.loose_json import Peek
from penstock.gateway.dialects.text_spans import Place, Texts
from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Turn


@dataclass(slots=True)
class Facts:
    """What a span's head takes from the bodies."""

    model: str | None = None
    model_served: str | None = None
    response_id: str | None = None
    finish: str | None = None
    usage: Usage | None = None
    tool_calls: int = 0
    choices: int = 0
    failed: Failed | None = None
    """Why it is no good answer although its HTTP status says so."""


class Dialect(Protocol):
    """One wire format."""

    name: str
    """As it stands in `Span.dialect`."""
    answers: bool
    """Whether its calls are answered by a conversation's next message. Counting tokens is not."""
    family: str
    """Whose error shape and base URL it shares: `openai`, `anthropic` or `gemini`."""

    def matches(self, method: str, path: str) -> bool:
        """True when a call of this method to this path (no query, below the rollout's address) is this dialect's."""
        ...

    def peek(self, request: bytes) -> Peek | None:
        """What `model` and `facts` need of a request's body: read once for both. None where that is nothing."""
        ...

    def model(self, request: bytes, path: str = "", asked: Peek | None = None) -> str | None:
        """The model a request names in its body or path; None if it names none or cannot be read. `asked`: what was
        read of the body already."""
        ...

    def facts(self, request: bytes, response: bytes, stream: bool, asked: Peek | None = None) -> Facts:
        """The head's facts from decoded bodies. Must be cheap: of a stream only first and last events are parsed.
        `asked`: what was read of the request already."""
        ...

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        """The whole exchange as a Turn, from decoded bodies."""
        ...

    def system_texts(self, request: bytes) -> Texts:
        """The system and developer texts of a request, in the order of the wire format. None of them if the body cannot
        be read."""
        ...

    def tool_texts(self, request: bytes) -> list[Place]:
        """The descriptions of the tools on offer. Their names and schemas are not texts."""
        ...

    def over(self, response: bytes) -> bool:
        """True when a stream has sent its last event: its client may leave without waiting for the end of the body, as
        the official SDKs do."""
        ...

    def conversation(self, request: bytes) -> list[bytes]:
        """One fingerprint source per message, oldest first, equal for equal messages whatever the JSON formatting
        or cache markers. Empty when the request holds no conversation."""
        ...

    def reply(self, response: bytes, stream: bool) -> bytes:
        """Fingerprint source of the assistant's answer, equal to the one `conversation` gives for the same message
        when the client sends it back; empty when there is none."""
        ...

    def items(self, request: bytes) -> Items:
        """The items of a request's conversation as raw JSON, and what a head needs of it. None of them where it holds
        no conversation or cannot be read."""
        ...

    def source(self, item: bytes) -> bytes:
        """Fingerprint source of an item, equal for equal ones whatever the JSON formatting or cache markers; empty for
        what clients drop and move, such as reasoning."""
        ...

    def replies(self, response: bytes, stream: bool) -> list[bytes]:
        """Fingerprint sources of the items of the answer, as `source` gives them when the client sends them back."""
        ...

    def response_id(self, response: bytes, stream: bool) -> str | None:
        """The id that a later request may name instead of sending the conversation. Must be cheap."""
        ...
