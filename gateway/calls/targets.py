"""Checks the targets of calls."""

from __future__ import annotations

import re
from urllib.parse import unquote

from penstock.gateway.http.errors import ClientFault
from penstock.gateway.http.redact import url as redact_url


def check_target(target: str) -> None:
    """Raise `ClientFault` for a target that is no path, or leads out of one."""
    if not target.startswith("/"):
        shown = redact_url(target[:80])
        raise ClientFault(400, "target", f"the request target {shown!r} must be a path, starting with /", "target")
    if "/." in target or "%2" in target:
        path = target.partition("?")[0].lower().replace("%2e", ".").replace("%2f", "/")
        if {".", ".."} & set(path.split("/")):
            raise ClientFault(400, "target", "the path may not hold the segments . and ..", "target")


_OPERATION = re.compile(
    r"/+(inference/+)?(v1/+)*(load_lora_adapter|unload_lora_adapter|adapters|pause|resume|sleep|wake_up|abort_requests|"
    r"collective_rpc|init_weight_transfer_engine|start_weight_update|update_weights|finish_weight_update|"
    r"update_weight_version|weight_checker|release_kv_cache_memory|reset_[a-z]+_cache|scale_elastic_ep)(/.*)?"
)
"""Paths that operate a vLLM server: some need no key, and for the others the gateway would send its own."""


def check_path(path: str) -> None:
    """Raise `ClientFault` for a path that operates the server: an agent may use a model, not change a shared server."""
    if _OPERATION.fullmatch(unquote(path)):
        message = f"the path {redact_url(path[:80])!r} operates the model server; agents may not do that"
        raise ClientFault(403, "path", message, "path")
