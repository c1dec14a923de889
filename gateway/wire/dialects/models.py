"""The list of models: `GET /v1/models` and `GET /v1/models/{id}`. It is recorded, and nothing in it is read.

Both families have this route at the same path; an id may hold one slash, as those on the Hugging Face hub do.
"""

from __future__ import annotations

import re

from penstock.gateway.wire.dialects.opaque import OpaqueDialect

ROUTE = re.compile(r"(?:/v1)?/models(?:/[^/]+){0,2}")


class ModelsDialect(OpaqueDialect):
    name = "models"

    def matches(self, method: str, path: str) -> bool:
        """True for the list and for one model."""
        return method == "GET" and ROUTE.fullmatch(path) is not None
