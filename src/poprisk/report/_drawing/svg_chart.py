"""Small charts as inline SVG, without a library; CSS sets the colours for light, dark and print."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from poprisk.errors import DataError

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 520, 62, 14, 12, 44
_DASHES = ("", "7 4", "2 4", "10 3 2 3", "4 2")
_FLAT = 0.04
"""Share of the axis below which the middle of a curve lies flat on a linear axis."""
_FLOOR = 1e-12
"""Relative to the largest value: a logarithmic axis stops here, since anything smaller is rounding."""


@dataclass(frozen=True)
class Line:
    """One curve, interrupted where points are not finite."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    """Index of the colour in the page's palette."""
    error: Sequence[float] | None = None
    """Half the height of the band around the curve."""
    dash: int = 0
    points: bool = False
    """Whether to draw the points, each with a tooltip."""
    hollow: Sequence[bool] | None = None
    """Which points to draw hollow: estimates that are not valid."""

    def __post_init__(self) -> None:
        if any(len(each) != len(self.x) for each in (self.y, self.error, self.hollow) if each is not None):
            raise DataError(f"the curve {self.name!r} needs one value at each step: compute the analysis again")


@dataclass(frozen=True)
class Axis:
    """Label and range of an axis."""

    label: str
    log: bool | None = False
    """Whether the axis is logarithmic; None: where a linear one would show a curve as flat."""
    zero: bool = False
    """Whether a linear axis must contain 0."""


def line_chart(
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    title: str,
    *,
    height: int = 260,
    level: float | None = None,
    level_name: str = "",
    mark: float | None = None,
    mark_name: str = "",
    rising: bool = False,
) -> str:
    """Curves on common axes with a legend below.

    ``level`` adds a horizontal line with a name, ``mark`` a vertical one: named at the top, or for ``rising`` curves at
    the bottom, where there is room.

    >>> chart = line_chart([Line("loss", [0, 1, 2], [3.0, 2.0, 1.0])], Axis("step"), Axis("loss"), "Loss")
    >>> chart.count("<path"), 'data-points="3"' in chart, "loss" in chart
    (1, True, True)
    """
    y = replace(y, log=_needs_log(lines)) if y.log is None else y
    pieces = [_pieces(line, bool(y.log)) for line in lines]
    shown = [piece for parts in pieces for piece in parts]
    values = [v for line in shown for v in line.y]
    if not values:
        return f'<p class="soft">{html.escape(title)}: no finite values to draw.</p>'
    if len(values) > 2 and max(values) == min(values) and level is None:
        return f'<p class="soft">{html.escape(title)}: always {number(values[0])} ({html.escape(y.label)}).</p>'
    ends = [e for line in shown if line.error for v, r in zip(line.y, line.error, strict=True) for e in (v - r, v + r)]
    extra = _given(level)
    across = _Scale([*(v for line in shown for v in line.x), *_given(mark)], x, _LEFT, _WIDTH - _RIGHT)
    up = _Scale(values + [e for e in ends + extra if e > 0 or not y.log], y, height - _BOTTOM, _TOP)
    inside = _frame(across, up, x, y, height)
    for line in shown:
        inside += _band(line, across, up) + _curve(line, across, up)
    if level is not None and (level > 0 or not y.log):
        at = up(level)
        inside += f'<line class="level" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        inside += f'<text x="{_WIDTH - _RIGHT}" y="{at - 5:.1f}" text-anchor="end">{html.escape(level_name)}</text>'
    if mark is not None:
        at, anchor = across(mark), "end" if across(mark) > (_LEFT + _WIDTH) / 2 else "start"
        inside += f'<line class="level" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"/>'
        beside = at + (-6 if anchor == "end" else 6)
        below = height - _BOTTOM - 8 if rising else _TOP + 10
        inside += f'<text class="name" x="{beside:.1f}" y="{below}" text-anchor="{anchor}">'
        inside += f"{html.escape(mark_name)}</text>"
    return _figure(
        inside, title, height, len(values), _legend([line for line, own in zip(lines, pieces, strict=True) if own])
    )


