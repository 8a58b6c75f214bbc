"""Functions of a script that no package holds: ``"folder/script.py:function"``, loaded as Python would run the file."""

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from poprisk.errors import DataError

_FILES: dict[str, Path] = {}
"""The scripts that were loaded, by the name of their module."""


def is_script(path: str) -> bool:
    """Whether a text names a function of a file, not of a module.

    >>> is_script("tasks/mine.py:make_task"), is_script("package.module:function")
    (True, False)
    """
    return path.rpartition(":")[0].endswith(".py")


def split_script(path: str) -> tuple[Path, str]:
    """The whole path of the file, and the function's name.

    >>> file, name = split_script("tasks/mine.py:make_task")
    >>> file.is_absolute(), file.name, name
    (True, 'mine.py', 'make_task')
    """
    file, _, name = path.rpartition(":")
    return Path(file).expanduser().resolve(), name


def script_of(module: str | None) -> Path | None:
    """The file behind a module that :func:`load_script` made; None for any other."""
    return None if module is None else _FILES.get(module)


def load_script(file: Path) -> ModuleType:
    """The module of a script, run once for each content that the file has had.

    The script's folder joins ``sys.path`` in front, as when Python runs it, so that it finds the files beside it; what
    stands under ``if __name__ == "__main__":`` is not run.

    Raises:
        DataError: there is no such file, or it fails; the message has the line.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the script {file} ({error.strerror or error}): name one that is there") from None
    digest = hashlib.sha256(str(file).encode() + b"\0" + content).hexdigest()[:12]
    name = f"poprisk_script_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    sys.modules[name], _FILES[name] = module, file
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name], _FILES[name]
        advice = "; keep what ends the process under if __name__ == '__main__':" if _is_exit(error) else ""
        raise DataError(f"{where(error, file)}{advice}") from error
    except BaseException:
        del sys.modules[name], _FILES[name]
        raise
    return module


def function_of(file: Path, name: str) -> Any:
    """A function of a script.

    Raises:
        DataError: the script cannot be loaded, or has nothing of that name.
    """
    module = load_script(file)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            own = [k for k, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]
            listed = f"it defines {', '.join(own)}" if own else "it defines no function"
            raise DataError(f"{file} has no {name!r}: {listed}")
        found = getattr(found, part)
    return found


def where(error: BaseException, file: Path | None = None) -> str:
    """An error as one line that names its place: in the script if it passed through it, else the innermost one.

    >>> try:
    ...     _ = [][0]
    ... except IndexError as error:
    ...     where(error).endswith("line 2: IndexError: list index out of range")
    True
    """
    frames = traceback.extract_tb(error.__traceback__)
    scripts = {str(path) for path in _FILES.values()} | ({str(file)} if file is not None else set())
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}, line {error.lineno}"
    else:
        frame = next((f for f in reversed(frames) if f.filename in scripts), frames[-1] if frames else None)
        place = "" if frame is None else f"{frame.filename}, line {frame.lineno}"
    text = str(error).strip().splitlines()
    return f"{place}: {type(error).__name__}{f': {text[0]}' if text else ''}"


def _is_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit)
