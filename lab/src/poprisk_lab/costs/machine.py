r"""From costs to seconds: what a machine was measured to do, one number fitted for each operation, and checks.

.. math:: \text{seconds} = \frac1\eta \Big(\frac{\text{flops}}{F} + \frac{\text{half flops}}{H} +
          \frac{\text{bytes moved}}{B}\Big) + \text{launches} \cdot \tau + \varphi

F, H and B are what the machine does in one large product and one large copy. τ is the time of the operation at a size
so small that nothing else counts, and φ what a call costs besides, where it was measured at two such sizes. η, the
share of the machine that the operation reaches, is fitted at one middle size. The terms are added: products and passes
over memory come one after the other. Only where nothing waits for a GPU are launches hidden behind the work: the larger
of both counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

from poprisk.errors import DataError
from poprisk_lab.costs.cost import OperationCost
from poprisk_lab.costs.operations import QUEUED, cost_of

# What these hold is there before the call is timed; before the other calls there are the model, its data and the run.
_MADE_BEFORE = ("optimizer_step", "adamw_step", "training_step", "rounded_product")
# Launches may not explain more than this share of the middle size, or nothing is left to fit.
_LARGEST_SHARE = 0.9


@dataclass(frozen=True)
class Machine:
    """What one machine can do.

    >>> Machine("toy", 100.0, 400.0, 10.0).seconds(OperationCost(flops=200.0, bytes_moved=10.0))
    3.0
    """

    name: str
    float32_flops: float
    """Per second, in one large product."""
    half_flops: float
    """The same in float16."""
    bytes_per_second: float
    """Bytes per second in a large copy, counting both reads and writes."""
    memory_bytes: float | None = None
    asynchronous: bool = False
    """Whether work is queued for it while it is busy, as for a GPU."""

    def seconds(self, cost: OperationCost) -> float:
        """At the machine's own speed, without launches."""
        products = cost.flops / self.float32_flops + cost.half_flops / self.half_flops
        return products + cost.bytes_moved / self.bytes_per_second


@dataclass(frozen=True)
class Fit:
    """What one operation reaches on one machine."""

    share: float
    """η, of the machine's own speed; above 1 where caches help."""
    launch_seconds: float
    """τ."""
    fixed_seconds: float = 0.0
    """φ, of a call."""
    queued: bool = False
    """Whether launches are hidden behind the work."""

    def seconds(self, machine: Machine, cost: OperationCost) -> float:
        """Predicted for a cost."""
        work, launching = machine.seconds(cost) / self.share, self.launching(cost)
        return max(work, launching) if self.queued else work + launching

    def launching(self, cost: OperationCost) -> float:
        """Seconds besides the work."""
        return self.fixed_seconds + cost.launches * self.launch_seconds


@dataclass(frozen=True)
class Point:
    """One measurement beside its model."""

    operation: str
    series: str
    sizes: Mapping[str, float]
    cost: OperationCost
    seconds: float
    """Measured."""
    predicted: float
    held: float | None = None
    """Bytes at the fullest moment, where they were measured."""

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.seconds


@dataclass(frozen=True)
class Exponent:
    """How the time grows with one size."""

    size: str
    values: tuple[float, ...]
    measured: float
    model: float
    """Exponent of the predictions at the same sizes."""
    limit: float
    """Exponent of the model's work alone, for large sizes."""


@dataclass(frozen=True)
class CheckedOperation:
    """One operation: fitted at the middle size, checked at all others."""

    operation: str
    fit: Fit
    base: Point
    points: tuple[Point, ...]
    """All but the middle size and the tiny one."""
    exponents: tuple[Exponent, ...]
    drift: float = 1.0
    """The middle size was measured before all others and after them: the slower over the faster."""

    @property
    def span(self) -> float:
        """Largest over smallest work among the checked sizes, in predicted seconds."""
        found = [point.predicted for point in self.points]
        return max(found) / min(found)

    @property
    def worst(self) -> float:
        """The factor by which the worst prediction is off."""
        return max(max(point.ratio, 1 / point.ratio) for point in self.points)

    @property
    def held_ratios(self) -> list[float]:
        """Bytes held by the model over measured ones, where there are any."""
        return [point.cost.bytes_held / point.held for point in (self.base, *self.points) if point.held]

    def within(self, factor: float) -> int:
        """How many checked points are predicted within a factor."""
        return sum(1 / factor <= point.ratio <= factor for point in self.points)


def machine_of(saved: Mapping[str, Any]) -> Machine:
    """The machine of a stored benchmark."""
    figures, environment = saved["machine"], saved["environment"]
    threads = f"{environment['cpu']}, {saved['threads']} thread" + "s" * (saved["threads"] > 1)
    return Machine(
        environment["gpu"] or threads if saved["device"] == "cuda" else threads,
        figures["float32_flops"],
        figures["half_flops"],
        figures["bytes_per_second"],
        figures.get("memory_bytes"),
        saved["device"] == "cuda",
    )


