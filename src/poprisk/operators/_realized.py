"""What really happened over a window, as the bounds want it."""

from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor


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
