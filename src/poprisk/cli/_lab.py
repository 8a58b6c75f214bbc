"""Commands that other installed projects add by entry point, such as ``poprisk reproduce`` of the lab."""

from contextlib import suppress
from importlib.metadata import entry_points
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from poprisk.errors import MissingLabError

GROUP = "poprisk_commands"
"""Group of entry points; each is a function that takes the ``typer.Typer`` app and adds commands to it."""


class WithInstalledCommands(TyperGroup):
    """A group that adds the installed commands when it is made, which is when a command runs.

    Importing ``poprisk.cli`` imports no other project, so those projects can import it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands.update(get_group(_installed(self.rich_markup_mode)).commands)


def _installed(markup: Any) -> typer.Typer:
    """The commands that are installed; without the lab, ``reproduce`` says how to install it.

    An entry point whose package cannot be imported is skipped, so that it does not break the other commands.
    """
    app, added = typer.Typer(rich_markup_mode=markup), set()
    for each in entry_points(group=GROUP):
        with suppress(ImportError):
            each.load()(app)
            added.add(each.name)
    if "reproduce" not in added:
        app.command(name="reproduce", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
            _reproduce
        )
    return app


def _reproduce(context: typer.Context) -> None:
    """Reproduce the experiments of the paper. Needs the lab: pip install ./lab in a checkout of the repository."""
    raise MissingLabError("poprisk reproduce")
