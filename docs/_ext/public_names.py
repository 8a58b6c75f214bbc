"""Which names are public: what a room's facade lists in ``__all__``, and in open rooms what their modules define."""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import poprisk

SOURCE = Path(poprisk.__path__[0])
NEEDS_TRITON = "poprisk.optim.backends._cuda_kernel"
PRIVATE = "poprisk._core"
# Rooms from whose modules one imports: all of them here, beside what the facade hands on.
OPEN_ROOMS = ("poprisk.integrations", "poprisk.theory")
OPEN_MODULES = ("poprisk.errors",)
# Not handed on by their rooms, but what a public function takes or gives back.
MENTIONED: dict[str, tuple[str, ...]] = {}


@dataclass(frozen=True)
class PublicModule:
    """The public names of one module, and under which dotted prefix they are documented."""

    name: str
    documented_as: str
    names: tuple[str, ...]

    @property
    def targets(self) -> tuple[str, ...]:
        """Dotted names as the reference lists them."""
        return tuple(f"{self.documented_as}.{name}" for name in self.names)


@dataclass
class Room:
    """One page of the reference: modules with their names, and names that are explained on another page."""

    name: str
    modules: list[PublicModule] = field(default_factory=list)
    borrowed: dict[str, str] = field(default_factory=dict)
    """Name below the room → dotted name where it is explained."""


def rooms() -> list[Room]:
    """All pages, in the order of their names, the package itself left out."""
    children = sorted(m.name for m in pkgutil.iter_modules(poprisk.__path__, "poprisk."))
    found = [_room(name) for name in children if name not in ("poprisk.cli", PRIVATE) and "._" not in name]
    return [room for room in found if room.modules or room.borrowed]


def root_names() -> dict[str, str]:
    """The names of ``import poprisk`` and the dotted names where they are explained."""
    homes = documented_at(rooms())
    return {name: homes[_defined_at(getattr(poprisk, name))] for name in poprisk.__all__}


def handed_on(module: str) -> tuple[str, ...]:
    """``__all__``, or what is imported under its own name ("from a import b as b") and nothing else, as in a stub."""
    tree = _parsed(module)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return _listed(tree) or tuple(dict.fromkeys(a.name for node in imports for a in node.names if a.asname == a.name))


