r"""Variants with another estimate of the noise: by successive differences, or by the halves of a batch."""

from jaxtyping import Float
from torch import Tensor

from poprisk._core.types import Scalar
from poprisk_lab.engine.peers import Knobs, States
from poprisk_lab.gates.variants.shared import Direction, after_first, both_parts, first_part, halves, moments


def successive_differences(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""Noise from the differences of successive gradients, which a drift of the mean does not enter.

    .. math:: s \leftarrow \rho s + (1-\rho) (g_t - g_{t-1})^2 / 2

    Algorithm 1's deviation from a lagging average takes the movement of the gradient itself for noise and closes where
    learning is fastest. A difference of neighbours has the noise's variance, and of a mean that drifts by d only d²/2.
    *Limits:* under white noise s has the mean of Algorithm 1's, less its share :math:`\kappa`; for a gradient that is
    constant from step 2 on it vanishes with ρ^t and the rule is AdamW.
    """
    fresh = (g - state["last"]).square() / 2 * after_first(t, g)
    now = moments(g, state, h, t, fresh)
    return now.adam * now.strict(h, t), {**now.kept, "last": g}


def halves_variance(g: Float[Tensor, "*members twice_d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""Noise from the two halves of each batch: exact in the mean, and blind to time.

    .. math:: s \leftarrow \rho s + (1-\rho) \big((g_A - g_B)/2\big)^2

    For halves of independent examples the square has mean :math:`\Sigma_{kk}/b`, the variance of the batch mean,
    whatever the gradient did since the last step: neither drift nor learning is mistaken for noise. *Limits:* equal
    halves give AdamW from step 2; white noise the strict gate.
    """
    mean, a, b = halves(g)
    now = moments(mean, first_part(state), h, t, ((a - b) / 2).square())
    return both_parts(now.adam * now.strict(h, t), now.kept)
