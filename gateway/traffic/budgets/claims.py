"""The claims of a call on its budgets: which of them count it, the most that it may use of each, and the refusal of a
call for which one has no room. Pure.

A token stands for at least one byte of text, so a prompt has no more tokens than its request has bytes; field names and
braces make up for the text that templates add. Images are counted apart, because their tokens do not follow from their
bytes, and so is content that a request only names: a file, a URL, an earlier response. An answer has as many tokens as
its request allows.

No call is free because it was not understood. A call counts as unread unless its format is known and its body could be
read, or it uses nothing: by its method, or by the form of its path (`FREE`). Each budget says what happens to an
unread call (`Budget.unread`).

A refusal (429) tells which budget, and when it frees, in `Retry-After` and in the headers of
draft-ietf-httpapi-ratelimit-headers-10. Clients are told when a retry is in vain: OpenAI's and Anthropic's SDKs heed
`x-should-retry`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from math import ceil, isfinite
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import msgspec

from penstock.gateway.model.prices import Price
from penstock.gateway.model.state import MONTH, TOTAL, Budget, BudgetScope
from penstock.gateway.tape.store.codec import common_prefix
from penstock.gateway.traffic.budgets.operations import MOST, BudgetClaim, BudgetShortfall, Limit, nanodollars
from penstock.gateway.traffic.calls.call_record import CallRecord
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.clouds import cloud_path
from penstock.gateway.wire.dialects.family import CHOICE, path_pattern
from penstock.gateway.wire.dialects.loose_json import (
    MOST_OBJECTS,
    RequestFields,
    arr,
    count,
    is_bulky,
    lenient,
    loads,
)
from penstock.gateway.wire.http.redaction import url as redact_url
from penstock.gateway.wire.http.request import ClientFault, Refusal


class CallBudgets(NamedTuple):
    """The budgets that count a call."""

    claims: Sequence[BudgetClaim]
    """A claim of 1 on each."""
    bounded: bool
    """True if one counts tokens, or what they cost."""
    priced: bool
    """True if one counts money."""


def budgets_of(
    limits: Iterable[Limit], model: str | None, key: str | None, agent: str | None, rollout: str, arm: str | None
) -> CallBudgets:
    """The budgets that count the calls for a model with this key, agent, rollout, and arms of releases."""
    owners: Mapping[BudgetScope, Sequence[str | None]] = {
        "all": ("",),
        "key": () if key is None else (key,),
        "agent": () if agent is None else (agent,),
        "rollout": (rollout,),
        "run": (None,),
        "arm": arm.split(",") if arm else (),
    }
    claims = [
        BudgetClaim(limit, of, 1)
        for limit in limits
        for of in owners[limit.budget.per]
        if (of is None or limit.is_for(of)) and limit.is_about(model)
    ]
    units = {claim.limit.budget.unit for claim in claims}
    return CallBudgets(claims, units != {"calls"}, "usd" in units)


def claims_of(
    ones: Iterable[BudgetClaim], asked: TokenBound, model: str | None, prices: Sequence[Price], body: bytes
) -> list[BudgetClaim]:
    """The claims of a call, made of claims of 1; raises `Refusal` if it has no price and a budget refuses that.
    `prices`: the prices that it may have; `body`: its request."""
    claims: list[BudgetClaim] = []
    for one in ones:
        budget = one.limit.budget
        if budget.unit == "calls":
            claims.append(one)
            continue
        if budget.unit == "tokens":
            amount = min(MOST, asked.prompt + asked.answer_tokens)
        elif prices:
            answer = min(MOST, asked.answer_tokens)
            told = b"" if asked.units else body  # in sound nothing is a mark
            most = max(price.most(asked.prompt, answer, told, asked.units) for price in prices)
            amount = min(MOST, nanodollars(most))
        elif budget.refuses_unknown:
            raise unpriced(budget, model)
        else:
            continue
        claims.append(BudgetClaim(one.limit, one.of, amount))
    return claims


def unread_claims(ones: Iterable[BudgetClaim], unread: UnreadCall) -> list[BudgetClaim]:
    """The claims of a call whose use cannot be counted, made of claims of 1; raises `Refusal` if a budget refuses
    that."""
    claims: list[BudgetClaim] = []
    for one in ones:
        budget = one.limit.budget
        if budget.refuses_unknown:
            raise uncountable(budget, unread)
        claims.append(one._replace(amount=int(budget.unit == "calls"), unread=True))
    return claims


def bound_of(prompts: PromptCounter, call: CallRequest, record: CallRecord) -> TokenBound:
    """Most tokens that the call may use."""
    if (most := call.dialect.most(record.plain, call.form) if call.dialect.media else None) is not None:
        return TokenBound(most.input_tokens or 0, most.output_tokens, 1, most.billed or {})
    conversation = (call.address.rollout, call.address.attempt)
    prompt = prompts.tokens(conversation, call.body)
    if record.body is not call.body and record.changed:
        prompt = max(prompt, prompts.tokens((*conversation, "sent"), record.plain))
    if call.peeked is None:
        call.peeked = call.dialect.request_fields(call.body)
    return bound(call.dialect, call.peeked, prompt)


def unread_of(call: CallRequest, record: CallRecord) -> UnreadCall | None:
    """The part of the call that is not understood, if it may use something; None if its request tells what it may
    use."""
    packed = False
    if call.encoded_body is None and (call.decision is None or call.decision.packed):
        for low, _, value in record.request.headers:
            packed |= low == b"content-encoding" and value != b"identity"
    if call.form and call.dialect.media:
        read = not packed and call.model is not None
        return None if read else unread_call(call.dialect, record.request.method, call.path)
    if call.peeked is None and call.dialect.uses_tokens and not packed:
        call.peeked = call.dialect.request_fields(call.body)
    if is_read(call.dialect, call.peeked, call.body, packed):
        return None
    return unread_call(call.dialect, record.request.method, call.path)


# -- the most that a call may use --------------------------------------------------------------------------------------

ADDED: Final = 1024
"""Tokens that a provider may add to any prompt, such as its instructions for tools."""
IMAGE: Final = 8192
"""Tokens of an image, or of content that is only named."""
ANSWER_TOKENS: Final = 8192
"""Tokens that are reserved for an answer to which its request sets no limit."""
_NAMES: Final = (
    "file_url", "file_id", "fileUri", "file_uri", "previous_response_id", "previous_interaction_id",
    "previous_message_id", "conversation", "cachedContent", "cached_content",
)  # fmt: skip
_APART = re.compile(
    rb'"(?=[dfiprctsUR/\\])(?=data:|file|iVB|ima|prev|R0l|conve|cached|type"|s3L|Ukl|/9j|\\/9j)'
    + rb'(?:((?:data:[^"]{0,80}base64,)?(?:iVBORw0KGgo|R0lGOD|UklGR|\\?/9j\\?/)[A-Za-z0-9+/=\\]{64,}+)'
    + rb'|(?:%b)"\s*:\s*"(?!data:)' % "|".join(_NAMES).encode()
    + rb'|image_url"\s*:\s*(?:\{\s*(?:"detail"\s*:\s*"\w*"\s*,\s*)?"url"\s*:\s*)?"(?!data:)'
    + rb'|type"\s*:\s*"url"|s3Location"\s*:\s*\{)'
)
"""Finds the content that is counted apart in one pass: images in base64, by the beginnings of PNG, GIF, WebP and JPEG
(the group), and names of content that the provider reads. Arguments of tools may have a `url` too. The lookahead on the
first characters makes it three times as fast."""
_LONG: Final = 16 << 10
"""Least bytes of a prompt that is kept."""
_KEPT: Final = 32 << 20
"""Most bytes of all kept prompts."""
_SHARES: Final = (0.5, 0.75, 0.95)
"""Parts of a prompt after which a mark is set, besides the one where it goes on from the prompt before: behind the
messages there may be many tools."""


class TokenBound(NamedTuple):
    """Most tokens that a call may use."""

    prompt: int
    answer: int | None
    """None if the request sets no limit."""
    answers: int = 1
    """Number of answers that it asks for."""
    units: Mapping[str, float] = MappingProxyType({})
    """Most seconds, characters and images of a call with media."""

    @property
    def answer_tokens(self) -> int:
        """Tokens of all its answers."""
        return self.answers * (ANSWER_TOKENS if self.answer is None else self.answer)


class _GenerationConfig(msgspec.Struct):
    """The generation config of Gemini and Bedrock."""

    maxOutputTokens: Any = None
    max_output_tokens: Any = None
    maxTokens: Any = None
    max_new_tokens: Any = None
    candidateCount: Any = None
    candidate_count: Any = None


_config = lenient(_GenerationConfig)
_UNLIMITED: Final = (None,) * 5
_ONE_ANSWER: Final = (None,) * 2


def bound(dialect: Dialect, asked: RequestFields, prompt: int) -> TokenBound:
    """The bound of a request. `asked`: the fields that were read of it; `prompt`: most tokens of its prompt."""
    if not dialect.generates:
        return TokenBound(prompt, 0)
    limits: tuple[Any, ...] = (
        asked.max_tokens, asked.max_completion_tokens, asked.max_output_tokens, asked.max_gen_len,
        asked.max_tokens_to_sample,
    )  # fmt: skip
    many: tuple[Any, ...] = (asked.n, asked.best_of)
    for raw in (asked.generationConfig, asked.generation_config, asked.inferenceConfig):
        if not raw:
            continue
        config = _config(bytes(raw))
        limits += config.maxOutputTokens, config.max_output_tokens, config.maxTokens, config.max_new_tokens
        many += config.candidateCount, config.candidate_count
    # Most requests set few of these.
    answer = None if limits == _UNLIMITED else _highest(limits)
    answers = 1 if many == _ONE_ANSWER else _highest(many) or 1
    return TokenBound(prompt, answer, answers * _prompts(asked.prompt) if asked.prompt else answers)


class Mark(NamedTuple):
    """A place in a prompt, with the content before it that is counted apart."""

    at: int
    apart: int
    images: int
    """Bytes of images."""

    @property
    def tokens(self) -> int:
        """Most tokens of a prompt that ends here."""
        return self.at - self.images + ADDED + self.apart * IMAGE


_START: Final = Mark(0, 0, 0)


class PromptCounter:
    """Counts prompts. It keeps some long ones, so that only the new part of a growing conversation is read."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[bytes, list[Mark]]] = {}
        """The last prompt of a conversation, and marks in it, the last one first."""
        self._bytes = 0

    def tokens(self, whose: Hashable, body: bytes) -> int:
        """Most tokens of a prompt; images and named content are guessed. `whose`: its conversation."""
        if len(body) < _LONG:
            found = _APART.findall(body)  # for each match, the bytes of its image
            if not found:
                return len(body) + ADDED
            return Mark(len(body), len(found), sum(map(len, found))).tokens
        before, known = self._kept.pop(whose, (b"", ()))
        self._bytes -= len(before)
        same = common_prefix(before, body)
        *marks, end = _marks(body, next((mark for mark in known if mark.at <= same), _START), same)
        if len(body) <= _KEPT:
            self._kept[whose] = body, marks[::-1]
            self._bytes += len(body)
        while self._bytes > _KEPT:
            oldest, _ = self._kept.pop(next(iter(self._kept)))
            self._bytes -= len(oldest)
        return end.tokens


