"""``poprisk explore``: write an interactive page on the risk of a kernel method."""

from pathlib import Path
from typing import Annotated

import typer

from poprisk.cli._options import AsJson, examples
from poprisk.cli._output import show

EXAMPLES = examples("poprisk explore", "poprisk explore --kernel mine.npz --output mine.html")


def explore(
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path(
        "poprisk-explore.html"
    ),
    kernel: Annotated[
        Path | None,
        typer.Option(
            help="Your own kernel: a .npz file with K_SS, K_QS, signal (the clean targets) and, optionally, truth (the "
            "true values at the test inputs). Default: a built-in kernel.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write an interactive page: sliders for noise, capacity, ridge and time show how they change a kernel's risk.

    One HTML file that needs no server and no network; open it in a browser.
    """
    from poprisk.report import explore as write_page

    page = write_page(output, kernel)
    found = {"page": page.as_posix(), "bytes": page.stat().st_size}
    show([f"Wrote {page}: open it in a browser"], found, as_json)
