"""The command line: parse, run, save, show; whatever goes wrong is one line and an exit code."""

import sys
from typing import Annotated, NoReturn

import typer

from poprisk import __version__
from poprisk.cli import analyze, audit, bench, demo, explore, report, reproduce, train
from poprisk.cli.outcome import run

app = typer.Typer(
    name="poprisk",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"poprisk {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Train on population risk instead of training loss, and see what a training run learned and memorized."""


app.command(epilog=demo.EXAMPLES)(demo.demo)
app.command(epilog=train.EXAMPLES)(train.train)
app.command(epilog=analyze.EXAMPLES)(analyze.analyze)
app.command(epilog=report.EXAMPLES)(report.report)
app.command(epilog=audit.EXAMPLES)(audit.audit)
app.command(epilog=explore.EXAMPLES)(explore.explore)
app.command(epilog=reproduce.EXAMPLES)(reproduce.reproduce)
app.command(epilog=bench.EXAMPLES)(bench.bench)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point of the ``poprisk`` command."""
    sys.exit(run(app, arguments))
