"""Credentials of a cloud that the gateway holds (`auth` of an `[[upstream]]`): signatures of AWS, access tokens of
Google.

botocore and google-auth find the credentials and refresh them. Both wait for networks, so they work on a thread: the
first time when the gateway starts, then once a minute, which is long before anything expires. A call waits only while
there are no credentials yet. Without any it is refused. A request is signed at the moment at which it is written:
AWS refuses signatures that are older than five minutes, and a call may have waited at a paused upstream.

Neither library is imported unless an upstream has the setting.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

from penstock.gateway.config import UpstreamSettings
from penstock.gateway.model.codes import install_hint
from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.times import Backoff
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.wire.dialects.family import ANTHROPIC, BEDROCK, host_of
from penstock.gateway.wire.http.redaction import Redactor, plain_text
from penstock.gateway.wire.http.request import GatewayFault

Fields = Sequence[tuple[bytes, bytes]]
LOOK_S: Final = 60.0
"""Seconds between two looks at credentials: botocore refreshes them 15 minutes before they expire, google-auth 225 s.
"""
RETRIES: Final = Backoff(1.0, 30.0)
LARGE: Final = 256 << 10
"""Bytes of a body above which its hash is computed on a thread: it takes 0.3 ms."""
KIND: Final = "auth"
"""The error of a call for which there are no credentials."""
_SHOWN: Final = 300
_SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
_HOST: Final = re.compile(
    r"(?:^|\.)(bedrock-runtime|bedrock-mantle|aws-external-anthropic)(?:-fips)?\.([a-z]{2}[a-z0-9-]*-\d)\."
)
_SIGNED: Final = frozenset({b"host", b"content-type"})
"""Headers that are signed, besides those that begin with `x-amz-`. A proxy may change others on their way."""
_log = logging.getLogger("penstock.upstream")
T = TypeVar("T")


class CloudCredentials(ABC):
    """The credentials of one cloud. Used on the event loop's thread, but for `fetch`."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """Why there are no credentials, or why they could not be refreshed; None while all is well."""
        self.wanted = asyncio.Event()
        """Set if a call needs them before the next look at them."""
        self._attempt: asyncio.Future[None] | None = None

    @property
    @abstractmethod
    def valid(self) -> bool:
        """True if there are credentials that have not expired."""

    @abstractmethod
    def fetch(self) -> list[str]:
        """Find the credentials, or refresh them if they expire soon; return the secrets among them. Called on a thread;
        raises any exception."""

    async def refresh(self) -> list[str]:
        """Call `fetch` on a thread. Raises what it raises."""
        attempt = self._attempt = self._attempt or asyncio.get_running_loop().create_future()
        self.wanted.clear()
        try:
            secrets = await on_thread(self.fetch)
            if not self.valid:
                raise LookupError("those that were found have expired")
        except Exception as error:
            self.problem = plain_text(" ".join(str(error).split()) or type(error).__name__)[:_SHOWN]
            raise
        else:
            self.problem = None
            return secrets
        finally:
            self._attempt = None
            attempt.set_result(None)

    def expected(self) -> asyncio.Future[None] | None:
        """Done when an attempt to get them is over; None if the last one failed, and the next one comes later."""
        if self._attempt is None and self.problem is None:
            self._attempt = asyncio.get_running_loop().create_future()
            self.wanted.set()
        return self._attempt


class UpstreamAuth(ABC):
    """The gateway's own credentials in requests to one upstream."""

    def __init__(self, name: str, credentials: CloudCredentials) -> None:
        self._name, self.credentials = name, credentials

    @property
    def problem(self) -> str:
        """Why there are no credentials, or why they could not be refreshed; empty while all is well."""
        return f"{KIND}: {self.credentials.problem}" if self.credentials.problem else ""

    def prepare(self, body: bytes) -> asyncio.Future[str | None] | None:
        """None if a request with this body can be signed at once; else a future of what `fields` takes as `prepared`.
        It fails with `GatewayFault` if there are no credentials."""
        if self.credentials.valid and not self.hashes(body):
            return None
        return asyncio.ensure_future(self._prepare(body))

    async def _prepare(self, body: bytes) -> str | None:
        while not self.credentials.valid:
            if (attempt := self.credentials.expected()) is None:
                # The problem may name a file of this machine: that is for its owner.
                message = f"the gateway has no credentials for upstream {self._name!r}: its log says why"
                raise GatewayFault(503, KIND, message)
            await asyncio.wait([attempt])
        return await on_thread(lambda: hashlib.sha256(body).hexdigest()) if self.hashes(body) else None

    def hashes(self, body: bytes) -> bool:
        """True if a hash of this body is needed and takes long."""
        return False

    @abstractmethod
    def fields(self, method: str, target: str, sent: Fields, body: bytes, prepared: str | None = None) -> Fields:
        """The header fields to add to a request. `target`: path and query; `sent`: its other header fields; `prepared`:
        the result of `prepare`, if it returned a future."""


