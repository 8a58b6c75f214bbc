"""Names that moved in 0.2: the old ones work for one more version and say where the new ones are.

An old module (``poprisk.kernels``) is found by a finder at the end of ``sys.meta_path``; a name taken from it gives a
DeprecationWarning with the new place. ``moved_names.json`` lists them all. What moved to the lab is there only where
``poprisk-lab`` is installed.
"""

import json
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_TABLES = json.loads((Path(__file__).parent / "moved_names.json").read_text(encoding="utf-8"))
ROOT_NAMES: dict[str, str] = _TABLES["at the root"]
"""Once at the root of the package, now in a room."""
MODULES: dict[str, dict[str, str]] = _TABLES["modules"]
"""Old module → new module → the names that went there, ``old=new`` where they were renamed."""
_PACKAGES = {name.rpartition(".")[0] for name in MODULES}


def root_name(name: str) -> Any:
    """A name that was at the root, with a warning."""
    _warn(f"poprisk.{name}", f"{ROOT_NAMES[name]}.{name}", stacklevel=4)
    return getattr(import_module(ROOT_NAMES[name]), name)


def moved_attribute(module: str, name: str, stacklevel: int = 4) -> Any:
    """A name of an old module, from where it is now, with a warning.

    Raises:
        AttributeError: the old module had no such name.
        ImportError: it is in the lab, which is not installed.
    """
    for place, names in MODULES.get(module, {}).items():
        new = renamed(names).get(name)
        if new is not None:
            _warn(f"{module}.{name}", f"{place}.{new}", stacklevel)
            return getattr(_imported(place, f"{module}.{name}"), new)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def facade_attribute(module: str, name: str) -> Any:
    """What a room that kept its name answers for a name that left it; kept there, so that an import warns once.

    Raises:
        AttributeError: the room had no such name.
        ImportError: it is in the lab, which is not installed.
    """
    value = moved_attribute(module, name, stacklevel=5)
    setattr(sys.modules[module], name, value)
    return value


def renamed(names: str) -> dict[str, str]:
    """Old names and new ones, as ``MODULES`` lists them.

    >>> renamed("PerWeight Step=AffineStep")
    {'PerWeight': 'PerWeight', 'Step': 'AffineStep'}
    """
    pairs = (entry.partition("=") for entry in names.split())
    return {old: new or old for old, _, new in pairs}


def install() -> None:
    """Let old modules be found; once per process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def _imported(place: str, old: str) -> ModuleType:
    try:
        return import_module(place)
    except ModuleNotFoundError as error:
        if not place.startswith("poprisk_lab"):
            raise
        raise ImportError(
            f"{old} moved to the lab, {place}, which is not installed: pip install ./lab in a checkout of poprisk"
        ) from error


def _warn(old: str, new: str, stacklevel: int) -> None:
    warnings.warn(f"{old} is now {new}; the old name goes in version 0.3", DeprecationWarning, stacklevel=stacklevel)


class _Moved(ModuleType):
    """An old module: empty but for the memory of where its names went."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = moved_attribute(self.__name__, name)
        setattr(self, name, value)  # an import statement asks twice; one warning is enough
        return value

    def __dir__(self) -> list[str]:
        return sorted(name for names in MODULES.get(self.__name__, {}).values() for name in renamed(names))

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """``poprisk.audit`` is a function now; importing the old module of that name must not hide it."""
        if self.__name__ != "poprisk.audit":
            raise TypeError(f"module {self.__name__!r} is not callable")
        return import_module("poprisk.risk").audit(*arguments, **options)


class _Finder(MetaPathFinder, Loader):
    """Finds what was moved and only that; real modules come first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MODULES or (fullname in _PACKAGES and fullname != "poprisk"):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Moved(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""
