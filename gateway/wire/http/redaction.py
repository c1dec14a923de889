"""Keeps secrets off the tape: in headers, URLs and attributes a value that carries a credential becomes `***`.

By shape, because a key may have any name: `sk-...`, `Bearer ...`, a JWT, an agent token, a password in a URL. And by
name, because a key's value looks like anything:

* Headers and parameters of a URL are made for credentials. Such a name is secret when one of its words is, however the
  words are put together (`x-api-key`, `access_token`, `clientSecret`, `auth[key]`); words that only count tokens
  (`x-ratelimit-remaining-tokens`) or identify a request or a session (`idempotency-key`, `x-session-id`) are not.
* Attributes of spans, logs and events are data. Such a name is secret only when it ends in the name of a credential
  (`db.password`, `openai.api_key`); `messaging.kafka.message.key`, `prompt_token_ids` and `eos_token` stay.

In a URL, a list of pairs (`baggage`) or JSON, the members are looked at one by one, also those of a URL inside another,
which may be percent-encoded.

Results for header lines are cached: a call has forty and most are always the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, Literal, cast
from urllib.parse import unquote

from penstock.gateway.model import span
from penstock.gateway.model.known_secrets import NO_SECRETS, Secrets, fingerprint, may_be_secret, presented_secrets
from penstock.gateway.wire.dialects.family import INSECURE, SUBPROTOCOL

MASK: Final = b"***"
_MASK: Final = MASK.decode()

_SECRET: Final = re.compile(
    r"(^|[^a-z0-9])([a-z]*authorization|authentication|authz?|cookie2?|[a-z]*token|[a-z]*secret|[a-z]*password|passwd"
    r"|pass(?!-?through)|passphrase|passcode|pwd|pw|otp|totp|mfa|2-?fa|credentials?|creds?|signature|sig|hmac|jwt|jws"
    r"|bearer|csrf|xsrf|assertion|samlresponse|portkey-config|phpsessid|jsessionid|byok|x-pin|x-sign|x-ticket"
    r"|(api|access|private|secret)-?keys"
    r"|(x?api|x|ai|user|admin|session|access|auth|private|secret|shared|account|subscription|master|encryption|signing)?key"
    r"|(session|sess|sid)(?=]*$))($|[^a-z0-9])"
)
_CREDENTIAL: Final = re.compile(
    r"(.*-)?([a-z]*authorization(-code)?|cookie2?|cookies|[a-z]*password|passwd|pwd|passphrase|passcode|[a-z]*secret|credentials?|creds|jwt|t?otp|client-assertion|saml-?response"
    r"|((api|access|auth|private|secret|signing|encryption|master|account|subscription|virtual|ssh)-?keys?)"
    r"|((api|access|auth|refresh|id|session|security|bearer|csrf|xsrf|bot|deploy|device|github|gitlab|oauth|hf)-?token)"
    r"|((access|auth|refresh|bearer|csrf|oauth)-?tokens))(-value)?"
)
"""Matches the last part of an attribute's name, with hyphens between its words."""
_SETTINGS: Final = re.compile(r"(.*-)?(connection-?string|dsn)")
"""Matches the last part of the name of an attribute whose value names credentials itself: `Server=h;Password=p`."""
_TOKEN: Final = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9._~+/=-]{16,}")
"""Matches the value of an attribute that is only named `token`, if that is a credential and no token of a text."""
_VARIABLE: Final = re.compile(
    r"(?<![A-Za-z0-9_])([A-Z][A-Z0-9_]{2,64})=([\"']?)(?=[A-Za-z_.~+/=-]{0,99}[0-9])(?=[0-9_.~+/=-]{0,99}[A-Za-z])[A-Za-z0-9_.~+/=-]{8,}"
)
"""Matches a variable of an environment and its value in a text, if that is no word: `OPENAI_API_KEY=abc123def`."""
_OPTION: Final = re.compile(r"--?(?!no-)([A-Za-z][A-Za-z0-9_.-]{0,64})")
_GIVEN: Final = re.compile(r"((?:--?)?([A-Za-z][A-Za-z0-9_.-]{0,64})=)(.+)", re.DOTALL)
"""Match an element of a list: an option, whose value follows as the next one, and a name with its value."""
_TEXT_MEMBER: Final = re.compile(r'("([^"\\]{1,64})"\s{0,9}:\s{0,9}")((?:[^"\\]|\\.)+)')
"""Matches a name and its text in JSON, but not in a text that stands in it."""
_HEADERS: Final = re.compile(r"(?:http|rpc(?:\.[a-z_]+)?)\.(?:request|response)\.(?:header|metadata)\.(.+)", re.DOTALL)
"""Matches the name of an attribute that holds a header; the group is the header's name."""
_NOT_WORDS: Final = re.compile(r"[^a-z0-9]+")
_COUNTING: Final = re.compile(r"token-?[_.]?(count|type|usage|limit|budget)")
"""`llm.token_count.prompt`, `gen_ai.token.type`."""
_SPACE: Final = re.compile(r"\s")
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_HARMLESS: Final = frozenset(
    {"idempotency-key", "x-idempotency-key", "sec-websocket-key", "prompt-cache-key", "www-authenticate"}
)
_SESSIONS: Final = frozenset({b"mcp-session-id"})
"""Headers whose value opens a session. They are kept as fingerprints, which still tell which calls belong together."""
_PARAMETERS: Final = frozenset({"code", "authcode", "ticket", "pin", "sign", "sessionid", "session_id", "session-id"})
"""Names that are secret only in a query: results of OAuth or CAS servers, signatures, and the path that an MCP server
names for the messages of one client (MCP over HTTP with SSE)."""