def own_names(module: str) -> tuple[str, ...]:
    """The functions and classes that a module defines without underscore; with an ``__all__``, those of them in it.

    The module is read and not imported: it may need a package that is not there.
    """
    tree = _parsed(module)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = dict.fromkeys(n.name for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_"))
    listed = _listed(tree)
    return tuple(name for name in names if not listed or name in listed)


def documented_at(found: list[Room]) -> dict[str, str]:
    """Where an object is defined → the dotted name under which it is explained."""
    return {f"{m.name}.{name}": f"{m.documented_as}.{name}" for room in found for m in room.modules for name in m.names}


def aliases(found: list[Room]) -> dict[str, str]:
    """Every other dotted name that means a documented object → the documented one."""
    known = {defined: home for defined, home in documented_at(found).items() if defined != home}
    known |= {f"{room.name}.{name}": home for room in found for name, home in room.borrowed.items()}
    return known | {f"poprisk.{name}": home for name, home in root_names().items()}


def public_targets(found: list[Room]) -> set[str]:
    """Every dotted name that the reference must explain."""
    return {target for room in found for module in room.modules for target in module.targets}


def first_line(documented: Any) -> str:
    """The first paragraph of a docstring, which is what a table shows."""
    return _first_paragraph(inspect.getdoc(documented) or "")


def about_module(module: str) -> str:
    """The first paragraph of a module's docstring."""
    return _first_paragraph(ast.get_docstring(_parsed(module)) or "")


def words_of_constant(module: str, name: str) -> str:
    """The docstring under an assignment, or the comment above it.

    Raises:
        LookupError: there is neither.
    """
    lines, body = _file(module).read_text(encoding="utf-8").splitlines(), _parsed(module).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if name not in _assigned(node):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            return " ".join(after.value.value.split())
        above = takewhile(lambda line: line.startswith("#"), reversed(lines[: node.lineno - 1]))
        if comment := " ".join(line.removeprefix("#").strip() for line in reversed(list(above))):
            return comment
    raise LookupError(f"{module}.{name} is public and has no words: write a docstring under it")


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [each.id for each in targets if isinstance(each, ast.Name)]


def modules_in(package: str) -> Iterator[str]:
    """Dotted names of all modules below a package, packages themselves left out."""
    location = SOURCE.joinpath(*package.split(".")[1:])
    for each in pkgutil.walk_packages([str(location)], f"{package}."):
        if not each.ispkg and each.name != NEEDS_TRITON:
            yield each.name


def known_as(aliases: dict[str, str], name: str) -> list[str]:
    """What a dotted name may stand for: itself an alias, or a member of one.

    >>> known_as({"poprisk.Run": "poprisk.runs.Run"}, "poprisk.Run.load")
    ['poprisk.runs.Run.load']
    """
    head, tail, found = name, "", []
    while head:
        if head in aliases:
            found.append(aliases[head] + tail)
        head, _, last = head.rpartition(".")
        tail = f".{last}{tail}"
    return found


def only_one(name: str, objects: Iterable[str]) -> list[str]:
    """The one documented object with this last part of its name, if there is just one.

    >>> only_one("Run", ["poprisk.runs.Run", "poprisk.runs.Run.load"]), only_one("of", ["a.of", "b.of"])
    (['poprisk.runs.Run'], [])
    """
    found = [each for each in objects if each.endswith(f".{name}")]
    return found if len(found) == 1 else []


def exists(name: str) -> bool:
    """Whether a dotted name of this package can be imported: modules as far as there are, then attributes.

    >>> exists("poprisk.runs._run.Run.load"), exists("poprisk.runs._run.Runs"), exists("torch.Tensor")
    (True, False, False)
    """
    parts = name.split(".")
    if parts[0] != "poprisk":
        return False
    found, depth = poprisk, 1
    while depth < len(parts) and hasattr(found, "__path__") and find_spec(".".join(parts[: depth + 1])):
        depth += 1
        found = importlib.import_module(".".join(parts[:depth]))
    for attribute in parts[depth:]:
        if not hasattr(found, attribute):
            return False
        found = getattr(found, attribute)
    return True


def missing(wanted: Iterable[str], objects: Container[str]) -> list[str]:
    """Names that are wanted and not there."""
    return [target for target in wanted if target not in objects]


def _room(name: str) -> Room:
    room = Room(name)
    if not SOURCE.joinpath(*name.split(".")[1:]).is_dir():
        if name in OPEN_MODULES:
            room.modules.append(PublicModule(name, name, own_names(name)))
        return room
    _add_handed_on(room)
    given = {target.rpartition(".")[2] for module in room.modules for target in module.targets}
    for each in modules_in(name) if name in OPEN_ROOMS else ():
        names = tuple(n for n in own_names(each) if n not in given) if "._" not in each else ()
        if names:
            room.modules.append(PublicModule(each, each, names))
            lent = {name: home for name, home in _imported(each).items() if name in _listed(_parsed(each))}
            room.borrowed |= {f"{each.removeprefix(name + '.')}.{key}": f"{home}.{key}" for key, home in lent.items()}
    return room


def _add_handed_on(room: Room) -> None:
    by_home: dict[str, list[str]] = {}
    for name in handed_on(room.name):
        by_home.setdefault(_home_of(room.name, name), []).append(name)
    for home, names in by_home.items():
        if home.startswith((f"{room.name}.", f"{PRIVATE}.")):
            room.modules.append(PublicModule(home, room.name, tuple(names)))
        else:
            room.borrowed |= {name: _shown_at(home, name) for name in names}
    for home, extra in MENTIONED.items():
        if home.startswith(f"{room.name}."):
            room.modules.append(PublicModule(home, home, extra))


def _home_of(module: str, name: str) -> str:
    """The module that defines a name; of a constant, the one it was imported from."""
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__module__
    return _imported(module)[name]


def _imported(module: str) -> dict[str, str]:
    """The names that a module imports, and from where."""
    imports = [node for node in ast.walk(_parsed(module)) if isinstance(node, ast.ImportFrom)]
    return {a.name: node.module for node in imports for a in node.names if node.module}


def _shown_at(home: str, name: str) -> str:
    """The room that owns the module, where it hands the name on; the module itself otherwise."""
    room = ".".join(home.split(".")[:2])
    return f"{room}.{name}" if name in handed_on(room) else f"{home}.{name}"


def _defined_at(value: Any) -> str:
    return f"{value.__module__}.{value.__name__}"


def _first_paragraph(text: str) -> str:
    return " ".join(text.split("\n\n", maxsplit=1)[0].split())


def _file(module: str) -> Path:
    place = SOURCE.joinpath(*module.split(".")[1:])
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def _parsed(module: str) -> ast.Module:
    return ast.parse(_file(module).read_text(encoding="utf-8"))


def _listed(tree: ast.Module) -> tuple[str, ...]:
    """What ``__all__`` lists, where it is written out."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and "__all__" in _assigned(node):
            return tuple(ast.literal_eval(node.value))
    return ()
