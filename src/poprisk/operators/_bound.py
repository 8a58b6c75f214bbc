"""An inequality of the theory with its two sides, and what of its left side is not the theory's."""

from dataclasses import dataclass
from typing import Literal

import torch

from poprisk.operators._channels import DissipationChannels, operator_norm

Form = Literal["discrete", "flow"]

# Rounding errors of the sizes involved that a side may be off, per root of its dimension.
MARGIN = 100.0


@dataclass(frozen=True)
class Bound:
    """An inequality ``left <= right`` with its two sides.

    >>> bound = Bound("remainder", "eq:effective_screen_bound", "discrete", left=1.0, right=4.0)
    >>> bound.holds, bound.tightness
    (True, 0.25)
    """

    name: str
    label: str
    """Of the equation in the paper."""
    form: Form | Literal["algebra"]
    """Whether the budget is first-order dissipation or loss drop; "algebra" where no displacement enters."""
    left: float
    right: float
    rounding: float = 0.0
    """What floating point may have added to the left side."""
    discretization: float = 0.0
    """What cutting the time of a flow into intervals may have added to the left side, or taken from the right one."""

    @property
    def allowed(self) -> float:
        """Rounding and discretization together."""
        return self.rounding + self.discretization

    @property
    def holds(self) -> bool:
        """Whether left is at most right, up to rounding and discretization."""
        return self.left <= self.right + self.allowed

    @property
    def tightness(self) -> float:
        """Left over right: 1 where the bound is attained; 0 where both sides are 0."""
        if self.right == 0:
            return 0.0 if self.left <= self.allowed else float("inf")
        return self.left / self.right

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "FAILS"
        known_to = f" + {self.discretization:.1g} (discretization)" if self.discretization else ""
        return f"{self.name} ({self.form}): {self.left:.3g} <= {self.right:.3g}{known_to} {verdict}"


def eps_of(channels: DissipationChannels) -> float:
    """The rounding of one operation in the dtype of the channels.

    >>> from poprisk.operators import dissipation_channels
    >>> eps_of(dissipation_channels(torch.eye(1), torch.eye(1), torch.eye(1))) == torch.finfo(torch.float32).eps
    True
    """
    return torch.finfo(channels.roots.dtype).eps


def rounding_of_test_transfer(channels: DissipationChannels) -> float:
    """What rounding may add to the norm of G.

    >>> from poprisk.operators import dissipation_channels
    >>> rounding_of_test_transfer(dissipation_channels(torch.eye(1), torch.eye(1), torch.zeros(1, 1)))
    0.0
    """
    size = operator_norm(channels.reduced_test * channels.roots)
    return MARGIN * eps_of(channels) * channels.vectors.shape[0] ** 0.5 * size
