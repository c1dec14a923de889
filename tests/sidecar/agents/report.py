"""An agent that says what it was given: the last line is its output."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

NAMES = ("PENSTOCK", "OPENAI", "ANTHROPIC", "OTEL", "TRACEPARENT", "SSL_CERT", "NODE_EXTRA")


def main() -> None:
    """Report."""
    file = os.environ.get("PENSTOCK_INPUT_FILE")
    print("a line that is no JSON")
    print(
        json.dumps(
            {
                "argv": sys.argv[1:],
                "stdin": sys.stdin.read(),
                "env": {name: value for name, value in os.environ.items() if name.startswith(NAMES)},
                "file": None if file is None else len(Path(file).read_text()),
                "cwd": str(Path.cwd()),
            }
        )
    )


if __name__ == "__main__":
    main()
