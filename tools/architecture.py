"""Writes docs/architecture.md and docs/architecture.svg: the rooms, the contract between them, and the main walks.

python tools/architecture.py          # rewrite both
python tools/architecture.py --check  # exit 1 if they differ from the tree
"""

import ast
import html
import re
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from poprisk._core.store import write_text

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src/poprisk"
DATA = ROOT / "docs/architecture.toml"
PAGE = ROOT / "docs/architecture.md"
PICTURE = ROOT / "docs/architecture.svg"
COLOURS = {"Train": "#d9e8f6", "Know": "#fbe3cf", "See": "#dff0e0", "The record": "#f3ecd2"}
_PYPROJECT = ROOT / "pyproject.toml"


def layers() -> list[list[str]]:
    """The rooms as the import contract stacks them, the uppermost layer first; single modules are left out."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    stacked = [[re.sub(r"[()\s]", "", name) for name in layer.split("|")] for layer in contracts[0]["layers"]]
    rooms = [[name for name in layer if (SOURCE / name).is_dir()] for layer in stacked]
    return [layer for layer in rooms if layer]


def about(path: Path) -> str:
    """The first sentence of a module's docstring."""
    words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(words.split("\n\n")[0].split())


def public_names(room: str) -> list[str]:
    """What the room's facade lists in ``__all__``."""
    for node in ast.parse((SOURCE / room / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(getattr(each, "id", "") == "__all__" for each in node.targets):
            return list(ast.literal_eval(node.value))
    return []


def contracts() -> list[dict[str, Any]]:
    """The contracts of import-linter."""
    return tomllib.loads(_PYPROJECT.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]


def page(data: dict[str, Any]) -> str:
    """The whole page."""
    rows = []
    for room in (room for layer in layers() for room in layer):
        names = ", ".join(f"`{name}`" for name in public_names(room)[:6])
        more = len(public_names(room)) - 6
        names += f" and {more} more" if more > 0 else ""
        rows.append(f"| `{room}` | {data['room'][room][0]} | {about(SOURCE / room / '__init__.py')} | {names or '–'} |")
    parts = [
        "# Architecture",
        _filled(
            "The library consists of a few rooms, each a package with one subject. A room imports only rooms below it, "
            "and only through their facade: the `__init__.py`, whose `__all__` lists what is public. Modules whose "
            "names start with an underscore are private to their room. The lab (`lab/`, a project of its own) holds "
            "what tests the paper's claims; it imports the library, and the library never imports it."
        ),
        "![The rooms of the library, stacked in the order in which they may import each other](architecture.svg)",
        "## Rooms, top to bottom",
        "\n".join(["| room | for | what it holds | public names |", "| --- | --- | --- | --- |", *rows]),
        "## The contract",
        "`lint-imports` (part of `make lint`) checks that:",
        "\n".join(f"- {contract['name']}" for contract in contracts()),
        _filled(
            "Registries that name what they load by strings are checked by `tests/test_house.py`: each string "
            "resolves and leads downwards."
        ),
        "## Walks",
        "The files that a value passes through, in order.",
    ]
    for walk in data["walk"]:
        parts += [f"### {walk['title']}", "\n".join(_walk_lines(walk["files"]))]
    return "\n\n".join(parts) + "\n"


def picture(data: dict[str, Any]) -> str:
    """The rooms as boxes, one row for each layer."""
    width, height, gap = 760, 58, 10
    boxes, y = [], gap
    for layer in layers():
        each = (width - gap * (len(layer) + 1)) / len(layer)
        for place, room in enumerate(layer):
            boxes += _box(room, *data["room"][room], gap + place * (each + gap), y, each, height)
        y += height + gap
    boxes += [f'<text x="{width / 2}" y="{y + 14}" text-anchor="middle" class="note">imports go down, never up</text>']
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 26}" role="img">',
            "<style>text{font-family:sans-serif;fill:#1d2733}.name{font-size:17px;font-weight:600}"
            ".note{font-size:12.5px}</style>",
            f'<rect width="{width}" height="{y + 26}" fill="#ffffff"/>',
            *boxes,
            "</svg>",
            "",
        ]
    )


def _box(room: str, purpose: str, words: str, x: float, y: float, width: float, height: float) -> list[str]:
    return [
        f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{height}" rx="7" '
        f'fill="{COLOURS.get(purpose, "#eceff3")}" stroke="#7b8794"/>',
        f'<text x="{x + 14:.0f}" y="{y + 24}" class="name">{html.escape(room)}</text>',
        f'<text x="{x + width - 14:.0f}" y="{y + 24}" text-anchor="end" class="note">{html.escape(purpose)}</text>',
        f'<text x="{x + 14:.0f}" y="{y + 44}" class="note">{html.escape(words)}</text>',
    ]


def _walk_lines(files: list[str]) -> list[str]:
    return [f"{place}. `{file}`: {about(SOURCE / file)}" for place, file in enumerate(files, start=1)]


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    """Write the page and the picture, or compare them."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    made = {PAGE: page(data), PICTURE: picture(data)}
    stale = [path.name for path, text in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        sys.exit(f"{', '.join(stale)}: differs from the tree, run python tools/architecture.py" if stale else 0)
    for path, text in made.items():
        write_text(path, text)


if __name__ == "__main__":
    main()
