r"""What a run did along given directions of its output gradient, and along how many, without dense operators.

Everything is known from one forward sweep of the directions H and of random ones :math:`\omega`:

.. math::
   h^\top W h = \sum_j \|\tilde M_j^{1/2} F_j h\|^2, \qquad
   \operatorname{tr} W = \mathbb E\, \omega^\top W \omega, \qquad
   \operatorname{tr} W^2 = \mathbb E (\omega^\top W \omega')^2

Random directions are drawn among the gradients that the loss can have: those of cross-entropy add up to 0 over the
classes, and what would shift all logits alike is never worked off.

Two errors are counted, both as 95% intervals: that of the random directions, and that of following the run in stretches
(:mod:`poprisk.operators._stretches`), for which the sweep is repeated with stretches of twice the length.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import ExampleLoss, loss_hessians
from poprisk._core.linalg import default_generator, gaussian
from poprisk.operators._step_maps import Block
from poprisk.operators._stretches import RunPath, StretchedWindow

PROBES = 6
"""Random directions."""
REPEATED = 2
"""Those that are swept again with longer stretches."""
# Doubling the stretches changes a number by about its error, now and then by a third of it.
_SAFETY = 3.0
# Where stretches of two steps and of four nearly agree, both are off by a little more than that: up to 2.4e-4 was seen.
_LEAST = 5e-4
_TWO_SIDED = 2.0
# The standard deviation of (ω'Wω)² in units of its mean: 1.4 for a W with many directions, 2.8 for one with a single.
_PAIRS = 2.0
_NULL = 1e-6


@dataclass(frozen=True, eq=False)
class ProbedOperators:
    """What a run did along given directions h, one entry each, and in all; every error is half of a 95% interval."""

    test: Float[Tensor, "M h"]
    """G H: how far the directions moved the test outputs."""
    test_change: Float[Tensor, "M h"]
    """Its error, with a sign."""
    source: Float[Tensor, "M"]
    """How far weight decay and momentum from before moved them."""
    steps: list[int]
    """Steps taken at the moments of ``left``, the first being 0."""
    left: Float[Tensor, "moments h"]
    r""":math:`h^\top P h / h^\top h`, the share of a direction that training had not worked off by then."""
    left_error: Float[Tensor, "moments h"]
    dissipated: Float[Tensor, "h"]
    r"""Share of each direction in the dissipation :math:`g^\top W g` of their sum g; cross terms are halved."""
    dissipated_error: Float[Tensor, "h"]
    directions: float
    r"""Number of directions that share the dissipation, :math:`(\operatorname{tr} W)^2 / \operatorname{tr} W^2`."""
    directions_least: float
    """Lower end of its 95% interval."""


@dataclass(frozen=True, eq=False)
class _Sweep:
    """One sweep of directions H and probes; the last column may be the source."""

    gramian: Float[Tensor, "c c"]
    left: dict[int, Float[Tensor, "c"]]
    """After each number of steps."""
    test: Float[Tensor, "M c_and_source"]

    def shares(self, h: int) -> Float[Tensor, "h"]:
        """Shares in the dissipation of the sum of the first h columns."""
        parts = self.gramian[:h, :h].sum(1)
        return parts / parts.sum()


def probe_operators(path: RunPath, H: Float[Tensor, "N h"], length: int, *, probes: int = PROBES) -> ProbedOperators:
    """What a run did along the columns of H, by one sweep over its steps and one with longer stretches.

    >>> from poprisk._core.autodiff import FlatModel
    >>> from poprisk.operators._gradient_descent import gradient_descent
    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False).double(), "squared")
    >>> x, y = torch.diag(torch.tensor([2.0, 1.0]).double()), torch.ones(2, 1, dtype=torch.float64)
    >>> path = RunPath.read(gradient_descent(model, x, y, lr=0.1, steps=4), model, x, y, x)
    >>> found = probe_operators(path, path.output_gradient[:, None], 1)
    >>> moved = (path.test_outputs(-1) - path.test_outputs(0))[:, 0]
    >>> torch.allclose(-found.test[:, 0], moved), found.test_change.abs().max().item() < 1e-12
    (True, True)
    """
    h, basis = H.shape[1], possible_gradients(path.model.loss, path.start_outputs, path.targets)
    random = gaussian(len(H), probes, default_generator(H.device), H)
    block = torch.cat([H, _project(random, basis)], dim=1)
    fine = _swept(StretchedWindow(path, length), block, source=True)
    coarse = _swept(StretchedWindow(path, 2 * length), block[:, : h + REPEATED], source=False)
    size = block[:, :h].double().square().sum(0)
    left, other = (torch.stack([s.left[k][:h] for k in coarse.left]) / size for s in (fine, coarse))
    left_error = _SAFETY * (left - other).abs().cummax(0).values
    if length > 1:
        left_error[1:].clamp_(min=_LEAST)
    directions, least = _directions(fine.gramian[h:, h:], coarse.gramian[h:, h:])
    return ProbedOperators(
        test=fine.test[:, :h],
        test_change=_SAFETY * (coarse.test[:, :h] - fine.test[:, :h]),
        source=-fine.test[:, -1],
        steps=list(coarse.left),
        left=left,
        left_error=left_error,
        dissipated=fine.shares(h),
        dissipated_error=_SAFETY * (fine.shares(h) - coarse.shares(h)).abs(),
        directions=directions,
        directions_least=least,
    )


def _directions(fine: Float[Tensor, "c c"], coarse: Float[Tensor, "r r"]) -> tuple[float, float]:
    """How many directions share the dissipation, and at least how many, from products of W with random ones."""
    c, r = len(fine), len(coarse)
    rows, columns = torch.triu_indices(c, c, 1)
    trace = fine.trace() / c
    square = torch.minimum(fine[rows, columns].square().mean(), trace.square())  # no eigenvalue is negative
    turned = (fine[:r, :r].trace() / coarse.trace() - 1).abs()
    by_chance = _TWO_SIDED * (2 * square / c).sqrt() / trace
    more = 1 + _TWO_SIDED * _PAIRS / len(rows) ** 0.5 + 2 * turned
    value = trace.square() / square
    return value.item(), max(1.0, (value * (1 - by_chance - turned).clamp(min=0).square() / more).item())


def possible_gradients(loss: ExampleLoss, outputs: Float[Tensor, "n *p"], targets: Tensor) -> Float[Tensor, "p q"]:
    """An orthonormal basis of the gradients that the loss of one example can have, from its curvature.

    >>> from poprisk._core.autodiff import cross_entropy_loss
    >>> possible_gradients(cross_entropy_loss, torch.zeros(2, 3), torch.tensor([0, 1])).shape  # they add up to 0
    torch.Size([3, 2])
    """
    values, vectors = torch.linalg.eigh(loss_hessians(loss, outputs, targets).double().mean(0))
    kept = values > _NULL * values.max()
    return vectors[:, kept].to(outputs) if bool(kept.any()) else torch.eye(len(values)).to(outputs)


def _project(H: Float[Tensor, "N k"], basis: Float[Tensor, "p q"]) -> Float[Tensor, "N k"]:
    return (basis @ (basis.T @ H.reshape(-1, len(basis), H.shape[1]))).reshape(H.shape)


def _swept(window: StretchedWindow, H: Float[Tensor, "N c"], *, source: bool) -> _Sweep:
    gramian = torch.zeros(H.shape[1], H.shape[1], dtype=torch.float64, device=H.device)

    def add(j: int, F: Block, rows: Block) -> None:
        gramian.add_((F.T @ (window.effective_preconditioners[j][:, None] * F)).double())

    left = {0: H.double().square().sum(0)}

    def project(k: int, z: Block) -> None:
        left[k] = (H * z).double().sum(0)

    swept = window.forward(H, source=source, watch=add, after=project)
    return _Sweep(gramian, left, swept.test.double())
