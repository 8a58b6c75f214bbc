"""Commands that other installed projects add by entry point, such as ``poprisk reproduce`` of the lab."""

from contextlib import suppress
from importlib.metadata import entry_points

import typer

from poprisk.errors import MissingLabError

GROUP = "poprisk_commands"
"""Group of entry points; each is a function that takes the ``typer.Typer`` app and adds commands to it."""


def add_lab_commands(app: typer.Typer) -> None:
    """Add the commands that are installed; without the lab, ``reproduce`` says how to install it.

    An entry point whose package cannot be imported is skipped, so that it does not break the other commands.
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
    """Reproduce the experiments of the paper. Needs the lab: pip install ./lab in a checkout of the repository."""
    raise MissingLabError("poprisk reproduce")