def _marks(body: bytes, start: Mark, same: int) -> Iterator[Mark]:
    """Yield some places from `start` on, and the end. `same`: bytes that the prompt shares with the one before."""
    apart, images = start.apart, start.images
    looked = {same, *(int(len(body) * share) for share in _SHARES)}
    places = sorted(place for place in {_gap(body, at) for at in looked} if place > start.at)
    yield start

    def mark(at: int) -> Mark:
        return Mark(at, apart, images)

    for found in _APART.finditer(body, start.at):
        while places and places[0] <= found.start():
            yield mark(places.pop(0))
        while places and places[0] < found.end():
            del places[0]
        apart += 1
        images += len(found[1] or b"")
    yield from map(mark, [*places, len(body)])


def _gap(body: bytes, at: int) -> int:
    """The last place up to `at` that is certainly outside of content counted apart, whatever follows: no such content
    has a `}` or a dot."""
    return max(body.rfind(b"}", 0, at), body.rfind(b".", 0, at)) + 1


_LONGEST: Final = 40
"""Most characters of a string that is read as a number."""


def _highest(values: Iterable[Any]) -> int | None:
    most: int | None = None
    for value in values:
        if value is not None and (found := _whole(value)) is not None and (most is None or found > most):
            most = found
    return most


def _whole(value: Any) -> int | None:
    """A count, read as leniently as servers read it: 100.0, "100", " 1e2 " and 99.5 count, rounded up; None for
    others."""
    if isinstance(value, str) and len(value) <= _LONGEST:
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, float):
        value = ceil(value) if isfinite(value) else None
    return count(value)


