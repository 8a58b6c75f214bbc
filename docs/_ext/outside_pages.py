"""Markdown pages from outside of this folder, taken in with their links and pictures; what is not there is left out."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from reference_pages import write_if_changed

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "lab/docs/*.md",
    "lab/results/*.md",
    "examples/*/README.md",
)
_OTHER_PAGES = "<!-- other pages -->"
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"(^(`{3,}|~{3,}).*?^\2[ \t]*$)", re.MULTILINE | re.DOTALL)


def outside_pages(root: Path = ROOT) -> dict[Path, str]:
    """The pages that there are, and the name each has here: ``examples/trl/README.md`` is ``examples-trl``."""
    found = [path for pattern in PATTERNS for path in sorted(root.glob(pattern))]
    return {path: page_name(path.relative_to(root)) for path in found}


def page_name(path: Path) -> str:
    """One flat name for a path below the root.

    >>> page_name(Path("examples/trl/README.md")), page_name(Path("README.md"))
    ('examples-trl', 'readme')
    """
    parts = path.with_suffix("").parts
    return "-".join(parts[:-1] if len(parts) > 1 and parts[-1] == "README" else parts).lower()


def write_outside_pages(folder: Path, source: Path, root: Path = ROOT) -> None:
    """Copies the pages into a folder of the sources, with links that hold there."""
    pages = outside_pages(root)
    for path, name in pages.items():
        write_if_changed(folder / f"{name}.md", adapt_links(path.read_text(encoding="utf-8"), path, source, root))
    for old in set(folder.glob("*.md")) - {folder / f"{name}.md" for name in pages.values()}:
        old.unlink()


def with_other_pages(text: str, source: Path) -> str:
    """Puts, for a comment ``other pages``, a list of the pages in this folder that none of its lists names."""
    listed = {line for path in source.glob("*.md") for line in path.read_text(encoding="utf-8").splitlines()}
    others = [path.stem for path in sorted(source.glob("*.md")) if path.stem not in {*listed, "index"}]
    lines = ["```{toctree}", ":caption: More", ":maxdepth: 1", "", *others, "```"]
    return text.replace(_OTHER_PAGES, "\n".join(lines) if others else "")


def with_optional_pages(text: str, source: Path) -> str:
    """A line ``? pattern`` stands for the pages that match it, none if there are none, which Sphinx would not allow."""

    def pages(match: re.Match[str]) -> str:
        found = sorted(path.relative_to(source).with_suffix("") for path in source.glob(f"{match[1]}.md"))
        return "".join(f"{path.as_posix()}\n" for path in found)

    return re.sub(r"^\? (\S+)\n", pages, text, flags=re.MULTILINE)


def adapt_links(text: str, path: Path, source: Path, root: Path = ROOT) -> str:
    """Links to pages and pictures of the repository lead to where they are here; those to other files become text.

    A link to nothing is left for Sphinx to complain of.
    """
    pages = outside_pages(root)

    def link(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        place, _, anchor = target.partition("#")
        if not place or re.match(r"[a-z]+:", place):
            return match[0]
        file = (path.parent / place).resolve()
        if not file.exists():
            return match[0]
        here = _address(file, pages, source, root)
        if here is None:
            return words
        return f"{picture}[{words}]({here}{'#' + anchor if anchor else ''})"

    return _outside_code(text, lambda prose: _LINK.sub(link, prose))


def _address(file: Path, pages: dict[Path, str], source: Path, root: Path) -> str | None:
    """Where a file is found here, from the root of the sources; pictures from elsewhere are copied."""
    if file in pages:
        return f"/pages/{pages[file]}.md"
    if file.is_relative_to(source) and file.is_file():
        return f"/{file.relative_to(source).as_posix()}"
    if file.suffix in {".png", ".svg", ".jpg"} and file.is_file():
        copy = source / "pages" / "pictures" / "-".join(file.relative_to(root).parts)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        return f"/pages/pictures/{copy.name}"
    return None


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Changes prose and leaves fenced blocks alone."""
    pieces = _FENCE.split(text)
    kept = []
    for i in range(0, len(pieces), 3):
        kept.append(change(pieces[i]))
        kept.extend(pieces[i + 1 : i + 2])
    return "".join(kept)
