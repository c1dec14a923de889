"""`penstock prices`: shows and updates the prices of models."""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.console.commands.terminal import show
from penstock.gateway.client.console import LOCAL, CommandError, Json, Url, note

Switch = Annotated[bool, Parameter(negative="")]


def prices(*, builtin: Switch = False, json: Json = False, gateway: Url = LOCAL) -> None:
    """Show the prices that costs are computed with.

    Below them it says which models were called that have none.

    Parameters
    ----------
    builtin
        Print the file of prices that comes with Penstock, to be edited and named in penstock.toml.
    """
    from penstock.console.commands.nouns import list_rows
    from penstock.console.views.noun import NounSelection
    from penstock.gateway.model.prices import BUILTIN

    if builtin:
        sys.stdout.write(BUILTIN.read_text())
        return
    list_rows("prices", NounSelection(), json, gateway)


def update(
    file: Path, /, *, to: Path | None = None, config: Path | None = None, as_of: str | None = None,
    dry_run: Switch = False, json: Json = False,
) -> None:  # fmt: skip
    """Take prices from a newer list.

    It says what they change. Prices that have changed keep their old row, which prices older calls. Rows without a
    source are yours and stay as they are. The gateway reads the list when it starts.

    Parameters
    ----------
    file
        A list in Penstock's format, or LiteLLM's public JSON (model_prices_and_context_window.json).
    to
        The list to change. The one that penstock.toml names if not given; it begins with what comes with Penstock.
    config
        The settings, where they are not in penstock.toml.
    as_of
        The day by which LiteLLM's list was right, such as 2026-11-29. That of the file if not given.
    dry_run
        Only say what it would change.
    """
    from penstock.console.commands.serve import config_file
    from penstock.console.views.administration import differences
    from penstock.gateway.config import ConfigError, load
    from penstock.gateway.model import price_lists
    from penstock.gateway.model.prices import Prices

    try:
        target = to or load(config_file(config)).prices
        if target is None:
            raise CommandError(
                'prices is not in penstock.toml: add prices = "prices.toml", or say by --to which list', 2
            )
        new = price_lists.load(file, None if as_of is None else date.fromisoformat(as_of))
        found = price_lists.merge_price_lists(Prices(target if target.exists() else None).file, new)
    except ConfigError as error:
        raise CommandError(str(error), 2) from None
    except ValueError:
        raise CommandError(f"--as-of: {as_of!r} is no day: write it as 2026-11-29", 2) from None
    if not dry_run:
        _write(target, price_lists.render_toml(found.file))
    show(found.differences, json, lambda: differences(found.differences))
    note(f"{'This would change' if dry_run else 'Written to'} {target}, which is as of {found.file.as_of}.")


def _write(target: Path, text: str) -> None:
    new = target.with_name(f".{target.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(target)
    except OSError as error:
        raise CommandError(f"{target} cannot be written: {error.strerror}") from None
