"""``python -m poprisk_lab.pages``: write every generated page, and its pictures, from the stored results."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from poprisk_lab.pages.registry import PAGES, RESULTS, ROOT, chosen_pages


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the pages. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m poprisk_lab.pages", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="part of a page's path, e.g. coupling; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    parser.add_argument("--list", action="store_true", help="list the pages and exit")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the stored results")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(page.target for page in PAGES))
        return 0
    try:
        pages = chosen_pages(options.names)
    except KeyError as missing:
        parser.error(f"no page has {missing} in its path; choose from: {', '.join(page.target for page in PAGES)}")
    if options.check:
        stale = [page.target for page in pages if page.is_stale(options.results)]
        if stale:
            print(f"Out of date, run `make pages`: {', '.join(stale)}", file=sys.stderr)
        return 1 if stale else 0
    for page in pages:
        print(f"Wrote {', '.join(path.relative_to(ROOT).as_posix() for path in page.write(options.results))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
