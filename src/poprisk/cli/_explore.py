"""``poprisk explore``: a page with sliders over a kernel's risk."""

from pathlib import Path
from typing import Annotated

import typer

from poprisk.cli._options import AsJson, examples
from poprisk.cli._output import show

EXAMPLES = examples("poprisk explore", "poprisk explore --kernel mine.npz --output mine.html")


def explore(
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write, one HTML file.")] = Path(
        "poprisk-explore.html"
    ),
    kernel: Annotated[
        Path | None,
        typer.Option(
            help="Your own kernel: a .npz file with K_SS, K_QS and signal (the clean targets), perhaps truth (at the "
            "test inputs). Default: a built-in one.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a page to play with: sliders for noise, capacity, ridge and time move the filter and the risk of a kernel.

    One HTML file that needs no server and no network; open it in a browser.
    """
    from poprisk._core.store import write_text
    from poprisk.report import builtin_kernel, explore_page, kernel_from_file

    chosen = builtin_kernel() if kernel is None else kernel_from_file(kernel)
    page = write_text(output, explore_page(chosen))
    found = {"page": page.as_posix(), "bytes": page.stat().st_size}
    show([f"Wrote {page}: open it in a browser"], found, as_json)
