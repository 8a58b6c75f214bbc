"""Axis names, and the protocols through which rooms on one level speak to each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

# A scalar that may live on a device, so that nothing has to wait for it.
Scalar = int | float | Tensor


@dataclass(frozen=True)
class Linearization:
    r"""The step just taken, as an affine map of the gradient's momentum m (under ``maximize`` minus the buffer).

    .. math:: \Delta w = -M \odot m - \mathrm{decay} \odot w + \mathrm{source}, \qquad m = \beta m_{prev} + (1-\beta) g

    Learning rate, gate, bias corrections and Adam's denominator are all inside ``preconditioner``.
    """

    preconditioner: Float[Tensor, "*shape"]
    """M, one entry per coordinate; zero where the gate is closed."""
    momentum: float
    """β of the momentum recursion."""
    decay: Scalar | Float[Tensor, "*shape"]
    """Share of the weights taken off by decoupled weight decay; a tensor when the decay is gated."""
    source: Scalar | Float[Tensor, "*shape"]
    """What is added beyond momentum and decay: 0 for every rule of this library."""


@runtime_checkable
class Linearizable(Protocol):
    """An optimizer that can say what its last step was; the recorder of a run asks for it."""

    def linearize(self) -> dict[Tensor, Linearization]:
        """The last step of each parameter that took one."""
        ...


@runtime_checkable
class VarianceSource(Protocol):
    """Where the optimizer gets the variance of the batch gradient from, if not from the stream of gradients itself."""

    def variances(self, parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
        r"""Variance of each parameter's batch-mean gradient, :math:`(\Sigma_B)_{kk}/(b-1)`.

        Called once per step, for the parameters that have a gradient, which is the mean over the batch observed. The
        source forgets the batch afterwards. ``None`` stands for "not observed": that parameter uses the stream.
        """
        ...
