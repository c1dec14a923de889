"""The settings of model endpoints and of the routes to them."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, field_validator, model_validator

from penstock.gateway.model.settings import environment_key, http_url
from penstock.gateway.model.toml import Section
from penstock.gateway.wire.dialects import FAMILIES
from penstock.gateway.wire.dialects.family import OPENAI, Family


class UpstreamSettings(Section):
    """`[[upstream]]`: a model endpoint, its API, its key and its limits."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """What routes and spans call it."""
    base_url: str
    """As its official SDK takes it: with `/v1` for openai, without for the others."""
    dialect: str = OPENAI.name
    """Whose API it speaks."""
    key_env: str | None = None
    """Environment variable with its API key; it replaces the agent's. Without it an agent's own of this API passes."""
    read_timeout: float = Field(default=600.0, gt=0)
    """Seconds without a byte from the upstream, before its answer and within it, after which a call fails."""
    max_concurrent: int | None = Field(default=None, gt=0)
    """Calls that it is given at a time; others go to another upstream of their route, or wait in their order, at most
    `read_timeout` seconds."""
    health_path: str | None = Field(default=None, pattern=r"^/[!-~]*$")
    """Path of its host that answers 2xx while it can serve, as `/health` of vLLM; asked every 5 seconds."""
    session_header: str | None = Field(default=None, pattern=r"^[Xx]-[A-Za-z0-9-]{1,60}$")
    """Header in which it is told the rollout of a call (`X-Session-ID`), unless the agent sends one of that name: for
    routers behind it that keep a conversation on one engine."""
    context: int | None = Field(default=None, gt=0)
    """Tokens of the longest prompt that it takes. One that is too long for an upstream goes to the next that takes
    more."""
    ca_file: str | None = None
    """PEM file of certificate authorities that its certificate may be of, and its proxy's, besides those that this
    machine trusts."""
    client_cert: str | None = None
    """PEM file with the certificate that the gateway shows it as a client."""
    client_key: str | None = None
    """PEM file with that certificate's private key. Default: the key is in the file of the certificate."""
    proxy: str | None = None
    """URL of the proxy that leads to it (`http://` or `https://`); it must take CONNECT."""
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

    @property
    def family(self) -> Family:
        """The family of the API that it speaks."""
        return FAMILIES[self.dialect]

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
    """Model name as agents ask for it, or a pattern (`qwen*`)."""
    upstream: dict[str, Annotated[float, Field(ge=0)]] = Field(min_length=1)
    """Name of the upstream, or several: the next is asked while one does not answer, before the first byte. With
    shares, such as `{ a = 2, b = 1, spare = 0 }`, they share its calls by rollout; one with 0 is asked when they do not
    answer."""
    alias: str | dict[str, str] | None = None
    """Model name to send instead: one for all, or by the name of the upstream."""
    stream: Literal["live", "whole"] = "live"
    """`whole` passes an answer on when all of it is there, while another upstream is left: one that breaks off is then
    made anew. For training and batches."""
    train: bool | Literal["exact"] = False
    """Whether the model is trained: its calls are recorded with token ids and log-probabilities. With `exact` a
    conversation also goes on from the very tokens that the engine made, not from a rendering of its text."""
    translate: bool | None = None
    """Whether calls of messages and responses are translated to chat completions. Default: where `train` is set."""

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
