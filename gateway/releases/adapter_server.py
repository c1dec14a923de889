"""Adapters on a vLLM server: loads, checks, warms and unloads them, and says clearly when one of these does not work.

`VllmClient` speaks to one server. All its operations can be repeated: `load` of an adapter that is there succeeds, and
`unload` of one that is not there too. So the same call repairs a server that was restarted and has lost its adapters.
Two processes that load the same version at once both succeed. After a `timeout` the server may still finish its work;
the next `load` finds out.

`settle` brings a server to what `gateway.model.resource` plans; one version that does not load does not stop the
others.

docs/weights.md lists the peculiarities of vLLM, as measured.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from types import MappingProxyType
from typing import Any, Literal

import aiohttp

from penstock.gateway.model.resource import Residency, ResidencyPlan, other_weights

LIST_S, LOAD_S, CHECK_S = 10.0, 120.0, 60.0
"""Bounds for an answer, in seconds. Adapters may lie on a slow disk; the first answer after a start takes long."""
PROMPT = "Say hello."

ServingErrorKind = Literal["not_found", "refused", "unreachable", "timeout", "mismatch", "unusable"]
"""In order: no such adapter; the server refuses; nobody answers; not in time; other weights; its answer is not one of a
model."""


class ServingError(Exception):
    """A server did not do what it was asked to; the message names the adapter, the server and the way out."""

    def __init__(self, kind: ServingErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind: ServingErrorKind = kind


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The answer of a version to a canned prompt."""

    text: str
    """The text of the answer; empty when it had only special tokens."""
    seconds: float