def checked_operations(saved: Mapping[str, Any]) -> dict[str, CheckedOperation]:
    """Every operation of a stored benchmark that was measured at its middle size and at two others.

    Raises:
        DataError: the result is of another benchmark.
    """
    if saved.get("benchmark") != "cost_models":
        raise DataError(f"expected a result of benchmarks/cost_models.py, got {saved.get('benchmark')!r}")
    machine, found = machine_of(saved), {}
    for operation in dict.fromkeys(row["operation"] for row in saved["rows"]):
        rows = [row for row in saved["rows"] if row["operation"] == operation]
        if sum(row["series"] not in ("base", "tiny") for row in rows) >= 2 and {"base", "tiny"} <= {
            row["series"] for row in rows
        }:
            found[operation] = _checked(machine, operation, rows)
    return found


Timed = tuple[OperationCost, float]


def calibrate(machine: Machine, tiny: Sequence[Timed], base: Timed, *, queued: bool = False) -> Fit:
    """From costs and seconds of the smallest sizes and of the middle one.

    Args:
        machine: Where they were measured.
        tiny: One size, or two with different launches, so small that nothing else counts.
        base: The middle size.
        queued: Whether launches are hidden behind the work.

    >>> machine = Machine("toy", 100.0, 400.0, 10.0)
    >>> calibrate(machine, [(OperationCost(launches=1), 0.5)], (OperationCost(flops=100.0, launches=1), 2.5))
    Fit(share=0.5, launch_seconds=0.5, fixed_seconds=0.0, queued=False)
    """
    launch, fixed = _launching(tiny)
    cost, seconds = base
    if queued:
        return Fit(machine.seconds(cost) / seconds, launch, fixed, True)
    shrunk = min(1.0, _LARGEST_SHARE * seconds / max(1e-300, fixed + cost.launches * launch))
    launch, fixed = shrunk * launch, shrunk * fixed
    return Fit(machine.seconds(cost) / (seconds - fixed - cost.launches * launch), launch, fixed)


def _launching(tiny: Sequence[Timed]) -> tuple[float, float]:
    """τ and φ; neither is negative, whatever the noise."""
    (few, less), (many, more) = (f(tiny, key=lambda each: each[0].launches) for f in (min, max))
    if few.launches == many.launches:
        return more / max(1.0, many.launches), 0.0
    slope = max(0.0, (more - less) / (many.launches - few.launches))
    fixed = more - slope * many.launches
    return (slope, fixed) if fixed >= 0 else (more / many.launches, 0.0)


def fitted_exponent(values: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of a line through the logarithms.

    Raises:
        DataError: fewer than two different sizes.

    >>> round(fitted_exponent([1.0, 2.0, 4.0], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    x, y = [log(value) for value in values], [log(value) for value in seconds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((each - mean_x) ** 2 for each in x)
    if not spread:
        raise DataError(f"an exponent needs at least two sizes, got {sorted(set(values))}")
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers.

    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    return exp(sum(log(value) for value in values) / len(values))


def _checked(machine: Machine, operation: str, rows: Sequence[Mapping[str, Any]]) -> CheckedOperation:
    middle = [row for row in rows if row["series"] == "base"]
    base_row = {**middle[0], "seconds": geometric_mean([row["seconds"] for row in middle])}
    tiny = [_timed(operation, row) for row in rows if row["series"] == "tiny"]
    queued = machine.asynchronous and operation in QUEUED
    fit = calibrate(machine, tiny, _timed(operation, base_row), queued=queued)
    base = _point(machine, fit, operation, base_row)
    others = tuple(_point(machine, fit, operation, row) for row in rows if row["series"] not in ("base", "tiny"))
    series = dict.fromkeys(point.series for point in others if point.series in base.sizes)
    exponents = tuple(_exponent(machine, operation, name, base, others) for name in series)
    times = [row["seconds"] for row in middle]
    return CheckedOperation(operation, fit, base, others, exponents, max(times) / min(times))


def _point(machine: Machine, fit: Fit, operation: str, row: Mapping[str, Any]) -> Point:
    sizes = _all_sizes(row)
    cost = cost_of(operation, sizes)
    before = 0 if operation in _MADE_BEFORE else row.get("bytes_before", 0)
    held = row["peak_bytes"] - before if "peak_bytes" in row else None
    return Point(operation, row["series"], sizes, cost, row["seconds"], fit.seconds(machine, cost), held)


def _exponent(machine: Machine, operation: str, size: str, base: Point, others: Sequence[Point]) -> Exponent:
    points = sorted([base, *(p for p in others if p.series == size)], key=lambda point: point.sizes[size])
    values = tuple(point.sizes[size] for point in points)
    # What is known of a network beside its sizes would have to grow with it; there the limit is that of the points.
    fixed = "forward_flops" in base.sizes and size == "width"
    large = [{**base.sizes, size: factor * base.sizes[size]} for factor in (256.0, 512.0)]
    costs = [point.cost for point in points] if fixed else [cost_of(operation, sizes) for sizes in large]
    return Exponent(
        size,
        values,
        fitted_exponent(values, [point.seconds for point in points]),
        fitted_exponent(values, [point.predicted for point in points]),
        fitted_exponent(values if fixed else [sizes[size] for sizes in large], [machine.seconds(c) for c in costs]),
    )


def _timed(operation: str, row: Mapping[str, Any]) -> Timed:
    return cost_of(operation, _all_sizes(row)), row["seconds"]


def _all_sizes(row: Mapping[str, Any]) -> dict[str, float]:
    return {**row["known"], **row["sizes"]}
