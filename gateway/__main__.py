"""`penstock serve`."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

app = App(name="penstock", help="A transparent gateway that records every model call of unmodified agents.")


@app.command
def serve(
    *, config: Path | None = None, data: Path | None = None, host: str | None = None, port: int | None = None
) -> None:
    """Run the gateway."""
    from gateway.app import serve

    serve(config, data, host, port)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