async def on_thread(do: Callable[[], T]) -> T:
    """Call a function on a thread that the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if not done.done():
            if error is None:
                done.set_result(result)  # pyright: ignore[reportArgumentType]
            else:
                done.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = do()
        except Exception as problem:
            error = problem
        with suppress(RuntimeError):  # of a loop that is closed
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=work, name="penstock-cloud-auth", daemon=True).start()
    return await done


def needed(name: str, setting: str, module: str) -> Any:
    """Import a library; raises `ConfigError` if it is not installed. `name`, `setting`: of the upstream that needs
    it."""
    library = module.partition(".")[0]
    try:
        found = import_module(module)
        # What fails is told here, in one line.
        logging.getLogger(library).setLevel(logging.CRITICAL)
        return found
    except ImportError:
        package = library.replace("google", "google-auth")
        hint = install_hint("clouds")
        raise ConfigError(f'upstream {name!r}: auth = "{setting}" needs {package}, which is not here: {hint}') from None


# -- AWS ---------------------------------------------------------------------------------------------------------------


class AwsCredentials(CloudCredentials):
    """The credentials that botocore's chain finds: environment, profile, web identity, container, instance."""

    def __init__(self, library: Any) -> None:
        """`library`: the module `botocore.session`, which finds them."""
        super().__init__()
        self._library = library
        self._found: Any = None
        self.frozen: Any = None
        """Key, secret and session token of one moment; None while there are none."""

    @property
    def valid(self) -> bool:
        expired = getattr(self._found, "refresh_needed", None)
        return self.frozen is not None and not (expired is not None and expired(refresh_in=0))

    def fetch(self) -> list[str]:
        if self._found is None:
            # A session reads files once.
            self._found = self._library.get_session().get_credentials()
        if self._found is None:
            chain = "environment, profile, web identity, container or instance"
            raise LookupError(f"no AWS credentials were found ({chain})")
        self.frozen = self._found.get_frozen_credentials()
        return [it for it in (self.frozen.secret_key, self.frozen.token) if it]

    @property
    def region(self) -> str | None:
        """The region of the environment or the profile."""
        return os.environ.get("AWS_REGION") or self._library.get_session().get_config_variable("region")


class AwsAuth(UpstreamAuth):
    """Signatures (SigV4) for one upstream."""

    def __init__(self, config: UpstreamSettings, credentials: AwsCredentials) -> None:
        """Raises `ConfigError` if neither host nor settings tell the service and the region."""
        super().__init__(config.name, credentials)
        self._aws = credentials
        parts = urlsplit(config.base_url)
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self.service, self.region = _signed_for(config, credentials)
        auth, request = (needed(config.name, "aws", f"botocore.{it}") for it in ("auth", "awsrequest"))
        self._request: Callable[..., Any] = request.AWSRequest

        class Signer(auth.SigV4Auth):  # pyright: ignore[reportUntypedBaseClass]
            """Takes the hash of the body from its request."""

            def payload(self, request: Any) -> str:
                return request.context["hash"]

        self._signer: Callable[..., Any] = Signer

    def hashes(self, body: bytes) -> bool:
        return len(body) > LARGE

    def fields(self, method: str, target: str, sent: Fields, body: bytes, prepared: str | None = None) -> Fields:
        signed: dict[str, str] = {}
        for name, value in sent:
            if (low := name.lower()) in _SIGNED or low.startswith(b"x-amz-"):
                key, said = low.decode("latin-1"), value.decode("latin-1")
                signed[key] = f"{signed[key]},{said}" if key in signed else said
        request = self._request(method=method, url=self._origin + target, headers=signed)
        request.context["hash"] = prepared or hashlib.sha256(body).hexdigest()
        self._signer(self._aws.frozen, self.service, self.region).add_auth(request)
        added = [(name, value) for name, value in request.headers.items() if name.lower() not in signed]
        return [(name.encode(), value.encode()) for name, value in added]


def _signed_for(config: UpstreamSettings, credentials: AwsCredentials) -> tuple[str, str]:
    """The service and the region that signatures for an upstream name."""
    host = urlsplit(config.base_url).hostname or ""
    if (found := _HOST.search(host)) is not None:
        return found[1].replace("bedrock-runtime", "bedrock"), found[2]
    service = {BEDROCK: "bedrock", ANTHROPIC: "aws-external-anthropic"}.get(config.family)
    if service is None:
        message = (
            "its host tells no service of AWS: name one such as bedrock-runtime.REGION.amazonaws.com, or set "
            'dialect = "bedrock"'
        )
        raise ConfigError(f'upstream {config.name!r}: auth = "aws": {message}')
    if (region := credentials.region) is None:
        message = "its host names no region: export AWS_REGION=..."
        raise ConfigError(f'upstream {config.name!r}: auth = "aws": {message}')
    return service, region


# -- Google ------------------------------------------------------------------------------------------------------------