_ENDS: Final = r"%(?:25)*(?:3[fF]|26|23|3[bB])"
"""`?`, `&`, `#` and `;`, percent-encoded any number of times."""
_EQUALS: Final = r"%(?:25)*3[dD]"
_PAIR: Final = re.compile(
    rf"(?:^|[?&;#,\s]|{_ENDS})(?P<name>(?:(?!{_ENDS}|{_EQUALS})[^=&;?#,\s])+)\s*(?P<equals>=|{_EQUALS})"
)
_PAIRS: Final = re.compile(rf"(?:[?&;#]|{_ENDS})")
_MEMBER: Final = re.compile(r'(\\{0,3}"([^"\\]+)\\{0,3}"\s{0,9}:\s{0,9}\\{0,3}")((?:[^"\\]|\\[^"])+)')
_STATED: Final = re.compile(r"(?<![A-Za-z0-9_.-])(?P<name>[A-Za-z0-9_.-]+)[\"']?\s{0,9}[=:]\s{0,9}(?P<quote>[\"']?)")
_STATED_ENDS: Final = {"": re.compile(r"[^\s,;&]*"), '"': re.compile(r'[^"]*'), "'": re.compile(r"[^']*")}
"""The rest of a value that follows a name (`password='a b'`), by its quotes."""
_USER: Final = re.compile(
    r"(?i)(\b[a-z][a-z0-9+.-]{0,20}(?::|%(?:25)*3a)(?:/|%(?:25)*2f){2})(?:(?!%(?:25)*2f)[^/?#\s])*(?:@|%(?:25)*40)"
)
_PASSWORD: Final = re.compile(r"(?i)(\b[a-z][a-z0-9+.-]{0,20}://[^/?#\s:@\"'<>]{0,256}:)[^/?#\s@\"'<>]{1,256}@")
"""Matches user and password of a URL that stands in a text."""
_ESCAPED: Final = r"(?<=%[0-9A-Fa-f][0-9A-Fa-f])|(?<=%25[0-9A-Fa-f][0-9A-Fa-f])"
_START: Final = rf"(?:(?<![A-Za-z0-9])|{_ESCAPED})"
_APART: Final = rf"(?:(?<![A-Za-z0-9_-])|{_ESCAPED})"
_PREFIXES: Final = (
    "sk-", "sk_", "rk_", "rk-", "pk-", "pk_", "gsk_", "csk-", "xai-", "pplx-", "nvapi-", "hf_", "r8_", "npm_",
    "pypi-AgE", "glpat-", "glsa_", "dop_v1_", "gho_", "ghp_", "ghs_", "ghu_", "ghr_", "github_pat_", "dckr_pat_",
    "xapp-", "whsec_", "tvly-", "fw_", "tgp_v1_", "lsv2_", "hvs.", "shpat_", "shpss_", "sntrys_", "sntryu_",
    "esecret_", "figd_", "ek_",
)  # fmt: skip
"""Prefixes of providers' keys."""
_PLAIN_PREFIXES: Final = ("jina_", "rpa_", "ntn_", "sbp_", "lin_api_", "dapi")
"""Prefixes of keys that are longer and of letters and digits only: other names may begin with such a prefix."""
_SHAPES: Final = re.compile(
    rf"pst_[A-Za-z0-9._~-]+|(?<={re.escape(INSECURE.decode())})[A-Za-z0-9._~+/=-]+"
    rf"|{_START}(?:{'|'.join(map(re.escape, _PREFIXES))}|xox[a-z]-)[A-Za-z0-9_.~-]{{12,}}"
    rf"|{_START}(?:{'|'.join(_PLAIN_PREFIXES)})[A-Za-z0-9]{{30,}}"
    rf"|{_START}SG\.[A-Za-z0-9_-]{{16,}}\.[A-Za-z0-9_-]{{16,}}|{_START}AQ\.[A-Za-z0-9_-]{{30,}}"
    rf"|{_START}ABSK[A-Za-z0-9+/]{{40,}}=*"
    rf"|AIza[A-Za-z0-9_-]{{20,}}|{_START}(?:AKIA|ASIA)[A-Z0-9]{{12,}}|{_START}ya29\.[A-Za-z0-9_-]{{10,}}"
    rf"|{_APART}eyJ[A-Za-z0-9_-]{{8,}}\.[A-Za-z0-9_.-]+|-----BEGIN[^-]*PRIVATE KEY(?s:.*?)"
    r"(?:-----END[^-]*PRIVATE KEY-----|\Z)"
    r"|(?i:(?<![a-z])basic(?:\s|%(?:25)*20|\+)+)(?=[a-z]*[A-Z0-9=])[A-Za-z0-9+/=%_-]{6,}"
    r"|(?i:(?<![a-z])(?:token|api-?key)(?:\s|%(?:25)*20|\+)+)(?=[A-Za-z._~+/=-]*[0-9])[A-Za-z0-9._~+/=-]{16,}"
    r"|(?i:(?<![a-z])bearer(?:\s|:|%(?:25)*20|\+)+)"
    r"(?!(?:realm|error|scope|charset|authorization_uri|resource_metadata)=)[^\s,;&\"'<>]{3,}"
)
_HINT: Final = re.compile(
    "|".join(re.escape(prefix.lower()) for prefix in (*_PREFIXES, *_PLAIN_PREFIXES))
    + '|pst_|xox|aiza|akia|asia|ya29|eyj|sg[.]|aq[.]|absk|private key|bearer|basic|token|api-?key|"|@|%|[?]|#|&'
)
"""Cheap test on a text in lower case before the patterns above are tried. Nearly all of it is literal, which is fast.
"""
_HINT_BYTES: Final = re.compile(_HINT.pattern.encode())
# Strangers write these headers: no pattern above may take more than linear time.
_LONGEST: Final = 512
_REMEMBERED: Final = 8192


