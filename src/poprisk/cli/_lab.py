"""Commands that other installed projects add, ``poprisk reproduce`` of the lab among them, by entry point."""

from contextlib import suppress
from importlib.metadata import entry_points

import typer

from poprisk.errors import MissingLabError

GROUP = "poprisk_commands"
"""Entry points of this group name a function that takes the command line's ``typer.Typer`` and adds to it."""


def add_lab_commands(app: typer.Typer) -> None:
    """Add what is installed; without the lab, ``reproduce`` says how to get it.

    An entry point whose package can no longer be imported is skipped: it must not take the other commands along.
    """
    added = set()
    for each in entry_points(group=GROUP):
        with suppress(ImportError):
            each.load()(app)
            added.add(each.name)
    if "reproduce" not in added:
        app.command(name="reproduce", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
            _reproduce
        )


def _reproduce(context: typer.Context) -> None:
    """Run the paper's experiments again; needs the lab, which is installed from a checkout: pip install ./lab."""
    raise MissingLabError("poprisk reproduce")
