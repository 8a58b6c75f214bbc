r"""The operators of a window as matrices, beside what really happened."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.html import card


@dataclass(frozen=True)
class Discretization:
    r"""How far operators of a flow, made on intervals of time, are from the flow itself; 0 for runs that take steps.

    With their sum, :math:`e_Q + \|A\| e_S + \|C_Q - A C_S\|\, e_W`, every bound of the flow can be off. All three fall
    with the square of the interval.
    """

    train: float = 0.0
    r""":math:`e_S = \|\Delta u_S + D g\|`."""
    test: float = 0.0
    r""":math:`e_Q = \|\Delta u_Q + G g\|`."""
    root_dissipation: float = 0.0
    r""":math:`e_W = |\sqrt{g^\top W g} - \sqrt{\Phi_S(u(s)) - \Phi_S(u(T))}|`."""


@dataclass(frozen=True, eq=False)
class RealizedWindow:
    r"""What really happened over a window; ``Operators.realized`` makes it.

    .. math:: \Delta u_S = -D g + source_S, \qquad \Delta u_Q = -G g + source_Q
    """

    gradient: Float[Tensor, "N"]
    """g, the output gradient at the start."""
    train_displacement: Float[Tensor, "N"]
    """Δu_S."""
    test_displacement: Float[Tensor, "M"]
    """Δu_Q."""
    train_source: Float[Tensor, "N"] | None = None
    """What of Δu_S is not linear in g; default: none."""
    test_source: Float[Tensor, "M"] | None = None
    """What of Δu_Q is not linear in g."""
    loss_drop: float | None = None
    """Φ_S(u(s)) - Φ_S(u(T)); needed for bounds in the form of gradient flow."""
    discretization: Discretization = field(default_factory=Discretization)
    """How far the operators are from a flow; nothing for a run that takes steps, whose operators are exact."""


@dataclass(frozen=True, eq=False)
class Sources:
    """What moved beside the initial output gradient: decay, and momentum carried in from before the window."""

    train: Float[Tensor, "N"]
    test: Float[Tensor, "M"]
    gradient: Float[Tensor, "N"]
    """g(T) = P g(s) + this."""


@dataclass(frozen=True, eq=False)
class Operators:
    """The dense operators of a window, with what really happened beside them."""

    propagator: Float[Tensor, "N N"]
    """P_g(T, s)."""
    factor: Float[Tensor, "r N"]
    r"""R, an upper-triangular factor of the dissipation gramian, :math:`W = R^\top R`."""
    train_transfer: Float[Tensor, "N N"]
    """D."""
    test_transfer: Float[Tensor, "M N"]
    """G."""
    sources: Sources
    output_gradient: Float[Tensor, "N"]
    """g(s)."""
    train_displacement: Float[Tensor, "N"]
    """U_S(T) - U_S(s), measured."""
    test_displacement: Float[Tensor, "M"]
    """U_Q(T) - U_Q(s), measured."""
    losses: tuple[float, float]
    """The mean training loss at the start and at the end."""
    num_examples: int
    discretization: Discretization = field(default_factory=Discretization)
    """How far the operators of a flow are from it; nothing for steps, whose operators are exact."""

    def __repr__(self) -> str:
        M, N = self.test_transfer.shape
        return f"<Operators of {self.num_examples} examples, N = {N} training and M = {M} test outputs>"

    def _repr_html_(self) -> str:
        M, N = self.test_transfer.shape
        missed = [self.predicted_train - self.train_displacement, self.predicted_test - self.test_displacement]
        rows = {
            "propagator, P": f"{N} × {N}",
            "train_transfer, D": f"{N} × {N}",
            "test_transfer, G": f"{M} × {N}",
            "factor of W": f"{len(self.factor)} × {N}",
            "training loss": f"{self.losses[0]:.4g} → {self.losses[1]:.4g}",
            "first-order dissipation, gᵀWg": f"{self.first_order_dissipation:.4g}",
            "displacement missed by": f"{max((x.abs().max().item() for x in missed if len(x)), default=0.0):.1g}",
        }
        return card("Operators", rows)

    @property
    def dissipation_gramian(self) -> Float[Tensor, "N N"]:
        """W. For its spectrum use ``factor``: W itself resolves nothing below √eps."""
        return self.factor.T @ self.factor

    @property
    def train_completion(self) -> Float[Tensor, "N N"]:
        r""":math:`F_{SS} = I - P_g` (``eq:train_complement``)."""
        return torch.eye(len(self.propagator), dtype=self.factor.dtype, device=self.factor.device) - self.propagator

    @property
    def first_order_dissipation(self) -> float:
        r""":math:`g^\top W g`. Equals the loss drop for full batches and small steps only: see ``loss_drop``."""
        return (self.factor @ self.output_gradient).square().sum().item()

    @property
    def loss_drop(self) -> float:
        """What the training loss really lost over the window."""
        return self.losses[0] - self.losses[1]

    @property
    def predicted_train(self) -> Float[Tensor, "N"]:
        """-D g + source_S."""
        return self.sources.train - self.train_transfer @ self.output_gradient

    @property
    def predicted_test(self) -> Float[Tensor, "M"]:
        """-G g + source_Q."""
        return self.sources.test - self.test_transfer @ self.output_gradient

    @property
    def realized(self) -> RealizedWindow:
        """What happened, for the bounds: ``window_bounds(coupling, ops.realized)``.

        >>> from poprisk._core.autodiff import FlatModel
        >>> from poprisk.operators import Coupling, dissipation_channels, gradient_flow_operators
        >>> from poprisk.theory import window_bounds
        >>> model = FlatModel(torch.nn.Linear(1, 1, bias=False).double(), "squared")
        >>> one = torch.ones(1, 1).double()
        >>> ops = gradient_flow_operators(model, one, one, time=1.0, intervals=4, test_inputs=2 * one)
        >>> coupling = Coupling(dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer))
        >>> all(bound.holds for bound in window_bounds(coupling, ops.realized, form="flow"))
        True
        """
        return RealizedWindow(
            self.output_gradient,
            self.train_displacement,
            self.test_displacement,
            self.sources.train,
            self.sources.test,
            self.loss_drop,
            self.discretization,
        )