class _HeaderLines(dict[bytes, bytes]):
    """`name: value CRLF` lines with secrets masked, by header line as it came; a missing one is composed, and kept if
    it is short."""

    def __init__(self, personal: frozenset[str] = frozenset()) -> None:
        """`personal`: members of `baggage` whose values are masked."""
        super().__init__()
        self.personal = personal

    def __missing__(self, came: bytes) -> bytes:
        name, _, value = came.partition(b":")
        value = value.lstrip(b" \t")
        if is_secret(name):
            return b"%b: %b\r\n" % (name, MASK)
        if self.personal and name.lower() == b"baggage":
            value = span.masked(value.decode("latin-1"), self.personal, _MASK).encode("latin-1")
        line = b"%b: %b\r\n" % (name, _masked(name, value))
        if len(came) <= _LONGEST >= len(line):
            if len(self) >= _REMEMBERED:
                self.clear()
            self[came] = line
        return line


class Redactor:
    """Composes header blocks without secrets."""

    __slots__ = ("_lines", "media", "own", "tape")

    def __init__(self, own: Secrets = NO_SECRETS, tape: Secrets | None = None, media: bool = True) -> None:
        """`own`: the gateway's own keys; `tape`: the values that the tape may not have, if these are more; `media`:
        True if the tape may have the bytes of media."""
        self.own, self.media = own, media
        self.tape = own if tape is None else tape
        self._lines = _HeaderLines()

    def hide_baggage(self, names: frozenset[str]) -> None:
        """Masks the values of these members of `baggage` from now on: they name people."""
        if names != self._lines.personal:
            # Another thread that still composes a line by the former names keeps it in the former dict.
            self._lines = _HeaderLines(names)

    def block(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """`name: value CRLF` lines with secrets masked."""
        return b"".join([self._lines[b"%b: %b" % header] for header in headers])

    def head_block(self, head: bytes) -> bytes:
        """The same of the header lines of a valid head, from its first line to the empty line."""
        return b"".join(map(self._lines.__getitem__, head.split(b"\r\n")[1:-2]))

    def secrets(self, headers: Iterable[tuple[bytes, bytes, bytes]], path: str) -> Secrets:
        """The gateway's own keys and those that a request presents. `headers`: (name in lower case, name, value);
        `path`: with the query."""
        values: tuple[tuple[bytes, bytes], ...] = ()
        for low, _, value in headers:
            if is_secret(low):
                values += ((low, value),)
            elif low == SUBPROTOCOL and INSECURE in value:
                values += ((low, value.partition(INSECURE)[2].partition(b",")[0]),)
        return _together(self.tape, values, path if "=" in path or "%" in path else "")


@lru_cache(512)
def _together(own: Secrets, headers: tuple[tuple[bytes, bytes], ...], path: str) -> Secrets:
    """Cached, because an agent presents the same keys with all of its calls."""
    found = {key for name, value in headers for key in presented_secrets(name, value)}
    found |= {key for value in parameters(path) if may_be_secret(key := value.encode())}
    return own if found <= own.values else own.with_values(found)


@lru_cache(4096)
def is_secret(name: bytes | str) -> bool:
    """True when a header, a parameter or an attribute of this name carries a credential."""
    text = name.decode("latin-1") if isinstance(name, bytes) else name
    low = _CAMEL.sub("-", text).lower()
    if low in _HARMLESS or text.lower() in _HARMLESS:
        return False
    return _SECRET.search(_COUNTING.sub("", low.replace("_", "-"))) is not None


def looks_secret(value: str) -> bool:
    """True when something in a value has the shape of a secret."""
    return _HINT.search(value.lower()) is not None and _SHAPES.search(value) is not None


def url(text: str) -> str:
    """A URL or path with secret query parameters, user info and what looks like a secret masked."""
    return _url(text) if len(text) <= _LONGEST else _mask_url(text)


def _mask_url(text: str) -> str:
    text = _USER.sub(rf"\1{_MASK}@", text)
    start = _PAIRS.search(text)
    if start is not None:
        text = text[: start.start()] + _mask_pairs(text[start.start() :], "&#>")
    return _SHAPES.sub(_MASK, text)


_url = lru_cache(4096)(_mask_url)


def parameters(path: str) -> list[str]:
    """The decoded values of the secret parameters of a path."""
    return [_decoded(path[found.end() : _end(path, found, "&#>")]) for found in _PAIR.finditer(path) if _hides(found)]


def attributes(found: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a span or an event with the secrets in their texts masked: by shape, in URLs, and by the names of
    credentials."""
    return {name: _attribute(name, value) for name, value in found.items()}


def _attribute(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return _MASK if value and _is_credential(name, value) else _said(value, _attribute_kind(name) == "settings")
    if isinstance(value, dict):
        members = cast(dict[str, Any], value)
        whole = _attribute_kind(name) == "secret"
        return {own: _attribute(name if whole else own, item) for own, item in members.items()}
    return _elements(name, cast(list[Any], value)) if isinstance(value, list) else value


def _elements(name: str, items: list[Any]) -> list[Any]:
    """Elements of a list, which may be the arguments of a command or an environment."""
    made, option = list[Any](), ""
    for item in items:
        if not isinstance(item, str):
            made.append(_attribute(name, item))
        elif option and not item.startswith("-") and _is_credential(option, item):
            made.append(_MASK)
        elif (given := _GIVEN.fullmatch(item)) and _is_credential(given[2], given[3]):
            made.append(given[1] + _MASK)
        else:
            made.append(_attribute(name, item))
        found = _OPTION.fullmatch(item) if isinstance(item, str) else None
        option = found[1] if found else ""
    return made


def _is_credential(name: str, value: str) -> bool:
    kind = _attribute_kind(name)
    return kind == "secret" or (kind == "token" and _TOKEN.fullmatch(value) is not None)


@lru_cache(4096)
def _attribute_kind(name: str) -> Literal["secret", "token", "settings", "data"]:
    """`token`: the value tells whether it is a credential or a token of a text; `settings`: parts of it may be."""
    if header := _HEADERS.fullmatch(name):
        return "secret" if is_secret(header[1]) else "data"
    words = _NOT_WORDS.sub("-", _CAMEL.sub("-", name.rpartition(".")[2]).lower()).strip("-")
    if _CREDENTIAL.fullmatch(words):
        return "secret"
    return "token" if words == "token" else "settings" if _SETTINGS.fullmatch(words) else "data"


def _said(value: str, settings: bool = False) -> str:
    """A text that may be a URL, with secrets masked: by shape, and in a URL also by name. `settings`: secret names may
    stand in it with their values."""
    value = _mask_stated(value) if settings else value
    if "=" in value:
        value = _VARIABLE.sub(
            lambda it: f"{it[1]}={it[2]}{_MASK}" if _attribute_kind(it[1]) != "data" else it[0], value
        )
    if value.lstrip()[:1] in ("{", "["):
        value = _TEXT_MEMBER.sub(lambda it: it[1] + _MASK if _is_credential(it[2], it[3]) else it[0], value)
    if _HINT.search(value.lower()) is None:
        return value
    if "://" in value:
        if not _SPACE.search(value):
            return _mask_url(value)
        value = _PASSWORD.sub(rf"\1{_MASK}@", value)
    return _SHAPES.sub(_MASK, value)


def plain_text(text: str) -> str:
    """A text of any length and number of lines, in which only what has the shape of a secret is masked."""
    if _HINT.search(text.lower()) is None:
        return text
    return _SHAPES.sub(_MASK, _PASSWORD.sub(rf"\1{_MASK}@", text) if "://" in text else text)


def _masked(name: bytes, value: bytes) -> bytes:
    """The value of a header whose name is harmless: it may be a URL, a list of pairs or JSON."""
    if name.lower() in _SESSIONS:
        return fingerprint(value).encode()
    if name.lower() == b"baggage":
        value = _mask_pairs(value.decode("latin-1"), ",;").encode("latin-1")
    if value.isdigit():
        return value
    if _HINT_BYTES.search(value.lower()) is not None:
        found = _mask_url(value.decode("latin-1"))
        value = _MEMBER.sub(lambda it: it[1] + _MASK if is_secret(it[2]) else it[0], found).encode("latin-1")
    return _mask_stated(value.decode("latin-1")).encode("latin-1") if b"=" in value or b":" in value else value


def _mask_stated(text: str) -> str:
    """Masks values that follow a secret name, however they are written: `key=...`, `key: ...`, `'key': '...'`."""
    parts: list[str] = []
    at = 0
    for found in _STATED.finditer(text):
        if found.start() >= at and is_secret(found["name"]):
            parts += text[at : found.end()], _MASK
            at = _stated_end(text, found)
    return "".join((*parts, text[at:]))


def _stated_end(text: str, found: re.Match[str]) -> int:
    return next(_STATED_ENDS[found["quote"]].finditer(text, found.end())).end()


def _mask_pairs(pairs: str, ends: str) -> str:
    """Masks the values of secret names. `ends`: the characters that end a value that is not percent-encoded."""
    parts: list[str] = []
    at = 0
    for found in _PAIR.finditer(pairs):
        if found.start() >= at and _hides(found):
            parts += pairs[at : found.end()], _MASK
            at = _end(pairs, found, ends)
    return "".join((*parts, pairs[at:]))


def _hides(found: re.Match[str]) -> bool:
    name = _decoded(found["name"]).strip()
    return is_secret(name) or name.lower() in _PARAMETERS


def _end(pairs: str, found: re.Match[str], ends: str) -> int:
    """The end of a value whose name was found: it ends at an `&` that is encoded as often as its `=`, or less."""
    return next(_value(ends, found["equals"].count("25"), "%" in found["equals"]).finditer(pairs, found.end())).end()


@lru_cache(64)
def _value(ends: str, depth: int, encoded: bool) -> re.Pattern[str]:
    return re.compile(rf"(?:(?!%(?:25){{0,{depth}}}(?:26|23))[^{ends}])*" if encoded else f"[^{ends}]*")


def _decoded(text: str) -> str:
    for _ in range(3):
        if "%" not in text:
            break
        text = unquote(text)
    return text
