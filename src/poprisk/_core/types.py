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
    r"""A step of one tensor of weights, as an affine map of its gradient g (under ``maximize`` minus the gradient).

    .. math::
       f &= g + \lambda^c w, \qquad m = \beta m_{prev} + \kappa f \\
       \Delta w &= -M \odot (a\, m + b\, f) - \mathrm{decay} \odot w + \mathrm{source}

    Learning rate, gate, bias corrections and Adam's denominator are all inside ``preconditioner``. In rules of Adam's
    kind κ = 1 - β, a = 1 and b = λᶜ = 0, except that Adam's own weight decay is λᶜ.
    """

    preconditioner: Float[Tensor, "*shape"]
    """M, one entry per coordinate, or one for all of them (SGD); zero where the gate is closed."""
    momentum: float
    """β of the momentum recursion."""
    decay: Scalar | Float[Tensor, "*shape"]
    """Share of the weights taken off by decoupled weight decay; a tensor when the decay is gated."""
    source: Scalar | Float[Tensor, "*shape"] = 0.0
    """What is added beyond momentum and decay: 0 for every rule of this library."""
    new_gradient: float | None = None
    """κ; None means 1 - β."""
    buffer_share: float = 1.0
    """a."""
    direct_share: float = 0.0
    """b."""
    coupled_decay: float = 0.0
    """λᶜ, weight decay that enters the gradient."""

    @property
    def kappa(self) -> float:
        """κ, the weight of the new gradient in the momentum."""
        return 1 - self.momentum if self.new_gradient is None else self.new_gradient


@runtime_checkable
class VarianceSource(Protocol):
    """Where the optimizer gets the variance of the batch gradient from, if not from the stream of gradients itself."""

    def variances(self, parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
        r"""Variance of each parameter's batch-mean gradient, :math:`(\Sigma_B)_{kk}/(b-1)`.

        Called once per step, for the parameters that have a gradient, which is the mean over the batch observed. The
        source forgets the batch afterwards. ``None`` stands for "not observed": that parameter uses the stream.
        """
        ...
