"""One strict TOML tree. An unknown key is an error that names its path and the nearest right key.

Every field's docstring is its documentation: docs/configuration.md is held against this file by a test.
"""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast
from urllib.parse import unquote, urlsplit

from pydantic import Field, field_validator, model_validator

from penstock.gateway.model.base import LONGEST_S, Mode
from penstock.gateway.model.settings import (
    ADMIN_KEY,
    AUDIT_KEY,
    READ_KEY,
    AddressSettings,
    LocalNames,
    LogSettings,
    McpSettings,
    Webhook,
    environment_key,
    http_url,
)
from penstock.gateway.model.span import TOKEN
from penstock.gateway.model.state import Budget, RetentionRule
from penstock.gateway.model.toml import ConfigError, Section, names_differ, read, validated
from penstock.gateway.reading.policy.rules import PolicyRule, check_names
from penstock.gateway.wire.dialects import FAMILIES
from penstock.gateway.wire.dialects.family import OPENAI, Family
from penstock.gateway.wire.masking.masker import MaskingRule


def admin_key() -> str | None:
    """The admin key; None if there is none. Like its two siblings, raises `ConfigError` if the variable is empty:
    whoever has set it believes that there is a key."""
    return _own_key(ADMIN_KEY)


def read_key() -> str | None:
    """The read-only key; None if there is none."""
    return _own_key(READ_KEY)


def audit_key() -> str | None:
    """The key that signs audit chains; None if there is none."""
    return _own_key(AUDIT_KEY)


def _own_key(variable: str) -> str | None:
    key = os.environ.get(variable)
    if key == "":
        raise ConfigError(f"{variable} is set and empty, which is no key: give it a value, or unset it")
    return key


class KeySettings(Section):
    """`[[key]]`: a named key for the control API, or for calls. `penstock key` makes one."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name in the audit log and in budgets: a person's, a program's or a team's."""
    role: Literal["call", "read", "operate", "release"]
    """`call` opens model calls only. The others open the control API: `read`, `operate` (with `read`) or `release`
    (with both)."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the key, in hex; the key itself is stored nowhere."""


OTLP_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
"""Environment variable with the headers for a collector."""
_AWS_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_KEY_NAME = re.compile("(?i)key|token|secret|password")
"""Names of variables whose values are kept off the tape."""


