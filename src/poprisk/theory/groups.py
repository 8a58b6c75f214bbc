r"""From directions back to examples: which ones carry a direction, and a group for every example.

A whitened direction φ_j has one entry per output; its energy on example i is

.. math:: e_{ij} = \sum_c \phi_j[i, c]^2, \qquad \sum_i e_{ij} = 1, \qquad
   \sum_{j \le r} e_{ij} = \operatorname{tr} (Q_r)_{ii}

*Rule of the groups:* an example belongs to the direction among the first r that has the most energy on it, if the r
directions together hold at least a stated share of the example (by default the mean share r/N); otherwise to the tail.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk.errors import DataError, HyperparameterError
from poprisk.operators import require_length
from poprisk.theory.directions import SignalDirections

TAIL = -1


@dataclass(frozen=True)
class DirectionExample:
    """One example of one direction."""

    direction: int
    """j, counted from 0."""
    value: float
    r""":math:`\lambda_j`."""
    example: int
    energy: float
    r""":math:`e_{ij}`: the share of the direction that lies on this example."""
    output: int
    """The output of the example with the largest entry."""
    sign: int
    """Its sign: which way this example goes along the direction, relative to the others."""


@dataclass(frozen=True, eq=False)
class ExampleGroups:
    """One row per example; ``columns`` and ``labels`` are what an audit takes."""

    group: Int[Tensor, "n"]
    """The direction it belongs to, counted from 0; -1 for the tail."""
    captured: Float[Tensor, "n"]
    """Share of the example's outputs that the r directions hold, between 0 and 1."""
    energy: Float[Tensor, "n"]
    """Share of its direction that lies on this example; of the direction with the most energy, for the tail too."""
    tail_share: Float[Tensor, "n"] | None
    r"""Share of the example's output gradient outside the r directions, :math:`\|t_i\|^2 / (\|t_i\|^2 + \|s_i\|^2)`.

    With :math:`s = \Pi_r g` and :math:`t = g - s`; None where no gradient was given.
    """
    tail_norm: Float[Tensor, "n"] | None
    r""":math:`\|t_i\|`: how much of its output gradient lies outside the r directions, in the gradient's own units.

    Directions know no labels, energies alone do not point at wrong ones; the gradient does, and what a smooth metric
    leaves of it in the tail is large for labels that disagree with their neighbours.
    """

    @property
    def labels(self) -> list[str]:
        """The groups by name: "direction 1", …, or "tail"."""
        return ["tail" if g == TAIL else f"direction {g + 1}" for g in self.group.tolist()]

    def columns(self) -> dict[str, list]:
        """The table by column, plain lists."""
        table: dict[str, list] = {
            "example": list(range(len(self.group))),
            "group": self.labels,
            "captured": self.captured.tolist(),
            "energy": self.energy.tolist(),
        }
        for name, column in (("tail_share", self.tail_share), ("tail_norm", self.tail_norm)):
            if column is not None:
                table[name] = column.tolist()
        return table


def direction_energies(directions: SignalDirections, r: int, outputs: int = 1) -> Float[Tensor, "n r"]:
    r""":math:`e_{ij}`, one column per direction, each of which adds up to 1.

    Args:
        directions: C_R.
        r: Directions taken.
        outputs: p, outputs per example.

    Raises:
        DataError: the number of outputs does not divide the length of a direction.

    >>> from poprisk.theory import euclidean_metric, signal_directions
    >>> directions = signal_directions(torch.diag(torch.tensor([2.0, 3.0])), euclidean_metric(2, dtype=torch.float32))
    >>> direction_energies(directions, 1)
    tensor([[0.],
            [1.]])
    """
    return _blocks(directions, r, outputs).square().sum(dim=1)


def top_examples(directions: SignalDirections, r: int, outputs: int = 1, *, count: int = 5) -> list[DirectionExample]:
    """The examples with the most energy of each direction, direction by direction.

    >>> from poprisk.theory import euclidean_metric, signal_directions
    >>> directions = signal_directions(torch.diag(torch.tensor([2.0, 3.0])), euclidean_metric(2, dtype=torch.float32))
    >>> [(row.direction, row.example, row.energy) for row in top_examples(directions, 2, count=1)]
    [(0, 1, 1.0), (1, 0, 1.0)]
    """
    if count < 1:
        raise HyperparameterError(f"count must be positive, got {count}")
    blocks = _blocks(directions, r, outputs)
    rows = []
    for j in range(r):
        energies = blocks[:, :, j].square().sum(dim=1)
        for i in energies.argsort(descending=True, stable=True)[:count].tolist():
            c = int(blocks[i, :, j].abs().argmax())
            sign = -1 if blocks[i, c, j] < 0 else 1
            rows.append(DirectionExample(j, directions.values[j].item(), i, energies[i].item(), c, sign))
    return rows


def example_groups(
    directions: SignalDirections,
    r: int,
    outputs: int = 1,
    *,
    gradient: Float[Tensor, "N"] | None = None,
    least_share: float | None = None,
) -> ExampleGroups:
    r"""A group for every example, by the rule of this module.

    Args:
        directions: C_R.
        r: Directions that count as signal, at least 1.
        outputs: p, outputs per example.
        gradient: The output gradient g(s) of the window, to say how much of each example's own lies in the tail.
        least_share: Share of an example that the r directions must hold; default: r/N.

    Raises:
        DataError: sizes do not fit.
        HyperparameterError: r is not between 1 and the number of directions known.

    >>> from poprisk.theory import euclidean_metric, signal_directions
    >>> factor = torch.diag(torch.tensor([2.0, 3.0, 0.1]))
    >>> directions = signal_directions(factor, euclidean_metric(3, dtype=torch.float32))
    >>> example_groups(directions, 2).labels
    ['direction 2', 'direction 1', 'tail']
    """
    if r < 1:
        raise HyperparameterError(f"groups need at least one direction, got r = {r}")
    energies = direction_energies(directions, r, outputs)
    captured = energies.sum(dim=1) / outputs
    strongest = energies.max(dim=1)
    least = r / directions.metric.size if least_share is None else least_share
    group = torch.where(captured >= least, strongest.indices, TAIL)
    tail = (None, None) if gradient is None else _tails(directions, r, outputs, gradient)
    return ExampleGroups(group, captured, strongest.values, *tail)


def _tails(directions: SignalDirections, r: int, outputs: int, gradient: Tensor) -> tuple[Tensor, Tensor]:
    require_length(gradient, directions.metric.size, "gradient")
    signal = directions.metric_projector(r) @ gradient
    inside, outside = (x.reshape(-1, outputs).square().sum(dim=1) for x in (signal, gradient - signal))
    total = inside + outside
    share = torch.where(total > 0, outside / total.clamp(min=torch.finfo(total.dtype).tiny), 0.0)
    return share, outside.sqrt()


def _blocks(directions: SignalDirections, r: int, outputs: int) -> Tensor:
    phi = directions.projector(r).basis
    if outputs < 1 or phi.shape[0] % outputs:
        raise DataError(f"{phi.shape[0]} outputs are no multiple of {outputs} per example: check outputs")
    return phi.reshape(-1, outputs, r)
