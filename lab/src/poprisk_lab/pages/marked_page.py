"""Pages of which parts are written from results: what stands between two marks is replaced, all else is kept."""

import re
from collections.abc import Mapping

from poprisk.errors import DataError

_MARKS = re.compile(r"<!-- begin:(\w+) -->\n.*?<!-- end:\1 -->", re.DOTALL)


def fill_marks(page: str, blocks: Mapping[str, str]) -> str:
    r"""The page with what stands between its marks replaced.

    Raises:
        DataError: the page has a mark that nothing is known for, or lacks one that something is known for.

    >>> fill_marks("<!-- begin:a -->\nold\n<!-- end:a -->", {"a": "new"})
    '<!-- begin:a -->\nnew\n<!-- end:a -->'
    """
    places = [match.group(1) for match in _MARKS.finditer(page)]
    if wrong := set(places) ^ set(blocks):
        raise DataError(f"the page's places and what is known for them differ in {', '.join(sorted(wrong))}")

    def replaced(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"<!-- begin:{name} -->\n{blocks[name]}\n<!-- end:{name} -->"

    return _MARKS.sub(replaced, page)