class GoogleCredentials(CloudCredentials):
    """Application default credentials: a file that GOOGLE_APPLICATION_CREDENTIALS names, gcloud's, the metadata
    server."""

    def __init__(self, library: Any, transport: Any) -> None:
        """`library`, `transport`: the modules `google.auth` and `google.auth.transport.requests`."""
        super().__init__()
        self._library, self._transport = library, transport
        self._found: Any = None
        self.fields: Fields = ()
        """Header fields with the token."""

    @property
    def valid(self) -> bool:
        return bool(self.fields) and self._found.token_state.name != "INVALID"

    def fetch(self) -> list[str]:
        request = self._transport.Request()
        if self._found is None:
            self._found, _ = self._library.default(scopes=[_SCOPE], request=request)
        if self._found.token_state.name != "FRESH":
            self._found.refresh(request)
        sent: dict[str, str] = {}
        self._found.apply(sent)
        self.fields = [(name.title().encode(), value.encode()) for name, value in sent.items()]
        return [self._found.token]


class GoogleAuth(UpstreamAuth):
    """Access tokens for one upstream."""

    def __init__(self, config: UpstreamSettings, credentials: GoogleCredentials) -> None:
        super().__init__(config.name, credentials)
        self._google = credentials

    def fields(self, method: str, target: str, sent: Fields, body: bytes, prepared: str | None = None) -> Fields:
        """The token. A billed project that the agent names itself (`x-goog-user-project`) counts more than the
        credentials' own."""
        named = {name.lower() for name, _ in sent}
        return [field for field in self._google.fields if field[0].lower() not in named]


# -- the service -------------------------------------------------------------------------------------------------------


class AuthenticatedPool(Protocol):
    """An upstream, as far as the service needs it."""

    config: UpstreamSettings
    auth: UpstreamAuth | None


class CloudAuthService:
    """Gives upstreams their authentication, and keeps the credentials fresh. `start`, then `stop`."""

    def __init__(self, pools: Iterable[AuthenticatedPool], redactor: Redactor, hide: Callable[[Secrets], None]) -> None:
        """`redactor`, `hide`: learn the secrets, which then reach no call on the tape and no other text on it. Raises
        `ConfigError` if a library or a region is missing."""
        self._pools = [pool for pool in pools if pool.config.auth is not None]
        self._redactor, self._hide = redactor, hide
        self._own, self._tape = redactor.own, redactor.tape
        self._secrets: dict[str, list[str]] = {}
        """Secrets by cloud: the current ones, and those before them, which requests under way may still have."""
        self._known: dict[str, CloudCredentials] = {}
        self._tasks: list[asyncio.Future[None]] = []
        for pool in self._pools:
            pool.auth = self._auth(pool.config)

    def _auth(self, config: UpstreamSettings) -> UpstreamAuth:
        setting, host = config.auth or "", urlsplit(config.base_url).hostname or ""
        known = host_of(host)
        if known is not None and setting not in known.kinds:
            raise ConfigError(f'upstream {config.name!r}: auth = "{setting}", but {host} takes no such credentials')
        if setting == "aws":
            if setting not in self._known:
                self._known[setting] = AwsCredentials(needed(config.name, setting, "botocore.session"))
            return AwsAuth(config, self._known[setting])  # pyright: ignore[reportArgumentType]
        if setting not in self._known:
            parts = (needed(config.name, setting, f"google.auth{it}") for it in ("", ".transport.requests"))
            self._known[setting] = GoogleCredentials(*parts)
        return GoogleAuth(config, self._known[setting])  # pyright: ignore[reportArgumentType]

    async def start(self) -> None:
        """Begin to fetch the credentials; calls wait for them."""
        self._tasks = [asyncio.ensure_future(self._keep(name, one)) for name, one in self._known.items()]

    async def stop(self) -> None:
        """Stop refreshing. Calls go on with the credentials that are there."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, cloud: str, credentials: CloudCredentials) -> None:
        failures = 0
        while True:
            before = credentials.problem
            try:
                self._learn(cloud, await credentials.refresh())
                failures = 0
            except Exception:
                failures += 1
            self._tell(cloud, credentials, before)
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRIES.after(failures) if failures else LOOK_S):
                    await credentials.wanted.wait()

    def _learn(self, cloud: str, secrets: list[str]) -> None:
        """Hide these secrets from the tape and from clients, and those before them."""
        before = self._secrets.get(cloud, [])
        if before[-len(secrets) :] == secrets:
            return
        self._secrets[cloud] = [*before[-2:], *secrets]
        values = [it.encode() for some in self._secrets.values() for it in some]
        self._redactor.own, self._redactor.tape = self._own.with_values(values), self._tape.with_values(values)
        self._hide(self._redactor.tape)

    def _tell(self, cloud: str, credentials: CloudCredentials, before: str | None) -> None:
        """Log a change. `before`: the problem of the attempt before."""
        problem = credentials.problem
        if problem is not None and problem != before:
            left = "those before are used until they expire" if credentials.valid else "calls are refused"
            _log.warning('auth = "%s": no credentials could be had (%s): %s', cloud, left, problem)
        elif problem is None and before is not None:
            _log.info('auth = "%s": there are credentials again', cloud)
