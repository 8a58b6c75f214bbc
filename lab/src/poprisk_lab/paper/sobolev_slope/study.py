r"""How the transfer remainder :math:`R_\perp` shrinks with the fill distance, measured on recorded runs.

A small network on the circle learns two classes under cross-entropy from n evenly spaced inputs, and the bound

.. math:: \|R_\perp\| \le C |Q|^{1/2} h_S^{m - 1/2} \Lambda_m(s, T), \qquad h_S = \pi / n

(``eq:sobolev_Rperp``) is evaluated without its constant, with a grid on the whole circle as test set Q. Two cases:

- *distinct*: full batches, every input once. W has no more directions than there are training outputs and D is
  one-to-one on them: the remainder is 0 but for rounding, under cross-entropy as under squared loss, and there is no
  slope to see. With a ``rank_cutoff`` it is what was cut off, whose size the cut-off sets and not the fill distance.
- *repeated*: every input twice, and batches of half of the examples that tell the two apart. Then W has twice as many
  directions as there are training inputs to see them at, D cannot be one-to-one, and the remainder is real: fields that
  vanish on the samples and not between them, which is what the theorem is about.
"""

import math
from dataclasses import dataclass

import torch

from poprisk._core.estimate import Estimate
from poprisk.operators import Bound, Coupling, Window, dissipation_channels
from poprisk.operators._channels import operator_norm
from poprisk.operators._cumulative import lifted_maps
from poprisk.operators._dense import RealizedWindow
from poprisk_lab.paper.sobolev_slope.task import (
    SlopeConfig,
    _angles,
    _on_circle,
    circle_network,
    circle_problem,
    record,
)
from poprisk_lab.theory.sobolev import (
    SobolevBound,
    fill_distance_slope,
    sobolev_operator_bound,
    sobolev_trajectory_bound,
    sobolev_transfer_bound,
)
from poprisk_lab.theory.torus import Torus, fill_distance, jacobian_sobolev_norm, pathwise_sobolev_norm

__all__ = [
    "SlopeConfig",
    "SlopePoint",
    "SobolevSlope",
    "circle_network",
    "circle_problem",
    "measure_point",
    "record",
    "sobolev_slope",
]

_MARGIN = 20.0  # a remainder below this many rounding errors of C_Q counts as rounding and has no slope


@dataclass(frozen=True)
class SlopePoint:
    """One training set of the sweep."""

    examples: int
    """Distinct inputs n."""
    fill: float
    """h_S."""
    path_norm: float
    r""":math:`\Lambda_m`."""
    transfer: SobolevBound
    """With every singular value of C_S that can be distinguished from rounding."""
    cut: SobolevBound
    """With those above ``rank_cutoff``; its right side holds the largest one cut off."""
    trajectory: SobolevBound
    """What the best predictor misses on the run itself."""
    operator: Bound
    """The operator lemma, which needs no constant."""
    relative_remainder: float
    r""":math:`\|R_\perp\| / \|C_Q\|`."""
    signal_dimension: int
    """Of W."""
    train_rank: int
    """Of D on the signal channel, as far as rounding lets it be seen."""
    distinct_outputs: int
    """D has no higher rank than this: outputs of distinct training inputs."""
    noise: float
    r"""What rounding of G makes of C_Q at the signal channel's last direction, :math:`eps\,\|G\| / \sigma_{min}`."""

    @property
    def is_rounding(self) -> bool:
        """Whether the remainder may be rounding: it is of that size, or D's rank was not seen in full."""
        full = min(self.signal_dimension, self.distinct_outputs)
        return self.transfer.left <= _MARGIN * self.noise or self.train_rank < full


@dataclass(frozen=True)
class SobolevSlope:
    """The sweep, and the slopes of both sides in the fill distance."""

    config: SlopeConfig
    points: tuple[SlopePoint, ...]

    @property
    def expected(self) -> float:
        """The order m - 1/2, below which the slope of the left side cannot stay."""
        return self.config.order - 0.5

    @property
    def left(self) -> Estimate:
        r"""The slope of :math:`\|R_\perp\|` over the training sets at which that is more than rounding."""
        real = [point for point in self.points if not point.is_rounding]
        if len(real) < 3:
            reason = f"the remainder is rounding at all but {len(real)} of {len(self.points)} training sets"
            return Estimate(math.nan, math.nan, valid=False, reason=reason)
        return fill_distance_slope([point.fill for point in real], [point.transfer.left for point in real])

    @property
    def right(self) -> Estimate:
        r"""The slope of the right side without its constant, :math:`|Q|^{1/2} h_S^{m-1/2} \Lambda_m`."""
        fills = [point.fill for point in self.points]
        return fill_distance_slope(fills, [point.transfer.smooth for point in self.points])


def sobolev_slope(config: SlopeConfig | None = None) -> SobolevSlope:
    """Train and measure every size of a sweep, the same first weights in each.

    >>> sweep = sobolev_slope(SlopeConfig(sizes=(3, 4, 6), grid=8, width=3, steps=4))
    >>> [point.examples for point in sweep.points], sweep.expected
    ([3, 4, 6], 1.5)
    """
    config = config or SlopeConfig()
    return SobolevSlope(config, tuple(measure_point(config, n) for n in config.sizes))


def measure_point(config: SlopeConfig, n: int) -> SlopePoint:
    """Both sides of the bounds for one training set."""
    circle = Torus(dimension=1, size=config.grid)
    test = _on_circle(circle.grid[:, 0])
    window = Window.of_run(record(config, n), test_inputs=test, dense=True)
    ops = window.dense_operators()
    matrices = (ops.factor, ops.train_transfer, ops.test_transfer)
    coupling = Coupling(dissipation_channels(*matrices))
    cut = Coupling(dissipation_channels(*matrices, rank_cutoff=config.rank_cutoff))
    maps = lifted_maps(window.lifted_steps())
    shape = (config.grid, window.num_test_outputs // config.grid, -1)
    norms = [jacobian_sobolev_norm(circle, L.reshape(shape), config.order) for L in maps]
    path_norm = pathwise_sobolev_norm(torch.tensor(norms, dtype=torch.float64))
    fill = fill_distance(circle, _angles(n)[:, None])
    sizes = {"num_test": config.grid, "fill": fill, "order": config.order, "path_norm": path_norm}
    happened = RealizedWindow(
        ops.output_gradient, ops.train_displacement, ops.test_displacement, ops.sources.train, ops.sources.test
    )
    channels = coupling.channels
    return SlopePoint(
        examples=n,
        fill=fill,
        path_norm=path_norm,
        transfer=sobolev_transfer_bound(coupling, circle, **sizes),
        cut=sobolev_transfer_bound(cut, circle, **sizes),
        trajectory=sobolev_trajectory_bound(coupling, happened, circle, **sizes),
        operator=sobolev_operator_bound(circle, channels.reduced_test.reshape(shape), config.order, path_norm),
        relative_remainder=coupling.relative_remainder,
        signal_dimension=channels.rank,
        train_rank=channels.train_rank,
        distinct_outputs=n * shape[1],
        noise=torch.finfo(ops.factor.dtype).eps * operator_norm(ops.test_transfer) / channels.roots[-1].item(),
    )