def _prompts(raw: msgspec.Raw) -> int:
    """The number of prompts of a completion; each gets an answer."""
    found = arr(loads(bytes(raw))) if bytes(memoryview(raw)[:1]) == b"[" else []
    return len(found) if any(isinstance(one, str | list) for one in found) else 1


# -- calls that are not read -------------------------------------------------------------------------------------------

_ONLY_ASKS: Final = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
_OVERRIDES: Final = frozenset({b"x-http-method-override", b"x-http-method", b"x-method-override"})
"""Headers that name another method than the request's own; Google's servers and some proxies heed one."""


class FreePath(NamedTuple):
    """A form of path below which POST requests use nothing."""

    form: str
    """As in `family.OWNERS`, but that `[/v]` is one version of an API, or none, also below `/upload`. Paths of clouds
    are looked for without their prefixes (`clouds.cloud_path`)."""
    why: str


FREE: Final = (
    FreePath("[/v]/{messages/count_tokens,responses/input_tokens,tokenize,detokenize}", "counts tokens"),
    FreePath("[/v]/models/MODEL:{countTokens,computeTokens}", "counts tokens"),
    FreePath("[/v]/projects/PROJECT/locations/PLACE/.../MODEL:fetchPredictOperation", "fetches what was made"),
    FreePath("[/v]/projects/PROJECT/locations/PLACE/.../MODEL:{countTokens,computeTokens}", "counts tokens"),
    FreePath("[/v]/projects/PROJECT/locations/PLACE/.../count-tokens:rawPredict", "counts tokens"),
    FreePath("[/v]/{responses,interactions,batches,messages/batches}/NUMBER/cancel", "stops what runs"),
    FreePath("[/v]/projects/PROJECT/locations/PLACE/interactions/NUMBER/cancel", "stops what runs"),
    FreePath("[/v]/batches/NUMBER:cancel", "stops what runs"),
    FreePath("[/v]/conversations", "keeps state"),
    FreePath("[/v]/conversations/CONVERSATION", "keeps state"),
    FreePath("[/v]/conversations/CONVERSATION/items", "keeps state"),
    FreePath("[/v]/{files,uploads}", "keeps files"),
    FreePath("[/v]/uploads/UPLOAD/{parts,complete,cancel}", "keeps files"),
    FreePath("[/v]/{oauth,organization,organizations,environments}/...", "logs in, or changes settings"),
    FreePath("[/v]/{vaults,skills,memory_stores}/...", "changes settings"),
    FreePath("[/v]/agents", "changes settings"),
    FreePath("[/v]/agents/AGENT", "changes settings"),
    FreePath("[/v]/agents/AGENT/archive", "changes settings"),
    FreePath("/api/{hello,oauth,event_logging,claude_code,claude_cli}/...", "logs in, or changes settings"),
    FreePath("/v1internal:{onboardUser,loadCodeAssist,setCodeAssistGlobalUserSetting}", "logs in, or changes settings"),
    FreePath("/v1internal:{retrieveUserQuota,fetchAdminControls,listExperiments}", "reads settings"),
    FreePath("/v1internal:recordCodeAssistMetrics", "reports what happens"),
    FreePath("[/v]/{traces,logs,metrics,health,ping}", "reports what happens"),
)
"""Paths of POST requests that use nothing. Any path that is not certainly one of these may be a generation. Calls of a
format that is read are not looked for here."""
_SEGMENT: Final = r"(?!v[0-9]+(?:/|$))[A-Za-z0-9_~-][A-Za-z0-9._~-]*"
"""A segment of a path: an id or a name, but no version of an API, behind which anything may follow."""
_WORDS: Final = CHOICE | {
    "[/v]": r"(?:/upload)?(?:/v[0-9][a-z0-9]*)?",
    "/...": f"(?:/{_SEGMENT})*",
    "AGENT": r"agent_[A-Za-z0-9_-]+",
}
_FREE: Final = re.compile("|".join(path_pattern(row.form, _WORDS, _SEGMENT) for row in FREE))
_SHOWN: Final = 200
_PATH_NAMES: Final = re.compile(r"/(?:(?:model|deployments|engines)/([^/]+)/|models/([^/:]+):)")
"""A path that names a model, or a deployment: its server heeds no other name."""
_BODY_NAMES: Final = re.compile(
    r"/(?:(?:chat/)?completions|complete|messages|responses(?:/compact)?|embeddings|interactions|audio/[a-z]+|images/[a-z]+"
    r"|videos|moderations|rerank|score|pooling|classify|generate|invocations|fine_tuning/jobs|cachedContents)/*$"
)
"""Ends of paths with which `model` of the body is certainly the model that answers."""
_NOTHING: Final = RequestFields()