class VllmClient:
    """The client of one vLLM server."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        key: str | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`base_url`: as in an upstream, with or without `/v1`; `key`: the server's `--api-key`; `options`: of a
        connection to it (`gateway.traffic.upstreams.pool`)."""
        self._options = options
        self._session = session
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def adapters(self) -> dict[str, str | None]:
        """Return every name that the server serves: adapters with their paths, base models with None."""
        status, text = await self._ask("GET", "/v1/models", None, LIST_S)
        if status != 200:
            raise self._refused(status, text, "list its models")
        try:
            return {card["id"]: card["root"] if card.get("parent") else None for card in json.loads(text)["data"]}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self._error("unusable", "did not list its models as vLLM does; is it one?") from None

    async def slots(self) -> int | None:
        """Return the number of adapters that it computes with at a time (`--max-loras`); None before its first
        answer."""
        status, text = await self._ask("GET", "/metrics", None, LIST_S)
        found = re.search(r'^vllm:lora_requests_info\{[^}]*max_lora="(\d+)"', text, re.MULTILINE)
        return int(found[1]) if status == 200 and found else None

    async def load(self, name: str, path: str, base: str | None = None) -> bool:
        """Load the adapter in `path` (on the server) under `name`; False when it was loaded already.

        `base`: the model that it was made for, which the server must serve: one of the same shape would take it too.
        """
        if await self._serves(name, path, base):
            return False
        status, text = await self._change("load", {"lora_name": name, "lora_path": path}, LOAD_S)
        if status == 200:
            return True
        # Another process may have loaded it first.
        if status == 400 and await self._serves(name, path, base):
            return False
        hint = "; the path must exist on the server" if status == 404 else ""
        raise self._refused(status, text, f"load adapter {name!r} from {path}", hint)

    async def unload(self, name: str) -> bool:
        """Unload a name; answers that have begun are finished with its weights. False when it was not there."""
        status, text = await self._change("unload", {"lora_name": name}, LIST_S)
        if status not in (200, 404):
            raise self._refused(status, text, f"unload adapter {name!r}")
        return status == 200

    async def check(self, name: str, numbers: bool = True) -> ProbeResult:
        """Ask a version one prompt, which it must answer in time.

        `numbers`: its log-probabilities must be numbers; False for servers that do not give them.
        """
        began = monotonic()
        return ProbeResult(await self._answer(name, numbers), monotonic() - began)

    async def warm(self, name: str, n: int) -> float:
        """Ask a version `n` prompts at once, so that no agent waits for first times; return the seconds it took."""
        began = monotonic()
        await asyncio.gather(*(self._answer(name, numbers=False) for _ in range(n)))
        return monotonic() - began

    async def _answer(self, name: str, numbers: bool) -> str:
        body: Any = {"model": name, "messages": [{"role": "user", "content": PROMPT}], "max_completion_tokens": 8}
        if numbers:
            body |= {"temperature": 0, "logprobs": True, "top_logprobs": 0}
        status, text = await self._ask("POST", "/v1/chat/completions", body, CHECK_S)
        if numbers and status == 400 and "Out of range float" in text:
            raise self._no_numbers(name)
        if status != 200:
            raise self._refused(status, text, f"answer as {name!r}")
        try:
            # Some servers write NaN, which is no JSON.
            choice = json.loads(text, parse_constant=lambda _: None)["choices"][0]
            said = choice["message"]["content"] or ""
            tokens: list[Any] = choice["logprobs"]["content"] if numbers else []
            found = [token["logprob"] for token in tokens]
        except (ValueError, LookupError, TypeError):
            raise self._error("unusable", f"did not answer a prompt to {name!r} as a chat model does") from None
        if numbers and (not found or None in found):
            raise self._no_numbers(name)
        return said

    async def _serves(self, name: str, path: str, base: str | None) -> bool:
        present = await self.adapters()
        bases = [one for one, found in present.items() if found is None]
        if base is not None and base not in bases:
            message = f"serves {', '.join(bases) or 'no base model'}, not {base!r}, for which adapter {name!r} was made"
            raise self._error("mismatch", message)
        if name in present and present[name] != path:
            raise ServingError("mismatch", f"{self.url}: {other_weights(name, path, present[name])}")
        return name in present

    # -- asking ------------------------------------------------------------------------------------------------------

    async def _ask(self, method: str, path: str, body: Any, seconds: float) -> tuple[int, str]:
        """Return (HTTP status, text of the answer)."""
        bound = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.request(
                method,
                self.url + path,
                json=body,
                headers=self._headers,
                timeout=bound,
                allow_redirects=False,
                **self._options,
            ) as answer:
                return answer.status, await answer.text(errors="replace")
        except TimeoutError:
            raise self._error("timeout", f"did not answer {method} {path} within {seconds:g} s") from None
        except aiohttp.ClientError as error:
            reason = str(error) or type(error).__name__
            raise self._error("unreachable", f"could not be asked ({method} {path}): {reason}") from None

    async def _change(self, verb: Literal["load", "unload"], body: Any, seconds: float) -> tuple[int, str]:
        status, text = await self._ask("POST", f"/v1/{verb}_lora_adapter", body, seconds)
        if status in (404, 405) and '"error"' not in text:
            message = (
                f"does not allow adapters to be loaded at run time ({body['lora_name']!r} is to be {verb}ed): start it "
                "with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
            raise self._error("refused", message)
        return status, text

    def _refused(self, status: int, text: str, what: str, hint: str = "") -> ServingError:
        if status in (401, 403):
            hint = "; set key_env of the upstream to its --api-key (vLLM takes it as 'Authorization: Bearer' only)"
        kind: ServingErrorKind = "not_found" if status == 404 else "refused"
        return self._error(kind, f"would not {what}: {_reason(text)} ({status}){hint}")

    def _no_numbers(self, name: str) -> ServingError:
        message = f"answers as {name!r} with log-probabilities that are not numbers: its weights are damaged (NaN)"
        return self._error("unusable", message)

    def _error(self, kind: ServingErrorKind, sentence: str) -> ServingError:
        return ServingError(kind, f"the server at {self.url} {sentence}")


def _reason(text: str) -> str:
    """Return the message in an error's body, in one line."""
    try:
        error = json.loads(text)["error"]
        text = error if isinstance(error, str) else str(error["message"])
    except (ValueError, LookupError, TypeError):
        pass
    return " ".join(text.split())[:400] or "it gave no reason"


@dataclass(frozen=True, slots=True)
class AdapterChanges:
    """The changes made on a server."""

    plan: ResidencyPlan
    done: list[str] = field(default_factory=list[str])
    """Names of the plan that were unloaded or loaded."""
    failed: dict[str, ServingError] = field(default_factory=dict[str, ServingError])
    """The error of each name of the plan that was not."""


async def settle(
    engine: VllmClient, residency: Residency, wanted: Iterable[str], present: Mapping[str, str | None] | None = None
) -> AdapterChanges:
    """Unload and load until the server holds the wanted adapters. Raises `ServingError` when it cannot be asked at all.

    `present`: the names that the server lists; asked for unless given.
    """
    made = AdapterChanges(residency.plan(await engine.adapters() if present is None else present, wanted))
    for name in (*made.plan.unload, *made.plan.load):
        version = made.plan.load.get(name)
        try:
            if version is None or version.adapter is None:
                await engine.unload(name)
            else:
                await engine.load(name, version.adapter, version.base)
            made.done.append(name)
        except ServingError as error:
            made.failed[name] = error
    return made