class LimitSettings(Section):
    """`[limits]`: bounds that protect the gateway; there is none on concurrency."""

    request_bytes: int = Field(default=256 << 20, gt=0)
    """Largest request body; a larger one is refused with 413."""
    recorded_bytes: int = Field(default=64 << 20, gt=0)
    """Bytes of a response body that are kept; the rest passes on, and the span is marked truncated."""
    drain_delay: float = Field(default=0.0, ge=0, le=LONGEST_S)
    """Seconds after SIGTERM in which connections are still taken while `/readyz` is 503: the time in which a load
    balancer notices."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """Seconds for running calls to finish at a stop or reload."""


class TapeSettings(Section):
    """`[tape]`: when calls are written to the tape, and how much it may hold."""

    record: Literal["batched", "strict"] = "batched"
    """`strict` writes a call before it goes upstream, and its span before the answer's last byte; `batched` writes
    later."""
    queue_bytes: int = Field(default=256 << 20, gt=0)
    """Bytes that may wait for the writer; beyond, ends of calls wait instead of being dropped."""
    on_record_failure: dict[Mode, Literal["pass", "refuse"]] = Field(
        default={"online": "pass", "train": "refuse", "val": "refuse", "test": "refuse"}
    )
    """Calls of a mode while the tape cannot be written: `pass` (counted as gaps) or `refuse` (503)."""
    keep_bytes: int | None = Field(default=None, gt=0)
    """Bytes that the tape may use; beyond, the oldest ended rollouts are forgotten. Without it the tape grows."""
    media: Literal["keep", "hash"] = "keep"
    """Sound, images and video in calls: `keep` their bytes, or only their SHA-256 (`hash`), size and type."""

    @field_validator("on_record_failure", mode="before")
    @classmethod
    def _the_others_stay(cls, value: Any) -> Any:
        default = cls.model_fields["on_record_failure"].default
        return default | value if isinstance(value, dict) else value


class IndexSettings(Section):
    """`[index]`: columns and texts beside the tape, by which filters, searches and SQL find rows without a scan."""

    when: Literal["large", "always", "never"] = "large"
    """When to keep an index: `large` is from 20,000 changes of the tape on. It needs the extra `index`."""
    sql: Literal["landlock", "none", "off"] = "landlock"
    """`landlock` (Linux) limits SQL to the index's files. With `none` SQL can read any file that the gateway can.
    `off`: no SQL."""


class OtlpSettings(Section):
    """`[otlp]`: OpenTelemetry, in at `/v1/traces`, `/v1/logs` and `/v1/metrics`, and out to a collector."""

    endpoint: str | None = None
    """Collector for finished spans; `/v1/traces` is added. `OTEL_EXPORTER_OTLP_HEADERS` in the environment has headers,
    such as keys."""
    wait: float = Field(default=10.0, ge=0, le=300)
    """Seconds that a call outside the queue waits for its agent's spans before it is sent; 0 sends each span at
    once."""
    capture_content: bool = False
    """Send content too: messages, system instructions, tool definitions, lines of output."""

    @field_validator("endpoint")
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        return None if value is None else http_url(value, OTLP_HEADERS)

    def traces_url(self) -> str:
        """The URL that traces are sent to, if there is an endpoint."""
        return f"{(self.endpoint or '').removesuffix('/v1/traces')}/v1/traces"

    def headers(self) -> dict[str, str]:
        """The headers from the environment, as every exporter of OpenTelemetry reads them: `name=value,name=value`,
        percent-encoded. Raises `ConfigError` if they are malformed."""
        value = os.environ.get(OTLP_HEADERS, "") if self.endpoint is not None else ""
        pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
        if not all(name.strip() and equals for name, equals, _ in pairs):
            raise ConfigError(f"otlp: {OTLP_HEADERS} must hold name=value,name=value")
        made = {name.strip(): unquote(content.strip()) for name, _, content in pairs}
        for name, content in made.items():
            # The message leaves the value out: it is mostly a secret.
            if not re.fullmatch(f"{TOKEN}+", name) or not content.isprintable():
                raise ConfigError(f"otlp: {OTLP_HEADERS}: {name!r} and its value can be no header")
        return made


class UpstreamSettings(Section):
    """`[[upstream]]`: a model endpoint, its API, its key and its limits."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name in routes and spans."""
    base_url: str
    """Base URL as the provider's SDK takes it: with `/v1` for openai, without for the others."""
    dialect: str = OPENAI.name
    """API that the endpoint speaks."""
    key_env: str | None = None
    """Environment variable with the API key, which replaces the agent's. Without it the agent's own key for this API
    passes."""
    auth: Literal["aws", "google"] | None = None
    """Cloud whose credentials the gateway holds: it signs each request (`aws`) or sends an access token (`google`), and
    removes the agent's key."""
    read_timeout: float = Field(default=600.0, gt=0)
    """A call fails after so many seconds without a byte from the upstream, before or within its answer."""
    max_concurrent: int | None = Field(default=None, gt=0)
    """Calls at a time. Others go to another upstream of the route, or wait in order for at most `read_timeout`
    seconds."""
    health_path: str | None = Field(default=None, pattern=r"^/[!-~]*$")
    """Path on its host that answers 2xx while it can serve, such as vLLM's `/health`; asked every 5 seconds."""
    session_header: str | None = Field(default=None, pattern=r"^[Xx]-[A-Za-z0-9-]{1,60}$")
    """Header, such as `X-Session-ID`, that gets the rollout's id unless the agent sends it: for routers that keep a
    conversation on one engine."""
    context: int | None = Field(default=None, gt=0)
    """Tokens of the longest prompt that it takes. Longer prompts go to the next upstream that takes more."""
    ca_file: str | None = None
    """PEM file of authorities to trust for its certificate and its proxy's, besides those of this machine."""
    client_cert: str | None = None
    """PEM file with the gateway's client certificate for it."""
    client_key: str | None = None
    """PEM file with that certificate's private key. Default: the key is in the certificate's file."""
    proxy: str | None = None
    """Proxy that leads to it (`http://` or `https://`); it must take CONNECT."""
    proxy_auth_env: str | None = None
    """Environment variable with `user:password` for that proxy."""

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        return http_url(value, "key_env")

    @field_validator("proxy")
    @classmethod
    def _is_proxy(cls, value: str | None) -> str | None:
        return None if value is None else http_url(value, "proxy_auth_env")

    @field_validator("dialect")
    @classmethod
    def _is_known(cls, value: str) -> str:
        known = [name for name, family in FAMILIES.items() if family.models]
        if value not in known:
            raise ValueError(f"{value!r} is none of the families: {', '.join(known)}")
        return value

    @model_validator(mode="after")
    def _has_one_key(self) -> UpstreamSettings:
        if self.auth is not None and self.key_env is not None:
            raise ValueError(f'key_env and auth = "{self.auth}" are both a key of its own: leave one out')
        return self

    @property
    def family(self) -> Family:
        """The family of the API that it speaks."""
        return FAMILIES[self.dialect]

    @property
    def has_key(self) -> bool:
        """True if the gateway has a key or credentials for it."""
        return self.key_env is not None or self.auth is not None

    def key(self) -> str | None:
        """Return the API key from the environment; raises `ConfigError` when it is named and missing."""
        return environment_key(f"upstream {self.name!r}", self.key_env)

    def proxy_auth(self) -> str | None:
        """Return the credential for its proxy from the environment; raises `ConfigError` when it is named and
        missing."""
        return environment_key(f"upstream {self.name!r}", self.proxy_auth_env, "proxy_auth_env")