class UnreadCall(NamedTuple):
    """A call whose use cannot be counted."""

    what: str
    """The part that is not understood."""
    path: str


def uses_nothing(dialect: Dialect, method: str, path: str, headers: Iterable[tuple[bytes, bytes, bytes]] = ()) -> bool:
    """True if a call uses nothing, whatever its body says. `path`: with its query."""
    if dialect.uses_tokens or not dialect.unknown:
        return not dialect.uses_tokens
    if dialect.websocket:
        return False
    overridden = method in _ONLY_ASKS and any(low in _OVERRIDES for low, _, _ in headers)
    method, path = "POST" if overridden else method, path.partition("?")[0]
    return (method in _ONLY_ASKS or dialect.is_idle(path)) if dialect.tells_sessions else is_free(method, path)


def known_model(model: str | None, dialect: Dialect, path: str) -> str | None:
    """The model that a call is certainly for; None if that is unknown. `model`: the one that it names."""
    path = path.partition("?")[0]
    if not dialect.unknown or model is None:
        return model
    if (named := _PATH_NAMES.search(unquote(path))) is not None:
        return model if model in named.groups() else None
    return model if _BODY_NAMES.search(path) is not None else None


def is_read(dialect: Dialect, asked: RequestFields | None, body: bytes, packed: bool) -> bool:
    """True if a call that may use something tells what it may use. `asked`: the fields that were read of its body;
    `packed`: the body has a content encoding that cannot be undone."""
    if not dialect.uses_tokens or packed or (len(body) > MOST_OBJECTS and is_bulky(body)):
        return False
    if dialect.nested and dialect.unwrap(body, b"", False) is None:
        return False
    # A body of which fields were read is an object, and is not parsed again.
    return (asked is not None and asked != _NOTHING) or isinstance(loads(body), dict)


