"""What the lab adds to the command line of poprisk."""

import typer


def add_commands(app: typer.Typer) -> None:
    """Add ``poprisk reproduce``."""
    from poprisk_lab import reproduce

    app.command(epilog=reproduce.EXAMPLES)(reproduce.reproduce)
