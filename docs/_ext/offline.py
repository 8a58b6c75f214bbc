"""Pages that fetch nothing: scripts, styles, pictures and frames must come with them."""

import re
from pathlib import Path

_FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//|<link\b[^>]*\bhref=["']?(?:https?:)?//""", re.I
)


def fetches(page: str) -> bool:
    """Whether a browser that opens the page asks a server for something. A link to follow is none.

    >>> fetches('<a href="https://a.org">a</a><script src="own.js"></script>')
    False
    >>> fetches('<script src="https://a.org/a.js"></script>'), fetches('<link rel="stylesheet" href="//a.org/a.css">')
    (True, True)
    """
    return bool(_FETCHED.search(page))


def pages_that_fetch(folder: Path) -> list[str]:
    """The pages below a folder that need a network, by their paths."""
    pages = sorted(folder.rglob("*.html"))
    return [str(path.relative_to(folder)) for path in pages if fetches(path.read_text(encoding="utf-8"))]