class RouteSettings(Section):
    """`[[route]]`: which upstreams serve a model. The first match counts."""

    known_by: ClassVar[str] = "model"

    model: str
    """Model name that agents send, or a pattern (`qwen*`)."""
    upstream: dict[str, Annotated[float, Field(ge=0)]] = Field(min_length=1)
    """One upstream, or several: if one does not answer, the next gets the call, until the client has a byte. `{ a = 2,
    b = 1, spare = 0 }` shares rollouts out; 0 is used only if the others do not answer."""
    alias: str | dict[str, str] | None = None
    """Model name to send instead: one for all upstreams, or a table by upstream."""
    stream: Literal["live", "whole"] = "live"
    """`whole` passes an answer on when it is complete, so that another upstream can replace one that breaks off; the
    last one streams live. For training and batches."""
    train: bool | Literal["exact"] = False
    """Record token ids and log-probabilities, for a model in training. With `exact` a conversation also continues from
    the engine's own tokens, not from its text."""
    translate: bool | None = None
    """Translate calls of messages and responses to chat completions. Default: where `train` is set."""

    @field_validator("upstream", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return cast(dict[Any, Any], value)
        names = cast(list[Any], value) if isinstance(value, list) else [value]
        if other := [name for name in names if not isinstance(name, str)]:
            raise ValueError(f"{other[0]!r} is not the name of an upstream")
        return dict.fromkeys(names, 0.0)

    @model_validator(mode="after")
    def _names_its_own(self) -> RouteSettings:
        if isinstance(self.alias, dict) and (others := self.alias.keys() - self.upstream):
            raise ValueError(f"alias: {min(others)!r} is none of its upstreams: {', '.join(self.upstream)}")
        return self

    @cached_property
    def shares(self) -> dict[str, float]:
        """The shares of the upstreams that share its calls."""
        return {name: share for name, share in self.upstream.items() if share}

    @property
    def translates(self) -> bool:
        """True if calls are translated."""
        return bool(self.train) if self.translate is None else self.translate

    def matches(self, model: str) -> bool:
        """True if this route serves the model."""
        return fnmatchcase(model, self.model)


class GatewayConfig(AddressSettings):
    """The whole file; everything has a default."""

    data: Path = Field(default=Path("penstock-data"), strict=False)
    """Directory of the tape."""
    require_token: bool | None = None
    """Whether agents need a token (`penstock token`). Default: only when listening beyond loopback."""
    trust_agent_rewards: bool = False
    """Whether trainers use rewards that agents give themselves with their own tokens."""
    quiet_seconds: float = Field(default=1800.0, gt=0, le=LONGEST_S)
    """An attempt that no worker has claimed ends after so many seconds without a call or an event."""
    prices: Path | None = Field(default=None, strict=False)
    """File with the prices of models (`penstock prices`); without it, the built-in list."""
    reload_on_change: bool = False
    """Whether a change of this file reloads the settings, as SIGHUP does."""
    limits: LimitSettings = LimitSettings()
    log: LogSettings = LogSettings()
    tape: TapeSettings = TapeSettings()
    index: IndexSettings = IndexSettings()
    otlp: OtlpSettings = OtlpSettings()
    key: list[KeySettings] = Field(default=[])
    upstream: list[UpstreamSettings] = Field(default=[])
    route: list[RouteSettings] = Field(default=[])
    mcp: McpSettings = McpSettings()
    policy: list[PolicyRule] = Field(default=[])
    webhook: list[Webhook] = Field(default=[])
    retention: list[RetentionRule] = Field(default=[])
    budget: list[Budget] = Field(default=[])
    masking: list[MaskingRule] = Field(default=[])

    @field_validator("webhook")
    @classmethod
    def _webhooks_differ(cls, value: list[Webhook]) -> list[Webhook]:
        names_differ([one.name for one in value], "webhooks")
        return value

    @field_validator("masking")
    @classmethod
    def _rules_differ(cls, value: list[MaskingRule]) -> list[MaskingRule]:
        names_differ([one.name for one in value], "rules")
        return value

    @field_validator("key")
    @classmethod
    def _keys_differ(cls, value: list[KeySettings]) -> list[KeySettings]:
        names = [one.name for one in value]
        taken = {"admin", "read", *(name for name in names if names.count(name) > 1)}
        if wrong := [name for name in names if name in taken]:
            raise ValueError(f"{wrong[0]!r} is the name of another key: choose one of its own")
        if len({one.sha256 for one in value}) < len(value):
            raise ValueError("two keys have the same sha256: make one for each name")
        return value

    @field_validator("budget")
    @classmethod
    def _budgets_differ(cls, value: list[Budget]) -> list[Budget]:
        names_differ([one.name for one in value], "budgets")
        return value

    @field_validator("policy")
    @classmethod
    def _names_differ(cls, value: list[PolicyRule]) -> list[PolicyRule]:
        check_names(value)
        return value

    @model_validator(mode="after")
    def _names_exist(self) -> GatewayConfig:
        names = [upstream.name for upstream in self.upstreams()]
        names_differ([upstream.name for upstream in self.upstream], "upstreams")
        if twice := next((name for name in names if names.count(name) > 1), None):
            family = next(known.dialect for known in _PUBLIC if known.name == twice)
            raise ValueError(
                f"{twice!r} is the name of the public endpoint of dialect {family!r}: give upstream {twice!r} another "
                "name, or that dialect"
            )
        if both := set(names) & self.mcp.servers.keys():
            raise ValueError(f"mcp.servers may not have the name of an upstream: {', '.join(sorted(both))}")
        for route in self.route:
            for name in route.upstream:
                if name not in names:
                    raise ValueError(f"route {route.model!r} names upstream {name!r}; there are: {', '.join(names)}")
        return self

    @model_validator(mode="after")
    def _engines_give_tokens(self) -> GatewayConfig:
        others = {upstream.name: what for upstream in self.upstreams() if (what := _no_engine(upstream))}
        for route in (route for route in self.route if route.train):
            for name in route.upstream.keys() & others.keys():
                raise ValueError(
                    f"route {route.model!r} has train = true and upstream {name!r} ({others[name]}) gives no token "
                    "ids: name one that an inference engine such as vLLM serves, or leave train out"
                )
        return self

    @model_validator(mode="after")
    def _chat_is_spoken(self) -> GatewayConfig:
        others = {upstream.name: upstream.dialect for upstream in self.upstreams() if not upstream.family.engines}
        for route in (route for route in self.route if route.translate):
            for name in route.upstream.keys() & others.keys():
                raise ValueError(
                    f"route {route.model!r} has translate = true and upstream {name!r} (dialect {others[name]!r}) "
                    "speaks no chat completions: name one that does, or leave translate out"
                )
        return self

    def upstreams(self) -> list[UpstreamSettings]:
        """The configured upstreams, and the public endpoint of each dialect that has one and is not configured."""
        families = {upstream.dialect for upstream in self.upstream}
        return [*self.upstream, *(known for known in _PUBLIC if known.dialect not in families)]

    def secrets(self) -> list[str | None]:
        """The keys in the environment that the settings name."""
        servers = self.mcp.servers.items()
        return [
            admin_key(),
            read_key(),
            audit_key(),
            *(one.key() for one in self.upstream),
            *(one.proxy_auth() for one in self.upstream),
            *(os.environ.get(name) for name in _AWS_SECRETS if any(one.auth == "aws" for one in self.upstream)),
            *(one.key(name) for name, one in servers),
            *(value for name, one in servers for value in one.keys(name).values()),
            *(value for _, one in servers for key, value in one.env.items() if _KEY_NAME.search(key)),
            *self.otlp.headers().values(),
            *(value for one in self.webhook for value in one.secrets()),
        ]

    @property
    def loopback(self) -> bool:
        """True if only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def local_names(self) -> LocalNames:
        """The host names that requests may use while no key is required: its own, and hosts of upstreams, because calls
        for those may be redirected here."""
        own = (self.host, f"[{self.host}]") if self.loopback else ()
        hosts = (urlsplit(upstream.base_url).hostname for upstream in self.upstreams())
        return LocalNames((*self.names, *own), (host for host in hosts if host))

    @property
    def token_required(self) -> bool:
        """True if calls need an agent token."""
        return not self.loopback if self.require_token is None else self.require_token

    def refuse_open_door(self) -> None:
        """Raise `ConfigError` if the gateway would listen beyond loopback without a key."""
        if not self.loopback and admin_key() is None:
            raise ConfigError(
                f"host {self.host!r} is reachable from other machines and no admin key is set: "
                f"export {ADMIN_KEY}=..., or listen on 127.0.0.1"
            )


def _no_engine(upstream: UpstreamSettings) -> str | None:
    """The dialect or public host of an upstream that cannot give token ids; None if it is an engine."""
    if not upstream.family.engines:
        return f"dialect {upstream.dialect!r}"
    host = urlsplit(upstream.base_url).hostname
    return host if host == urlsplit(upstream.family.base_url or "").hostname else None


_PUBLIC = tuple(
    UpstreamSettings(name=name, base_url=family.base_url, dialect=name)
    for name, family in FAMILIES.items()
    if family.base_url is not None
)


def load(path: Path | None, /, **overrides: Any) -> GatewayConfig:
    """Return the configuration in `path`, overridden by the given settings that are not None.

    Raises `ConfigError` naming every wrong key.
    """
    tree = {} if path is None else read(path)
    given = {key: value for key, value in overrides.items() if value is not None}
    return validated(GatewayConfig, tree | given, "the settings" if path is None else str(path), given)
