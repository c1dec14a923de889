"""The data plane: every request that a client has sent comes here and becomes a call, or is answered at once.

The control plane's are handed on, and so is what an agent says of itself below its address (rewards, events, traces);
what is no request or may not pass is refused; the rest is a `gateway.proxy.call`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from time import monotonic

from penstock.gateway.api.front_page import front_page
from penstock.gateway.calls.address import AddressError, from_path
from penstock.gateway.calls.admission import Admission, Admitted
from penstock.gateway.calls.auth import Auth
from penstock.gateway.calls.conversations import Conversations
from penstock.gateway.config import Config, Route
from penstock.gateway.dialects import find
from penstock.gateway.http.client_connection import Front
from penstock.gateway.http.errors import GatewayFault, Refusal, internal_fault
from penstock.gateway.http.headers import family, refusal_body, refusal_head
from penstock.gateway.http.redact import Redactor
from penstock.gateway.http.request import Request
from penstock.gateway.metrics import Metrics
from penstock.gateway.proxy.call import Call
from penstock.gateway.proxy.exact.session_store import Exact
from penstock.gateway.proxy.translation.translator import Translator
from penstock.gateway.releases.catalog import Switch
from penstock.gateway.releases.rehearsal.live import Rehearsals
from penstock.gateway.releases.shadow.stage import Shadow
from penstock.gateway.server.bridge import ControlPlane, agent_target, is_control
from penstock.gateway.store.recorder import Recorder
from penstock.gateway.upstreams.pool import Pool
from penstock.gateway.upstreams.routes import Routes

_log = logging.getLogger("penstock.proxy")


class Proxy:
    """What all calls share: the upstreams, the routes, the keys, the recorder."""

    def __init__(
        self,
        config: Config,
        pools: Mapping[str, Pool],
        auth: Auth,
        recorder: Recorder,
        metrics: Metrics,
        control: ControlPlane,
        switch: Switch,
        shadow: Shadow,
        rehearsals: Rehearsals,
        routes: Routes,
        translator: Translator | None,
        exact: Exact,
        redactor: Redactor,
        epoch_ns: int,
    ) -> None:
        """`translator`: None when nothing is translated, or nothing can be; `epoch_ns`: what the clock of the tape adds
        to the monotonic one."""
        self.config = config
        self.pools = pools
        self.recorder = recorder
        self.metrics = metrics
        self.redactor = redactor
        self.admission = Admission(auth, Conversations(), config.token_required)
        self.fronts: set[Front] = set()
        self.running: OrderedDict[Call, None] = OrderedDict()
        """Calls that have not ended yet, by start."""
        self.header_bytes = config.limits.header_bytes
        self.request_bytes = config.limits.request_bytes
        self.strict = config.tape.record == "strict"
        self._control = control
        self.switch = switch
        self.shadow = shadow
        self.rehearsals = rehearsals
        self.translator = translator
        self.exact = exact
        self.epoch_ns = epoch_ns
        self._routes = routes

    def serve(self, front: Front, request: Request) -> None:
        """Serves a whole request: a refusal, a request of the control plane, or a call."""
        began = monotonic()
        try:
            if request.refusal is not None:
                raise request.refusal
            if is_control(request.target):
                self._control.serve(front, request)
                return
            page = front_page(request)
            if page is not None:
                front.transport.write(page)
                front.finish(request.keep_alive)
                return
            admitted = self.admission.admit(request, front.way)
            target = agent_target(request.method, admitted)
            if target is not None:
                self._control.serve(front, request, target)
                return
        except Refusal as refusal:
            self._refuse(front, request, refusal)
        except Exception:
            _log.exception("a request could not be looked at")
            self._refuse(front, request, internal_fault())
        else:
            front.served = call = Call(self, front, request, admitted)
            call.run(began)

    def _refuse(self, front: Front, request: Request, refusal: Refusal) -> None:
        """Answers what does not become a call: it belongs to no rollout, or is no request at all."""
        body = refusal_body(_spoken(request), refusal)
        head = refusal_head(refusal, len(body), request.keep_alive)
        front.transport.write(head if request.method == "HEAD" else head + body)
        if request.refusal is None:
            front.finish(request.keep_alive)
        else:
            front.linger()

    def route(self, call: Admitted, request: Request) -> tuple[list[Pool], str | None, Route | None]:
        """(upstreams to try in turn, model name to send instead, the route that says so)."""
        route = self.routed(call.model) if self._routes else None
        return *self._routes.along(route, family(call.dialect.name, call.dialect.family, request)), route

    def routed(self, model: str | None) -> Route | None:
        """The route of a model; one that goes where its version says may have one too."""
        return self._routes.find(model)

    def pool(self, name: str, model: str | None) -> Pool:
        """The upstream that serves a version of weights; raises `GatewayFault` when it is not configured any more."""
        found = self.pools.get(name)
        if found is None:
            message = (
                f"model {model!r} is served by upstream {name!r}, which is not configured: add [[upstream]] {name!r}"
            )
            raise GatewayFault(503, "upstream", message)
        return found

    def sweep(self, now: float) -> None:
        """Once a tick: announces calls that have run for a while, ends those whose upstream is silent."""
        announce = now - self.config.tape.announce_seconds
        for call in list(self.running):
            try:
                call.check(now, announce)
            except Exception:
                _log.exception("a running call could not be looked after")
        for pool in self.pools.values():
            pool.expire(now)
            self.metrics.upstream_waiting[(pool.name,)] = pool.gate.waiting
            self.metrics.connections(pool.name, "idle", pool.idle)
            self.metrics.connections(pool.name, "busy", pool.connections - pool.idle)


def _spoken(request: Request) -> str:
    """The same, of a request that has not become a call."""
    path = request.target.decode("latin-1").partition("?")[0]
    try:
        path = from_path(path)[1]
    except AddressError:
        path = path[path.find("/v1") :] if "/v1" in path else path
    dialect = find("POST", path)
    return family(dialect.name, dialect.family, request)
