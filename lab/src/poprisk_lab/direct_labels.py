"""Names beside lines and points instead of a legend, moved apart where they would lie on each other."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from poprisk_lab.figure_style import SMALL, text_colour

_LINE = 1.32  # height of a line of text in sizes of its type


@dataclass(frozen=True)
class End:
    """The name of a line that ends at the right edge of its panel.

    Attributes:
        words: Its name, of one line or more.
        height: Where the line ends, in data coordinates; not finite if it ends nowhere.
        colour: The line's colour.
        line: Its line style, repeated before the name.
    """

    words: str
    height: float
    colour: str
    line: str = "-"


def label_ends(axes: Axes, ends: Sequence[End], size: float = SMALL) -> None:
    """Write the names to the right of a panel, each as near to the end of its line as the others leave room.

    Call it when the limits and scales of the panel are final. The labels take part in the figure's layout.
    """
    panel = axes.get_window_extent()
    per_point = axes.figure.dpi / 72  # type: ignore[union-attr]
    places = []
    for end in ends:
        y = axes.transData.transform((axes.get_xlim()[1], end.height))[1]
        inside = y if panel.y0 <= y <= panel.y1 else (panel.y1 if y > panel.y1 else panel.y0)
        places.append((inside - panel.y0) / panel.height)
    lines = [end.words.count("\n") + 1 for end in ends]
    heights = [_LINE * size * per_point * count / (0.92 * panel.height) for count in lines]
    style: Any = {"xycoords": "axes fraction", "textcoords": "axes fraction", "va": "center", "annotation_clip": False}
    for end, place, moved in zip(ends, places, moved_apart(places, heights), strict=True):
        arrow = {"arrowstyle": "-", "color": end.colour, "linewidth": 1.0, "linestyle": end.line, "shrinkA": 1.5}
        axes.annotate(
            end.words,
            (1.0, place),
            (1.0 + 16 * per_point / panel.width, moved),
            color=text_colour(end.colour),
            fontsize=size,
            arrowprops=arrow | {"shrinkB": 0, "relpos": (0, 0.5)},
            **style,
        )


def moved_apart(places: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Centres of labels between 0 and 1, nearest to where they should be, in the same order and not overlapping.

    >>> [round(x, 3) for x in moved_apart([0.5, 0.5, 1.0], [0.2, 0.2, 0.1])]
    [0.4, 0.6, 0.95]
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    for _ in range(60 * len(places)):
        for below, above in pairwise(order):
            lacking = max(0.0, (heights[below] + heights[above]) / 2 - (moved[above] - moved[below]))
            moved[below] -= lacking / 2
            moved[above] += lacking / 2
        if sum(heights) <= 1:
            moved = [min(max(at, high / 2), 1 - high / 2) for at, high in zip(moved, heights, strict=True)]
    return moved


@dataclass(frozen=True)
class Point:
    """A point with a name.

    Attributes:
        words: Its name.
        at: Candidates for where it is written at, in data coordinates, the best first: of a line, any of its points.
        colour: The point's colour.
        weight: Of the type.
    """

    words: str
    at: Sequence[tuple[float, float]]
    colour: str
    weight: str = "normal"


def label_points(
    axes: Axes, points: Sequence[Point], taken: Sequence[tuple[float, float]], size: float = SMALL, gap: float = 5.0
) -> None:
    """Write each name beside its point where it covers no other name and the fewest of what is drawn.

    Call it when the figure is laid out (``figure.draw_without_rendering()``).

    Args:
        axes: The panel.
        points: What to name, the most important first.
        taken: What is drawn, as points in data coordinates: names avoid them.
        size: Of the type, in points.
        gap: Between a point and its name, in points; names that find no room go further away, with a line to the point.
    """
    per_point = axes.figure.dpi / 72  # type: ignore[union-attr]
    panel = axes.get_window_extent()
    obstacles = [tuple(axes.transData.transform(at)) for at in taken]
    written = [text.get_window_extent() for text in axes.texts]
    for point in points:
        best = min(_candidates(axes, point, size, gap), key=lambda each: _badness(each, written, obstacles, panel))
        written.append(best.box)
        note = axes.annotate(
            point.words,
            best.at,
            (best.offset[0] / per_point, best.offset[1] / per_point),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=size,
            color=text_colour(point.colour),
            weight=point.weight,
            arrowprops=_LEADER | {"color": point.colour} if best.reach > _NEAR else None,
        )
        note.set_in_layout(False)


def along(axes: Axes, points: Sequence[tuple[float, float]], between: int = 24) -> list[tuple[float, float]]:
    """Points on the straight lines between some points of a panel, in data coordinates: what names have to avoid."""
    ends = [axes.transData.transform(point) for point in points]
    steps = [k / between for k in range(between)]
    found = [(1 - t) * one + t * other for one, other in pairwise(ends) for t in steps]
    return [(float(x), float(y)) for x, y in axes.transData.inverted().transform([*found, ends[-1]])]


_CORNERS = ((1, 0.5), (1, -0.5), (-1, 0.5), (-1, -0.5))
_AROUND = (*_CORNERS, (1, 0), (-1, 0), (0, 1), (0, -1), (0.6, 1), (-0.6, 1), (0.6, -1), (-0.6, -1))
_REACHES = (1.0, 1.4, 2.2, 3.2, 4.5, 6.0, 8.0)
_NEAR = 1.4
_LEADER: dict[str, Any] = {"arrowstyle": "-", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3}


@dataclass(frozen=True)
class _Place:
    """Where a name could be written: its box and its offset from a point in pixels, how far away that is."""

    box: Bbox
    offset: tuple[float, float]
    at: tuple[float, float]
    reach: float


def _candidates(axes: Axes, point: Point, size: float, gap: float) -> Iterable[_Place]:
    per_point = axes.figure.dpi / 72  # type: ignore[union-attr]
    trial = axes.text(0, 0, point.words, fontsize=size, weight=point.weight)
    extent = trial.get_window_extent()
    trial.remove()
    wide, high = extent.width + 2 * per_point, extent.height + per_point
    for reach in _REACHES:
        for at in point.at:
            x, y = axes.transData.transform(at)
            for right, up in _AROUND:
                away = per_point * gap * reach
                offset = (right * (away + wide / 2), up * (away + 2 * per_point + high / 2))
                box = Bbox.from_bounds(x + offset[0] - wide / 2, y + offset[1] - high / 2, wide, high)
                yield _Place(box, offset, at, reach)


def _badness(
    place: _Place, written: Sequence[Bbox], obstacles: Sequence[tuple[float, float]], panel: Bbox
) -> tuple[float, float]:
    """On another name or outside the panel is worst, then on something drawn, then far away."""
    box, pad = place.box, 0.25 * place.box.height
    outside = box.x0 < panel.x0 or box.x1 > panel.x1 or box.y0 < panel.y0 or box.y1 > panel.y1
    wider = Bbox.from_extents(box.x0 - pad, box.y0 - pad, box.x1 + pad, box.y1 + pad)
    covered = sum(wider.x0 <= x <= wider.x1 and wider.y0 <= y <= wider.y1 for x, y in obstacles)
    on_names = sum(bool(wider.overlaps(other)) for other in written)
    through_names = sum(_leader_meets(place, other) for other in written)
    return 1000.0 * (outside + on_names) + 50.0 * through_names + covered, place.reach


def _leader_meets(place: _Place, name: Bbox) -> bool:
    """Whether the line from a name to its point, if it has one, runs through another name."""
    if place.reach <= _NEAR:
        return False
    middle = ((place.box.x0 + place.box.x1) / 2, (place.box.y0 + place.box.y1) / 2)
    along_it = ((middle[0] - t * place.offset[0], middle[1] - t * place.offset[1]) for t in (0.2, 0.4, 0.6, 0.8))
    return any(name.contains(x, y) for x, y in along_it)
