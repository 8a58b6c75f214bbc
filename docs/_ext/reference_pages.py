"""The pages of the API reference: one for each room, a table of its names first, then module by module."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import poprisk
from public_names import PublicModule, Room, about_module, first_line, root_names, words_of_constant


def write_reference(folder: Path, found: list[Room]) -> None:
    """Writes the pages; what is unchanged is not touched, so that a second build is quick."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {"index.rst": _index(found)} | {f"{page_name(room)}.rst": room_page(room) for room in found}
    for name, text in pages.items():
        write_if_changed(folder / name, text)
    for old in set(folder.glob("*.rst")) - {folder / name for name in pages}:
        old.unlink()


def write_if_changed(path: Path, text: str) -> None:
    """A file with a new date is read and rendered again by Sphinx."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def page_name(room: Room) -> str:
    """The page's file without its ending: a name that starts with an underscore would be hidden from some servers."""
    return room.name.replace("._", ".")


def room_page(room: Room) -> str:
    """Title, what the room is for, the table of its names, and every name in full."""
    lines = _title(room.name, "=")
    lines += _module(room.name, room.name)
    lines += _table([(target, _words(target, m)) for m in room.modules for target in m.targets])
    if elsewhere := [home for home in room.borrowed.values() if not home.startswith(f"{room.name}.")]:
        lines += ["Also here, explained in the room they come from:", ""]
        lines += _table([(home, first_line(_value(home))) for home in elsewhere])
    for m in room.modules:
        if m.documented_as != room.name:
            lines += _title(_heading(room.name, m.name), "-") + _module(m.name, room.name)
        for target in m.targets:
            lines += _entry(target, m)
    return "\n".join(lines)


def _index(found: list[Room]) -> str:
    lines = _title("API reference", "=")
    lines += [
        "Import the names you need every day from ``poprisk`` itself:",
        "",
        *_table([(home, first_line(getattr(poprisk, name))) for name, home in sorted(root_names().items())]),
        "Everything else is in one of these packages, each with one subject:",
        "",
        ".. list-table::",
        "   :widths: 30 70",
        "   :class: names",
        "",
    ]
    for room in found:
        about = without_links(about_module(room.name))
        lines += [f"   * - :doc:`{room.name} <{page_name(room)}>`", f"     - {about}"]
    lines += ["", ".. toctree::", "   :hidden:", ""]
    return "\n".join([*lines, *(f"   {room.name} <{page_name(room)}>" for room in found), ""])


def _title(text: str, underline: str) -> list[str]:
    return [text, underline * len(text), ""]


def _heading(room: str, module: str) -> str:
    """The module's name below its room."""
    return f"``{module.removeprefix(f'{room}.')}``"


def _module(name: str, room: str) -> list[str]:
    """What a module says about itself; only rooms are in the index, because a module may share a function's name."""
    no_index = ["   :no-index:"] if name != room else []
    return [f".. automodule:: {name}", "   :no-members:", *no_index, ""]


def _words(target: str, module: PublicModule) -> str:
    value = _value(target)
    if inspect.isclass(value) or inspect.isroutine(value):
        return first_line(value)
    return words_of_constant(module.name, target.rpartition(".")[2])


def _table(rows: list[tuple[str, str]]) -> list[str]:
    if not rows:
        return []
    lines = [".. list-table::", "   :widths: 30 70", "   :class: names", ""]
    for target, about in rows:
        lines += [f"   * - :py:obj:`~{target}`", f"     - {without_links(about)}"]
    return [*lines, ""]


def without_links(text: str) -> str:
    """References as code: out of its class, a method's short name says nothing to Sphinx.

    >>> without_links("Calls :meth:`advance` of :class:`~poprisk.runs.Run`, :math:`n` times.")
    'Calls ``advance`` of ``Run``, :math:`n` times.'
    """
    return re.sub(r":(?!math)[a-z:]+:`(?:~[\w.]*\.)?([^`]+)`", r"``\1``", text)


def _entry(target: str, module: PublicModule) -> list[str]:
    value = _value(target)
    if inspect.isclass(value):
        bases = ["   :show-inheritance:"] if value.__bases__ != (object,) else []
        return [f".. autoclass:: {target}", "   :members:", *bases, ""]
    if inspect.isroutine(value):
        return [f".. autofunction:: {target}", ""]
    # autodoc would look for a constant's words where it is handed on, and show those of its class instead.
    name = target.removeprefix(f"{module.documented_as}.")
    lines = [f".. py:currentmodule:: {module.documented_as}", "", f".. py:data:: {name}", ""]
    return [*lines, f"   {words_of_constant(module.name, name)}", ""]


def _value(target: str) -> Any:
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name)
