"""Exit codes of the commands: 0, 2 for errors that the user can fix, 130 for an interrupt, 141 for a closed output."""

import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer

from poprisk.errors import DataError, PopRiskError, PopRiskWarning

EXIT_WRONG, EXIT_INTERRUPTED, EXIT_CLOSED = 2, 130, 141
_HERE = str(Path(__file__).resolve().parents[1])

# Depending on its version, typer depends on click or contains it; its errors have this base class in both cases.
_CommandLineError: type[Exception] = next(b for b in typer.BadParameter.__mro__ if b.__name__ == "ClickException")


class Interrupted(Exception):
    """The user stopped the command; the message says what is kept on disk."""


def run(app: typer.Typer, arguments: list[str] | None) -> int:
    """Run a command. Returns its exit code."""
    kept = ""
    with warnings.catch_warnings(), _ends_like_an_interrupt():
        _say_warnings()
        try:
            code: Any = app(arguments, standalone_mode=False)
        except _CommandLineError as error:
            return fail(_usage(error))
        except PopRiskError as error:
            return fail(str(error))
        except SystemExit as ended:
            if not isinstance(ended.__context__, BrokenPipeError):
                raise
            return EXIT_CLOSED  # rich or typer saw that nobody reads on; as other programs end by SIGPIPE
        except OSError as error:
            return fail(_of_path(error))
        except MemoryError as error:
            return fail(f"memory ran out ({error or 'MemoryError'}): use --memory, or a smaller model or batch")
        except (KeyboardInterrupt, typer.Abort, Interrupted) as interrupt:
            kept, code = str(interrupt), EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:
        note(f"interrupted; {kept or 'nothing was written'}")
    return code if isinstance(code, int) else 0


def fail(message: str) -> int:
    """Print an error on one line; nothing if the help was printed instead."""
    if message.strip():
        note(f"error: {message}")
    return EXIT_WRONG


def _usage(error: Any) -> str:
    """An error of the command line, and where to read what is expected; empty if the help was printed instead."""
    said, context = error.format_message(), getattr(error, "ctx", None)
    command = "poprisk" if context is None else context.command_path.replace("main", "poprisk")
    return f"{said.rstrip('.')}; see {command} --help" if said.strip() else ""


def _of_path(error: OSError) -> str:
    """An error of a path, or of a file that is written."""
    if error.filename is None:
        found = f"a file must be read or written, but that failed: {error.strerror}; check the free space and limits"
        return found if error.errno else str(error)
    where = error.filename if isinstance(error.filename, str) else repr(error.filename)
    return f"expected a path that can be used, got {where}: {error.strerror}; check the path and its permissions"


def note(message: str) -> None:
    """Print a line to stderr, beside the results; the work goes on if nobody can read it."""
    with suppress(OSError):
        typer.echo(f"poprisk: {_line(message)}", err=True)


@contextmanager
def _ends_like_an_interrupt() -> Iterator[None]:
    """Let SIGTERM, by which a scheduler asks a process to end, be answered as Ctrl-C."""
    ours = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def interrupt_says(kept: Callable[[], str]) -> Iterator[None]:
    """On an interrupt, say what is kept on disk, if anything."""
    try:
        yield
    except KeyboardInterrupt:
        if not (words := kept()):
            raise
        raise Interrupted(words) from None


@contextmanager
def interrupt_waits(until: str) -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C, or SIGTERM, set a flag that is checked between steps; a second one interrupts immediately."""
    asked = False

    def answer(*_: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        note(f"stopping after {until}; press Ctrl-C again to stop immediately")

    before = {each: signal.signal(each, answer) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def user_code(doing: str) -> Iterator[None]:
    """Report errors in the user's code on one line, with their place."""
    try:
        yield
    except (PopRiskError, _CommandLineError, typer.Exit, typer.Abort, Interrupted, KeyboardInterrupt):
        raise
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        from poprisk._core.store import where

        frames = traceback.extract_tb(error.__traceback__)
        if frames and str(Path(frames[-1].filename).resolve()).startswith(_HERE):
            raise  # a bug in this library: show its traceback
        raise DataError(f"{doing} failed: {where(error)}; correct what is there, and try again") from error


def _say_warnings() -> None:
    """Print warnings of this library as notes of the command line; others as Python does."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
        if issubclass(category, PopRiskWarning):
            note(f"warning: {message}")
        else:
            usual(message, category, *place, **options)

    warnings.showwarning = show


def _line(message: str) -> str:
    from poprisk._core.text import one_line

    return one_line(message)