@lru_cache(maxsize=8192)
def is_free(method: str, path: str) -> bool:
    """True if a call of no known format uses nothing. Cached: paths repeat."""
    cloud = cloud_path(path)
    own = path if cloud is None or cloud.model is not None else cloud.path
    return method in _ONLY_ASKS or _FREE.fullmatch(own) is not None


def unread_call(dialect: Dialect, method: str, path: str) -> UnreadCall:
    """The description of a call that is not read."""
    what = f"the body of a request of format {dialect.name}" if dialect.uses_tokens else "the format of this path"
    return UnreadCall(f"{what} is not understood", f"{method} {redact_url(path.partition('?')[0][:_SHOWN])}")


# -- refusals ----------------------------------------------------------------------------------------------------------

KIND: Final = "budget"
"""The `error` of the span of a call for which a budget has no room."""
UNPRICED: Final = "budget_price"
"""The `error` of the span of a call whose model has no price."""
UNCOUNTABLE: Final = "budget_unread"
"""The `error` of the span of a call whose use cannot be counted."""
SOON_S: Final = 1
"""Seconds after which a client may retry if only running calls take the room."""
_PATIENCE_S: Final = 60
"""Seconds that SDKs wait at most by themselves."""
_UNITS: Final = {"calls": "requests", "tokens": "tokens", "usd": "usd-micros"}
"""Names of units in the headers; `requests` is the draft's own."""
_WINDOWS: Final = {TOTAL: "in all", MONTH: "in a month"}
_NEVER: Final = 10**12
_TOO_LARGE: Final = _NEVER + 1
"""Waits that never end: for a budget that is used up for good, and for a call larger than a whole budget."""
_MICROS: Final = 1000
"""Nanodollars in a microdollar."""


