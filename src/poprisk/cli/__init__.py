"""The command line: parse, run, save, show. Every error is one line and an exit code."""

import io
import sys
from typing import Annotated, NoReturn

import typer

from poprisk._version import __version__
from poprisk.cli import _analyze, _audit, _bench, _compare, _demo, _explore, _jobs, _report, _runs, _train
from poprisk.cli._lab import WithInstalledCommands
from poprisk.cli._outcome import run
from poprisk.cli._train_plan import with_share

app = typer.Typer(
    name="poprisk",
    cls=WithInstalledCommands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done; 1 a bug in poprisk, with its traceback; 2 an error that you can correct, in one line; "
    "130 interrupted by Ctrl-C or SIGTERM; 141 the output was closed early, as by `head`.",
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"poprisk {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train on population risk (the expected loss on new data), and see what a training run learned and memorized."""


app.command(epilog=_demo.EXAMPLES)(_demo.demo)
app.command(epilog=_train.EXAMPLES)(_train.train)
app.command(epilog=_analyze.EXAMPLES)(_analyze.analyze)
app.command(epilog=_report.EXAMPLES)(_report.report)
app.command(epilog=_audit.EXAMPLES)(_audit.audit)
app.command(epilog=_compare.EXAMPLES)(_compare.compare)
app.command(epilog=_runs.EXAMPLES)(_runs.runs)
app.command(epilog=_explore.EXAMPLES)(_explore.explore)
app.command(epilog=_bench.EXAMPLES)(_bench.bench)
app.add_typer(_jobs.app, name="jobs")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point of the ``poprisk`` command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the terminal or the pipe cannot show
    sys.exit(run(app, with_share(sys.argv[1:] if arguments is None else arguments)))