def _needs_log(lines: Sequence[Line]) -> bool:
    """Whether most of a curve would lie flat on the floor of a linear axis, and all values are positive.

    >>> _needs_log([Line("a", [0, 1, 2], [100.0, 1.0, 0.1])]), _needs_log([Line("a", [0, 1, 2], [3.0, 2.0, 1.0])])
    (True, False)
    """
    finite = [[v for v in line.y if math.isfinite(v)] for line in lines]
    values = [v for own in finite for v in own]
    if not values or min(values) <= 0:
        return False
    return any(own and sorted(own)[len(own) // 2] < _FLAT * max(values) for own in finite)


def _given(value: float | None) -> list[float]:
    return [] if value is None else [value]


def scatter_chart(x_values: Sequence[float], y_values: Sequence[float], x: Axis, y: Axis, title: str) -> str:
    """A scatter plot with the diagonal.

    >>> scatter_chart([0, 1], [0, 1], Axis("true"), Axis("predicted"), "Both").count("<circle")
    2
    """
    both = [(a, b) for a, b in zip(x_values, y_values, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if not both:
        return f'<p class="soft">{html.escape(title)}: no finite values to draw.</p>'
    ends = [v for pair in both for v in pair]
    height = 320
    across, up = _Scale(ends, x, _LEFT, _WIDTH - _RIGHT), _Scale(ends, y, height - _BOTTOM, _TOP)
    low, high = min(ends), max(ends)
    inside = _frame(across, up, x, y, height)
    inside += (
        f'<line class="level" x1="{across(low):.1f}" y1="{up(low):.1f}" x2="{across(high):.1f}" y2="{up(high):.1f}"/>'
    )
    for a, b in both:
        inside += _dot("dot c0", across(a), up(b), f"{a:.4g}, {b:.4g}")
    return _figure(inside, title, height, len(both), "")


def bar_chart(names: Sequence[str], values: Sequence[float], title: str, unit: str = "") -> str:
    """Horizontal bars, each with its value.

    >>> bar_chart(["a", "b"], [1.0, -2.0], "Bars").count("<rect")
    2
    """
    left, row, height = 244, 30, 30 * len(names) + 12
    rounding = 1e-9 * max(map(abs, values), default=0.0)
    values = [0.0 if abs(v) <= rounding else v for v in values]
    low, high = min([0.0, *values]), max([0.0, *values])
    span = (high - low) or 1.0
    room = 62 if low < 0 else 8  # for the number beside a negative bar
    across = lambda v: left + room + (_WIDTH - left - room - 62) * (v - low) / span  # noqa: E731
    inside = ""
    for j, (name, value) in enumerate(zip(names, values, strict=True)):
        y, start = 6 + row * j, min(across(0), across(value))
        inside += f'<text class="name" x="{left}" y="{y + 19}" text-anchor="end">{html.escape(name)}</text>'
        size = f'width="{abs(across(value) - across(0)):.1f}" height="{row - 9}"'
        inside += f'<rect class="bar c{j % 6}" x="{start:.1f}" y="{y + 4}" {size}/>'
        at, anchor = (across(value) + 6, "start") if value >= 0 else (across(value) - 6, "end")
        inside += f'<text class="value" x="{at:.1f}" y="{y + 19}" text-anchor="{anchor}">{number(value)}{unit}</text>'
    inside += f'<line class="axis" x1="{across(0):.1f}" x2="{across(0):.1f}" y1="4" y2="{height - 4}"/>'
    return _figure(inside, title, height, len(values), "")


def heat_map(names: Sequence[str], steps: Sequence[int], rows: Sequence[Sequence[float]], title: str) -> str:
    """A row of cells over the steps for each name; darker is larger, and a tooltip shows each value.

    >>> heat_map(["a"], [1, 2], [[0.5, 1.0]], "Map").count("<rect")
    2
    """
    left, row = 150, 22
    height = row * len(names) + 34
    wide = (_WIDTH - left - _RIGHT) / len(steps)
    largest = max((v for values in rows for v in values if math.isfinite(v)), default=0.0) or 1.0
    inside, drawn = "", 0
    for j, (name, values) in enumerate(zip(names, rows, strict=True)):
        inside += (
            f'<text class="name" x="{left - 8}" y="{row * j + 16}" text-anchor="end">{html.escape(_short(name))}</text>'
        )
        for i, (k, v) in enumerate(zip(steps, values, strict=True)):
            if not math.isfinite(v):
                continue
            drawn += 1
            inside += (
                f'<rect class="cell" x="{left + wide * i:.2f}" y="{row * j + 2}" width="{wide + 0.3:.2f}" '
                f'height="{row - 3}" fill-opacity="{max(v, 0.0) / largest:.3f}"><title>{html.escape(name)}, step {k}: '
                f"{v:.3g}</title></rect>"
            )
    for i in sorted({0, len(steps) // 2, len(steps) - 1}):
        anchor = "start" if i == 0 else "end" if i == len(steps) - 1 else "middle"
        at = left + wide * (i + {"start": 0, "middle": 0.5, "end": 1}[anchor])
        inside += f'<text x="{at:.1f}" y="{height - 12}" text-anchor="{anchor}">step {steps[i]}</text>'
    scale = f'<p class="legend">from 0 (empty) to {number(largest)} (full colour)</p>'
    return _figure(inside, title, height, drawn, scale)


def number(value: float) -> str:
    """A number in three digits.

    >>> number(0.0), number(1234.5), number(0.012345), number(1.2e-7), number(-3.0)
    ('0', '1234', '0.0123', '1.2e-7', '-3')
    """
    if not math.isfinite(value):
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


class _Scale:
    """Maps values to pixels, and chooses the ticks."""

    def __init__(self, values: Sequence[float], axis: Axis, start: float, stop: float) -> None:
        self.log, self.start, self.stop = bool(axis.log), start, stop
        low, high = min(values), max(values)
        if axis.log:
            low, high = math.log10(low), math.log10(high)
        elif axis.zero:
            low, high = min(low, 0.0), max(high, 0.0)
        if high - low < 1e-12 * max(abs(high), abs(low), 1e-300):
            margin = 0.5 if axis.log else 0.5 * abs(high) or 0.5
            low, high = low if axis.zero and low == 0 else low - margin, high + margin
        self.low, self.high = low, high
        if not axis.log and start > stop:  # room above and below a curve
            room = 0.05 * (high - low)
            self.low, self.high = low - (0 if axis.zero and low == 0 else room), high + room

    def __call__(self, value: float) -> float:
        place = math.log10(value) if self.log else value
        return self.start + (self.stop - self.start) * (place - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        if self.log:
            return self._decades()
        return _even_ticks(self.low, self.high)

    def _decades(self) -> list[tuple[float, str]]:
        first, last = math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9)
        every = max(1, math.ceil((last - first + 1) / 7))
        found = [(10.0**e, number(10.0**e)) for e in range(first, last + 1, every)]
        if len(found) >= 3:
            return found
        finer = [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5)]
        inside = [v for v in finer if self.low - 1e-9 <= math.log10(v) <= self.high + 1e-9]
        return [(v, number(v)) for v in inside] if len(inside) >= 3 else _even_ticks(10**self.low, 10**self.high)


def _even_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Ticks at round numbers.

    >>> [label for _, label in _even_ticks(0.0, 1.1)]
    ['0', '0.2', '0.4', '0.6', '0.8', '1']
    """
    unit = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(unit * m for m in (1, 2, 5, 10) if (high - low) / (unit * m) <= 6)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(j * step, number(j * step)) for j in range(first, last + 1)]


def _frame(across: _Scale, up: _Scale, x: Axis, y: Axis, height: int) -> str:
    out, bottom = "", height - _BOTTOM
    for value, label in up.ticks():
        at = up(value)
        out += f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        out += f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>'
    for value, label in across.ticks():
        at = across(value)
        out += f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 5}"/>'
        out += f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>'
    out += f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    out += f'<text x="{middle}" y="{height - 6}" text-anchor="middle">{html.escape(x.label)}</text>'
    half = (_TOP + bottom) / 2
    turned = f'transform="rotate(-90 14 {half})"'
    return out + f'<text x="14" y="{half}" text-anchor="middle" {turned}>{html.escape(y.label)}</text>'


def _pieces(line: Line, log: bool) -> list[Line]:
    """The stretches of a line without a missing point; on a logarithmic axis, zeros and rounding errors are missing.

    >>> [piece.x for piece in _pieces(Line("a", [0, 1, 2, 3], [1.0, math.nan, 2.0, 3.0]), False)]
    [[0], [2, 3]]
    """
    finite = [v for v in line.y if math.isfinite(v)]
    least = _FLOOR * max(finite, default=0.0) if log else -math.inf
    keep = [i for i, v in enumerate(line.y) if math.isfinite(v) and math.isfinite(line.x[i]) and v > least]
    groups: list[list[int]] = []
    for i in keep:
        if groups and groups[-1][-1] == i - 1:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [_part(line, rows) for rows in groups]


def _part(line: Line, rows: list[int]) -> Line:
    error = None if line.error is None else [e if math.isfinite(e := line.error[i]) else 0.0 for i in rows]
    hollow = None if line.hollow is None else [line.hollow[i] for i in rows]
    return replace(line, x=[line.x[i] for i in rows], y=[line.y[i] for i in rows], error=error, hollow=hollow)


def _band(line: Line, across: _Scale, up: _Scale) -> str:
    if line.error is None or len(line.x) < 2:
        return ""
    rows = list(zip(line.x, line.y, line.error, strict=True))
    least = min(line.y) / 2 if up.log else -math.inf
    above = [f"{across(x):.1f} {up(y + e):.1f}" for x, y, e in rows]
    below = [f"{across(x):.1f} {up(max(y - e, least)):.1f}" for x, y, e in reversed(rows)]
    return f'<path class="band c{line.color}" d="M{"L".join(above + below)}Z"/>'


def _curve(line: Line, across: _Scale, up: _Scale) -> str:
    places = [(across(x), up(y)) for x, y in zip(line.x, line.y, strict=True)]
    out = ""
    if len(places) > 1:
        dash = f' stroke-dasharray="{_DASHES[line.dash]}"' if line.dash else ""
        out = f'<path class="curve c{line.color}"{dash} d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in places)}"/>'
    if not line.points and len(places) > 1:
        return out
    hollow = line.hollow or [False] * len(places)
    for (a, b), x, y, empty in zip(places, line.x, line.y, hollow, strict=True):
        kind = "dot hollow" if empty else "dot"
        out += _dot(f"{kind} c{line.color}", a, b, f"{line.name}, {number(x)}: {y:.4g}")
    return out


def _dot(kind: str, x: float, y: float, words: str) -> str:
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="3.5"'
    return f'<circle class="{kind}" {place}><title>{html.escape(words)}</title></circle>'


def _legend(lines: Sequence[Line]) -> str:
    keys = "".join(
        f'<span class="key"><svg viewBox="0 0 28 8" width="28" height="8" aria-hidden="true"><line class="curve '
        f'c{line.color}" x1="1" x2="27" y1="4" y2="4"{_dashed(line)}/></svg>{html.escape(line.name)}</span>'
        for line in lines
    )
    return f'<p class="legend">{keys}</p>'


def _dashed(line: Line) -> str:
    return f' stroke-dasharray="{_DASHES[line.dash]}"' if line.dash else ""


def _figure(inside: str, title: str, height: int, points: int, legend: str) -> str:
    name = html.escape(title)
    return (
        f'<figure class="chart" data-points="{points}"><figcaption>{name}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{name}">{inside}</svg>{legend}</figure>'
    )


def _short(name: str, most: int = 20) -> str:
    return name if len(name) <= most else "…" + name[1 - most :]
