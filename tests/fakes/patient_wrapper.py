"""`penstock mcp wrap` for tests, started as `python -m fakes.patient_wrapper mcp wrap …`: at its end it waits as long
as a test would for a gateway that is busy. A real one leaves what is not sent after a second to the next wrapper.
"""

from __future__ import annotations

import sys

from fakes.process import PATIENCE

from penstock.console.main import main
from penstock.sidecar.stdio import command

if __name__ == "__main__":
    command.LAST_S = PATIENCE  # pyright: ignore[reportConstantRedefinition]
    main(sys.argv[1:])
