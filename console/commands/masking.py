"""`penstock masking`: tries masking rules on a body, without a gateway."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from penstock.gateway.client.console import CommandError, note

if TYPE_CHECKING:
    from penstock.gateway.model.known_secrets import Secrets

_Config = Annotated[Path, Parameter(help="TOML with `[[masking]]` rules: penstock.toml, or a file of its own.")]
_Type = Annotated[str, Parameter(name="--type", help="Its content type, such as text/event-stream; may be left out.")]


def try_rules(file: str, /, *, config: _Config = Path("penstock.toml"), content_type: _Type = "") -> None:
    """Show a body as masking rules would keep it.

    The body goes to stdout; what each rule has found to stderr. The exit code is 1 if a rule cannot be applied to the
    body, so that it would not be kept.

    Parameters
    ----------
    file
        The body: a request, an answer or a recorded stream. `-` reads stdin.
    """
    from penstock.gateway.model.facts import MASKED, MASKING_FAILED
    from penstock.gateway.model.known_secrets import BodyContext

    masker, body = _masker(config).for_call(), _read(file)
    kept = masker.body(body, BodyContext(content_type, answer=True))
    if masker.masked:
        kept = masker.without_tokens(kept, BodyContext(content_type))
    noted = masker.span_attributes
    _ = sys.stdout.buffer.write(kept)
    sys.stdout.buffer.flush()
    for rule, count in noted.get(MASKED, {}).items():
        note(f"{rule}: {count}")
    if (failed := noted.get(MASKING_FAILED)) is not None:
        raise CommandError(f"it would not be kept: {str(failed).removeprefix('failed: ')}")
    if not noted:
        note("No rule finds anything.")


def _masker(config: Path) -> Secrets:
    from penstock.gateway.config import ConfigError, load
    from penstock.gateway.model.known_secrets import NO_SECRETS
    from penstock.gateway.wire.masking.masker import MaskingCounts, masker

    try:
        rules = load(config).masking
        if not rules:
            raise CommandError(f"{config} has no [[masking]]: add a rule with a name and a pattern or paths", 2)
        return masker(rules, NO_SECRETS, MaskingCounts(quiet=True))
    except ConfigError as error:
        raise CommandError(str(error), 2) from None


def _read(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}", 2) from None
