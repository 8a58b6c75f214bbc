"""Figures speak one language: an optimizer has one colour everywhere, and text can be read at the width of a page."""

import math
import re
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path

import pytest

import poprisk_lab
from poprisk._core.store import load_result
from poprisk_lab.direct_labels import End, Point, label_ends, label_points
from poprisk_lab.engine import reading
from poprisk_lab.engine.arms import ARMS
from poprisk_lab.figure_style import AVERAGED, INK, OPTIMIZERS, SMALL, WIDTH, colour_of, text_colour
from poprisk_lab.gates.arms import IDEAS
from poprisk_lab.pages.registry import PAGES, RESULTS, function, stored

pytest.importorskip("matplotlib")
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

PAGE_PIXELS, SMALLEST_PIXELS = 800, 9
LAB = Path(poprisk_lab.__file__).parent
MODULES = sorted([*LAB.rglob("figure.py"), LAB / "pages/seed_curves.py", LAB / "direct_labels.py"])
WITHOUT_OPTIMIZERS = {"at_scale", "capacity", "coupling", "risk_honesty", "signal", "time_axis"}
"""Studies whose figures compare no optimizers: their lines may have any colour of the style."""
HUES = {"BLUE", "ORANGE", "GREEN", "PURPLE", "SKY"}
DRAWINGS = {Path(drawing.target).stem: drawing for page in PAGES for drawing in page.drawings}


def test_every_optimizer_has_a_colour_and_a_marker():
    ideas = {idea.arm for idea in IDEAS} - set(OPTIMIZERS) | {"strict_cosine"}  # coloured by family, on one page only
    assert set(ARMS) - ideas <= set(OPTIMIZERS)
    own = ("adamw", "adamw_cosine", AVERAGED, "defaults", "soft", "soft_calibrated", "hard", "hard_calibrated", "snr")
    assert len({colour_of(arm) for arm in own}) == len(own)
    assert len({OPTIMIZERS[arm] for arm in (*own, "tensor_gate", "relative")}) == len(own) + 2


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(LAB).as_posix())
def test_a_figure_takes_its_optimizers_colours_from_the_table(module):
    source = module.read_text(encoding="utf-8")
    literal = re.findall(r"\"#[0-9A-Fa-f]{3,8}\"|\"(?:tab:\w+|C\d|black|blue|orange|green|red|purple|brown)\"", source)
    assert not literal, "colours are written in figure_style.py and nowhere else"
    if module.parent.name not in WITHOUT_OPTIMIZERS:
        assert not HUES & set(re.findall(r"\b[A-Z]+\b", source)), "use colour_of(arm)"


def test_the_library_and_the_lab_draw_the_demo_in_the_same_colours():
    """The library cannot import the lab's table."""
    from poprisk.cli._demonstration.figure import draw_demo

    saved = load_result(RESULTS / "demo/result.json", "demo")
    curves, rates = draw_demo(saved).axes
    wanted = [colour_of("adamw"), colour_of("adamw"), colour_of(AVERAGED)]
    assert [to_hex(line.get_color()).upper() for line in curves.lines] == wanted
    assert [row["optimizer"] for row in saved["result"]["summary"]["rows"]] == ["AdamW", "AdamW", "AdamW with KeepBest"]
    names = {text.get_text(): to_hex(text.get_color()).upper() for text in rates.texts}
    assert names == {"AdamW": INK, "AdamW with KeepBest": text_colour(colour_of(AVERAGED))}


@cache
def arms_of_labels() -> dict[str, str]:
    """The optimizer behind every label of a stored comparison."""
    found: dict[str, str] = {}
    for drawing in DRAWINGS.values():
        result = stored(RESULTS, drawing.result)["result"] if drawing.result is not None else {}
        studies = result.get("studies", {}) if isinstance(result, dict) else {}
        for study in studies.values():
            found |= {row["label"]: row["arm"] for row in reading.rows(study)}
    return {label: arm for label, arm in found.items() if arm in OPTIMIZERS}


@cache
def drawn(name: str) -> tuple[Figure, list[Text]]:
    """The figure from the stored results, and the texts that it really shows."""
    drawing = DRAWINGS[name]
    figure = function(drawing.draw)(RESULTS if drawing.result is None else stored(RESULTS, drawing.result))
    shown: list[Text] = []
    write = Text.draw

    def watched(self: Text, *arguments):
        if self.get_visible() and self.get_text().strip():
            shown.append(self)
        return write(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", watched)
        figure.draw_without_rendering()
    assert shown
    return figure, list(dict.fromkeys(shown))


@pytest.mark.parametrize("name", DRAWINGS)
def test_text_can_be_read_and_does_not_overlap_at_the_width_of_a_page(name):
    figure, texts = drawn(name)
    pixels = PAGE_PIXELS / figure.bbox.width
    small = {
        text.get_text() for text in texts if pixels * float(text.get_fontsize()) * figure.dpi / 72 < SMALLEST_PIXELS
    }
    assert not small
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in texts]  # without the lines of annotations
    cut = [
        words
        for words, box in boxes
        if min(box.x0, box.y0) < -1 or box.x1 > figure.bbox.width + 1 or box.y1 > figure.bbox.height + 1
    ]
    assert not cut
    on_each_other = [
        (one, other)
        for (one, a), (other, b) in combinations(boxes, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1
    ]
    assert not on_each_other


@pytest.mark.parametrize("name", DRAWINGS)
def test_every_optimizer_is_drawn_in_its_own_colour(name):
    figure, texts = drawn(name)
    arms = arms_of_labels()
    wrong = []
    for axes in figure.axes:
        for line in axes.lines:
            arm = arms.get(str(line.get_label()))
            if arm is not None and to_hex(line.get_color()).upper() != colour_of(arm):
                wrong.append((line.get_label(), to_hex(line.get_color())))
    for text in texts:
        arm = arms.get(" ".join(text.get_text().split()))
        if arm is not None and to_hex(text.get_color()).upper() not in {INK, text_colour(colour_of(arm))}:
            wrong.append((text.get_text(), to_hex(text.get_color())))
    assert not wrong


def test_the_smallest_text_is_large_enough():
    assert PAGE_PIXELS / WIDTH / 72 * SMALL >= SMALLEST_PIXELS


def test_names_at_the_ends_of_lines_that_meet_are_moved_apart():
    figure = Figure(figsize=(5, 3), dpi=100)
    axes = figure.subplots()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    label_ends(axes, [End(f"line {i}", 0.5, INK) for i in range(4)] + [End("diverged", math.inf, INK)])
    figure.draw_without_rendering()
    boxes = sorted((Text.get_window_extent(text) for text in axes.texts), key=lambda box: box.y0)
    assert len(boxes) == 5
    assert all(above.y0 >= below.y1 for below, above in pairwise(boxes))


def test_names_of_points_that_meet_are_moved_apart_and_stay_in_the_panel():
    figure = Figure(figsize=(5, 3), dpi=100)
    axes = figure.subplots()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    places = [(0.95, 0.9 + 0.002 * i) for i in range(4)]
    label_points(axes, [Point(f"point {i}", [at], INK) for i, at in enumerate(places)], places)
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the lines to their points
    panel = axes.get_window_extent()
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert all(box.x1 <= panel.x1 + 1 and box.y1 <= panel.y1 + 1 for box in boxes)
