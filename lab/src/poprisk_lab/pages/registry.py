"""Every generated page: where it goes, which template it is written from, and where its numbers come from.

A page is a Markdown template beside a study (``page.md.jinja``) and a function in the study's ``numbers.py`` that turns
the folder of stored results into the slots of the template. Some pages are written by hand except for a few measured
parts between two marks (``<!-- begin:NAME -->`` and ``<!-- end:NAME -->``): their template has one block for each part.

To add a page, add a :class:`Page` to :data:`PAGES`. ``python -m poprisk_lab.pages`` writes them all.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from poprisk._core.store import load_result, write_figure, write_text
from poprisk_lab.pages.marked_page import fill_marks
from poprisk_lab.pages.template import render, render_parts

ROOT = Path(__file__).resolve().parents[4]
"""The repository."""
RESULTS = ROOT / "lab/results"


@dataclass(frozen=True)
class Drawing:
    """A picture drawn from the stored results.

    Attributes:
        target: File to write, relative to the repository.
        draw: ``module:function``; called with the stored result, or with the folder of results if ``result`` is None.
        result: Name of the stored result without its ending.
        dpi: Resolution; None for the usual one.
    """

    target: str
    draw: str
    result: str | None = None
    dpi: int | None = None

    def write(self, results: Path, root: Path = ROOT) -> Path:
        """Draw it and write it."""
        source = results if self.result is None else stored(results, self.result)
        options = {} if self.dpi is None else {"dpi": self.dpi}
        return write_figure(root / self.target, function(self.draw)(source), **options)


@dataclass(frozen=True)
class Page:
    """A generated page.

    Attributes:
        target: File to write, relative to the repository.
        numbers: ``module:function``; called with the folder of results, returns the slots of the template.
        template: ``package/file`` of the template; None if the function returns the finished parts of a marked page.
        marked: Whether only the parts between marks are generated: one block of the template for each.
        drawings: Pictures that the page shows.
    """

    target: str
    numbers: str
    template: str | None
    marked: bool = False
    drawings: tuple[Drawing, ...] = ()

    def text(self, results: Path = RESULTS, root: Path = ROOT) -> str:
        """The page as it should be."""
        slots: Mapping[str, Any] = function(self.numbers)(results)
        if not self.marked:
            assert self.template is not None
            return render(*self.template.split("/"), **slots)
        parts = slots
        if self.template is not None:
            package, _, name = self.template.partition("/")
            parts = render_parts(package, name, slots)
        return fill_marks((root / self.target).read_text(encoding="utf-8"), parts)

    def is_stale(self, results: Path = RESULTS, root: Path = ROOT) -> bool:
        """Whether the stored page differs from what the results give."""
        place = root / self.target
        return not place.exists() or place.read_text(encoding="utf-8") != self.text(results, root)

    def write(self, results: Path = RESULTS, root: Path = ROOT) -> list[Path]:
        """Write the page and its pictures."""
        page = write_text(root / self.target, self.text(results, root))
        return [page, *(drawing.write(results, root) for drawing in self.drawings)]


def function(where: str) -> Any:
    """What ``module:name`` names."""
    module, name = where.split(":")
    return getattr(import_module(module), name)


def stored(results: Path, name: str) -> Any:
    """A stored result, whatever its kind.

    Raises:
        DataError: there is none of that name, or it cannot be read.
    """
    from poprisk_lab.results import kind_of

    path = results / f"{name}.json"
    return load_result(path, kind_of(path) or name)


_CLAIMS = ("grokking", "pinn", "lorenz", "inr", "dpo", "labels", "cifar", "teacher", "char_language", "sft")


def _page_of(name: str, folder: str) -> Page:
    """The page of a measurement, ``paper/FOLDER/{figure,numbers}.py`` and ``page.md.jinja``, stored as NAME."""
    package = f"poprisk_lab.paper.{folder}"
    drawing = Drawing(f"lab/docs/{name}.png", f"{package}.figure:draw", name, dpi=140)
    return Page(f"lab/docs/{name}.md", f"{package}.numbers:page_slots", f"{package}/page.md.jinja", drawings=(drawing,))


PAGES: tuple[Page, ...] = (
    Page("README.md", "poprisk_lab.pages.readme:slots", "poprisk_lab.pages/readme.md.jinja", marked=True),
    Page(
        "docs/optimizer.md",
        "poprisk_lab.pages.optimizer_guide:parts",
        None,
        marked=True,
        drawings=(Drawing("docs/clean_lm.png", "poprisk_lab.paper.clean_lm.figure:draw", "clean_lm", dpi=140),),
    ),
    Page(
        "docs/learning_rate.md",
        "poprisk_lab.paper.learning_rate.numbers:page_slots",
        "poprisk_lab.paper.learning_rate/page.md.jinja",
        marked=True,
        drawings=(
            Drawing(
                "docs/learning_rate.png",
                "poprisk_lab.paper.learning_rate.figure:draw",
                "learning_rate_guide",
                dpi=140,
            ),
        ),
    ),
    Page("docs/operators.md", "poprisk_lab.pages.operator_sizes:parts", None, marked=True),
    _page_of("coupling", "coupling"),
    _page_of("signal", "signal"),
    _page_of("capacity", "capacity"),
    _page_of("time", "time_axis"),
    Page(
        "lab/docs/gates.md",
        "poprisk_lab.gates.numbers:page_slots",
        "poprisk_lab.gates/page.md.jinja",
        drawings=(Drawing("lab/docs/gates.png", "poprisk_lab.gates.figure:draw", "gate_variants", dpi=140),),
    ),
    Page(
        "lab/docs/recipes.md",
        "poprisk_lab.recipes.numbers:page_slots",
        "poprisk_lab.recipes/page.md.jinja",
        drawings=(Drawing("lab/docs/recipes.png", "poprisk_lab.recipes.figure:draw", dpi=140),),
    ),
    Page(
        "lab/docs/at_scale.md",
        "poprisk_lab.at_scale.numbers:page_slots",
        "poprisk_lab.at_scale/page.md.jinja",
        drawings=(Drawing("lab/docs/at_scale.png", "poprisk_lab.at_scale.figure:draw", dpi=140),),
    ),
    Page(
        "lab/docs/scaling.md",
        "poprisk_lab.costs.page.numbers:page_slots",
        "poprisk_lab.costs.page/page.md.jinja",
        drawings=(Drawing("lab/docs/scaling.png", "poprisk_lab.costs.page.numbers:draw"),),
    ),
    Page(
        target="lab/results/README.md",
        numbers="poprisk_lab.pages.verdicts:slots",
        template="poprisk_lab.pages/verdicts.md.jinja",
        drawings=tuple(
            Drawing(f"lab/results/{name}.png", f"poprisk_lab.paper.{name}.figure:draw", name)
            for name in (*_CLAIMS, "default_choice")
        ),
    ),
    Page("docs/label_audits.md", "poprisk_lab.audits.numbers:page_slots", "poprisk_lab.audits/page.md.jinja"),
    Page(
        "docs/population_risk.md",
        "poprisk_lab.paper.risk_honesty.numbers:page_slots",
        "poprisk_lab.paper.risk_honesty/page.md.jinja",
        drawings=(
            Drawing("docs/population_risk.png", "poprisk_lab.paper.risk_honesty.figure:draw", "risk_honesty", dpi=140),
        ),
    ),
)


def chosen_pages(names: Iterable[str]) -> list[Page]:
    """The pages whose target contains one of the names; all pages if there are no names.

    Raises:
        KeyError: a name fits no page.
    """
    wanted = list(names)
    for name in wanted:
        if not any(name in page.target for page in PAGES):
            raise KeyError(name)
    return [page for page in PAGES if not wanted or any(name in page.target for name in wanted)]