def budget_refusal(short: Sequence[BudgetShortfall], now: int, asked: TokenBound) -> Refusal:
    """The refusal of a call for which these budgets have no room. `asked`: the most that it may use."""
    worst = max(short, key=lambda one: _wait(one, now))
    wait = _wait(worst, now)
    told = [b", ".join(part(one, now) for one in short) for part in (_policy, _left)]
    headers = [(b"RateLimit-Policy", told[0]), (b"RateLimit", told[1])]
    if wait < _NEVER:
        headers.append((b"Retry-After", b"%d" % wait))
    if wait > _PATIENCE_S:
        headers.append((b"x-should-retry", b"false"))
    made = ClientFault(429, KIND, _message(worst, now, asked))
    made.headers = headers
    return made


UNIFIED: Final = b"anthropic-ratelimit-unified-"
PERIODS: Final = {"1d": "daily", "24h": "daily", "7d": "weekly", MONTH: "monthly"}
"""Claude Code's words for windows of budgets."""


def unified_headers(short: Sequence[BudgetShortfall], now: int) -> Sequence[tuple[bytes, bytes]]:
    """Headers for Anthropic's clients about a budget that is used up until its window ends; none where it may have room
    again at once, or never. With them Claude Code shows the refusal's message as it is."""
    worst = max(short, key=lambda one: _wait(one, now))
    if worst.window.ends_ns is None or not _PATIENCE_S < _wait(worst, now) < _NEVER:
        return ()
    budget, resets = worst.claim.limit.budget, b"%d" % (worst.window.ends_ns // 10**9)
    told = {
        b"status": b"rejected", b"reset": resets, b"overage-reset": resets, b"overage-utilization": b"1",
        b"overage-surpassed-threshold": b"1", b"overage-disabled-reason": b"org_spend_cap_reached",
    }  # fmt: skip
    told |= {b"overage-period": period.encode()} if (period := PERIODS.get(budget.window)) else {}
    told |= {} if budget.per == "key" else {b"overage-scope": b"group_pool"}
    return [(UNIFIED + part, value) for part, value in told.items()]


def standing_headers(found: Sequence[BudgetShortfall]) -> Sequence[tuple[bytes, bytes]]:
    """Headers for Anthropic's clients about budgets that have room: about the fullest of those whose windows end."""
    shares = {
        one.window.ends_ns: one.sum.used / one.claim.limit.most
        for one in sorted(found, key=lambda it: it.sum.used / it.claim.limit.most)
        if one.window.ends_ns is not None
    }
    if not shares:
        return ()
    ends, share = max(shares.items(), key=lambda item: item[1])
    passed = next((mark for mark in (0.95, 0.75) if share >= mark), None)
    status, resets = b"allowed" if passed is None else b"allowed_warning", b"%d" % (ends // 10**9)
    told = {
        b"status": status, b"representative-claim": b"overage", b"overage-status": status, b"reset": resets,
        b"overage-reset": resets, b"overage-utilization": b"%.2f" % min(share, 0.99),
    }  # fmt: skip
    told |= {} if passed is None else {b"overage-surpassed-threshold": b"%.2f" % passed}
    return [(UNIFIED + part, value) for part, value in told.items()]


def unpriced(budget: Budget, model: str | None) -> Refusal:
    """The refusal of a call whose cost is unknown."""
    what = f"model {model!r} has no price" if model else "this request names no model, so it has no price"
    message = (
        f"budget {budget.name!r} is in US dollars and {what}: the owner of this gateway can add one to the file that "
        '`prices` of penstock.toml names (`penstock prices --builtin`), or set unknown = "pass" for the budget'
    )
    return ClientFault(403, UNPRICED, message, "model")


def uncountable(budget: Budget, call: UnreadCall) -> Refusal:
    """The refusal of a call whose use cannot be counted. It is no 429, because a retry is always in vain."""
    message = (
        f"budget {budget.name!r} counts {budget.unit}, and {call.what}, so {call.path} cannot be counted. Use an API "
        f"that Penstock reads, or the owner of this gateway can set unknown of [[budget]] {budget.name!r}: "
        '"pass" lets such calls pass and counts what their answers tell'
    )
    made = ClientFault(403, UNCOUNTABLE, message)
    made.headers = [(b"x-should-retry", b"false")]
    return made


def _wait(short: BudgetShortfall, now: int) -> int:
    """Seconds until there may be room for the call; from `_NEVER` on, room does not come by itself."""
    most, needs = short.claim.limit.most, short.claim.amount
    if needs > most:
        return _TOO_LARGE
    if short.sum.used + needs <= most:
        return SOON_S
    return _NEVER if short.window.ends_ns is None else max(1, -(-(short.window.ends_ns - now) // 10**9))


def _message(short: BudgetShortfall, now: int, asked: TokenBound) -> str:
    claim, sum_, limit = short.claim, short.sum, short.claim.limit
    budget = limit.budget
    have = "all calls have" if budget.per == "all" else f"{budget.per} {claim.of!r} has"
    said = f"{have} used {_amount(limit, sum_.used)} of {_amount(limit, limit.most)} {_window(budget)}"
    if sum_.running:
        running = f"{sum_.running:,} calls that run" if sum_.running != 1 else "one call that runs"
        said += f", and {running} may use {_amount(limit, sum_.reserved)} more"
    if budget.unit != "calls":
        said += f"; this call may use up to {_amount(limit, claim.amount)} ({_tokens(budget, asked)})"
    return (
        f"budget {budget.name!r} has no room for this call{_when(short, now)}: {said}. {_way_out(short, now)}".strip()
    )


def _tokens(budget: Budget, asked: TokenBound) -> str:
    """The most that it may use, in tokens."""
    answer = f"{asked.answer_tokens:,} for the answer"
    if asked.answer is None:
        answer += ", to which it sets no limit (such as max_tokens)"
    return f"{asked.prompt:,} tokens for its prompt, {answer}"


def _when(short: BudgetShortfall, now: int) -> str:
    wait, ends = _wait(short, now), short.window.ends_ns
    if wait >= _NEVER:
        return ""
    if short.sum.used + short.claim.amount <= short.claim.limit.most or ends is None:
        return " until calls that run have ended"
    return f" until {datetime.fromtimestamp(ends // 10**9, UTC):%Y-%m-%d %H:%M:%S} UTC (in {wait:,} s)"


def _way_out(short: BudgetShortfall, now: int) -> str:
    wait, name = _wait(short, now), short.claim.limit.budget.name
    if wait == _TOO_LARGE:
        return f"That is more than the whole budget: ask for a shorter answer, or raise limit of [[budget]] {name!r}"
    if wait == _NEVER:
        return f"It does not free by itself: the owner of this gateway can raise limit of [[budget]] {name!r}"
    return ""


def _window(budget: Budget) -> str:
    return _WINDOWS.get(budget.window, f"in a window of {budget.window}")


def _amount(limit: Limit, counted: int) -> str:
    unit = limit.budget.unit
    if unit == "usd":
        return f"{limit.shown(counted):,.9f}".rstrip("0").rstrip(".") + " USD"
    return f"{counted:,} {unit if counted != 1 else unit[:-1]}"


def _policy(short: BudgetShortfall, now: int) -> bytes:
    """A quota policy item of the draft."""
    budget, window = short.claim.limit.budget, short.window
    unit = "" if budget.unit == "calls" else f';qu="{_UNITS[budget.unit]}"'
    length = "" if window.ends_ns is None else f";w={(window.ends_ns - window.since_ns) // 10**9}"
    return f'"{budget.name}";q={_integer(short, short.claim.limit.most)}{unit}{length}{_partition(short)}'.encode()


def _left(short: BudgetShortfall, now: int) -> bytes:
    """A service limit item of the draft."""
    left = max(0, short.claim.limit.most - short.sum.used - short.sum.reserved)
    wait = _wait(short, now)
    time = "" if wait >= _NEVER else f";t={wait}"
    return f'"{short.claim.limit.budget.name}";r={_integer(short, left)}{time}{_partition(short)}'.encode()


def _integer(short: BudgetShortfall, counted: int) -> int:
    return counted // _MICROS if short.claim.limit.budget.unit == "usd" else counted


def _partition(short: BudgetShortfall) -> str:
    """The owner as the partition key, a byte sequence of structured fields."""
    of = short.claim.of
    return f";pk=:{base64.b64encode(of.encode()).decode()}:" if of else ""
