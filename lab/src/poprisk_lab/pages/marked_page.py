"""Pages with generated parts: the text between two marks is replaced, everything else is kept."""

import re
from collections.abc import Mapping

from poprisk.errors import DataError

_MARKS = re.compile(r"<!-- begin:(\w+) -->\n.*?<!-- end:\1 -->", re.DOTALL)


def fill_marks(page: str, blocks: Mapping[str, str]) -> str:
    r"""The page with the text between its marks replaced.

    Raises:
        DataError: the page has a mark without a part, or a part has no mark in the page.

    >>> fill_marks("<!-- begin:a -->\nold\n<!-- end:a -->", {"a": "new"})
    '<!-- begin:a -->\nnew\n<!-- end:a -->'
    """
    places = [match.group(1) for match in _MARKS.finditer(page)]
    if wrong := set(places) ^ set(blocks):
        raise DataError(
            f"marks in the page and generated parts should be the same, but they differ in {', '.join(sorted(wrong))}: "
            "add the missing marks (<!-- begin:NAME --> and <!-- end:NAME -->) or the missing part"
        )

    def replaced(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"<!-- begin:{name} -->\n{blocks[name]}\n<!-- end:{name} -->"

    return _MARKS.sub(replaced, page)
