"""Functions of a script outside any package, ``"folder/script.py:function"``, loaded as Python would run the file."""

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from poprisk.errors import DataError

_FILES: dict[str, Path] = {}
"""Loaded scripts, by the name of their module."""


def is_script(path: str) -> bool:
    """Whether an import path names a function in a file, not in a module.

    >>> is_script("tasks/mine.py:make_task"), is_script("package.module:function")
    (True, False)
    """
    return path.rpartition(":")[0].endswith(".py")


def split_script(path: str) -> tuple[Path, str]:
    """The absolute path of the file, and the function's name.

    >>> file, name = split_script("tasks/mine.py:make_task")
    >>> file.is_absolute(), file.name, name
    (True, 'mine.py', 'make_task')
    """
    file, _, name = path.rpartition(":")
    return Path(file).expanduser().resolve(), name


def script_of(module: str | None) -> Path | None:
    """The file of a module that :func:`load_script` loaded; None for any other module."""
    return None if module is None else _FILES.get(module)


def load_script(file: Path) -> ModuleType:
    """Load a script as a module; it is executed again only if the file has changed. Its ``__pycache__`` is not used.

    The script's folder is put first in ``sys.path``, as when Python runs it, so that the script can import files beside
    it; code under ``if __name__ == "__main__":`` is not executed.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the script {file} ({error.strerror or error}): check the path") from None
    digest = hashlib.sha256(str(file).encode() + b"\0" + content).hexdigest()[:12]
    name = f"poprisk_script_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    sys.modules[name], _FILES[name] = module, file
    try:
        exec(compile(content, str(file), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name], _FILES[name]
        exits = isinstance(error, SystemExit)
        advice = "put code that exits the process under if __name__ == '__main__':" if exits else "correct it there"
        raise DataError(f"the script must run, but failed: {where(error, file)}; {advice}") from error
    except BaseException:
        del sys.modules[name], _FILES[name]
        raise
    return module


def function_of(file: Path, name: str) -> Any:
    """A function of a script."""
    module = load_script(file)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            own = [k for k, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]
            listed = f"it defines {', '.join(own)}" if own else "it defines no function"
            raise DataError(f"{file} has no {name!r}: {listed}; name what it defines")
        found = getattr(found, part)
    return found


def where(error: BaseException, file: Path | None = None) -> str:
    """Describe an error in one line, with its location: in the script if the traceback contains it, else innermost.

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
