r"""The standard error of a risk that was estimated from the training examples themselves."""

import math

from jaxtyping import Float
from torch import Tensor
from torch.func import vmap

from poprisk._core.autodiff import ExampleLoss, logistic_loss
from poprisk.errors import DataError


def corrected_risk_error(
    training: Float[Tensor, "n"], own: Float[Tensor, "m"], without: Float[Tensor, "m"], mistake: float = 0.0
) -> float:
    r"""The error of :math:`\frac1n \sum_i \ell_i + \frac1m \sum_{i \in M} (\ell_i^{(-i)} - \ell_i)` as a risk.

    .. math:: \mathrm{se}^2 = \frac{\mathrm{var}(\ell^{(-i)})}{n} (1 + \mathrm{gap})^2
       + \frac{\mathrm{var}(\ell^{(-i)} - \ell)}{m} \Bigl(1 - \frac mn\Bigr) + \mathrm{mistake}^2

    with the relative gap between the estimate and the training loss, kept between 0 and 1: the more the model bends to
    its data, the more the losses move together (measured for folds: :func:`~poprisk.risk.inflated_error`).

    Args:
        training: Losses of all training examples.
        own: Of the sampled ones, by the model of the run.
        without: Of the sampled ones, as if they had not been seen.
        mistake: What one unseen mistake would add, see :func:`unseen_mistake`.
    """
    n, m = len(training), len(own)
    if m < 2:
        return math.nan
    fitted = training.double().mean().item()
    value = fitted + (without - own).double().mean().item()
    gap = min(max((value - fitted) / value, 0.0), 1.0) if value > 0 else 0.0
    spread = without.double().var().item() / n * (1 + gap) ** 2
    sampled = (without - own).double().var().item() / m * max(0.0, 1 - m / n)
    return math.sqrt(spread + sampled + mistake**2)


def unseen_mistake(loss: ExampleLoss, outputs: Float[Tensor, "m *out"], targets: Tensor, n: int) -> float:
    """What one more mistake among n would add to the mean loss: nothing in n examples speaks against it.

    Where targets are classes, a mistake costs about the loss of the second most likely class (of the other one, for the
    logistic loss). For other targets it is taken to be 0, and only the spread of the losses counts.

    >>> import torch
    >>> from poprisk._core.autodiff import resolve_loss
    >>> outputs = torch.tensor([[4.0, 0.0], [0.0, 4.0]])
    >>> round(unseen_mistake(resolve_loss("cross_entropy"), outputs, torch.tensor([0, 1]), 10), 3)
    0.402
    """
    if loss is logistic_loss:
        other = (outputs.reshape(len(outputs), -1) <= 0).to(targets.dtype).view(targets.shape)
    elif targets.is_floating_point() or outputs.dim() != 2 or outputs.shape[1] < 2 or targets.dim() != 1:
        return 0.0
    else:
        other = outputs.topk(2, dim=1).indices[:, 1].to(targets.dtype)
    try:
        found = example_losses_of(loss, outputs, other).mean().item() / n
    except (DataError, RuntimeError, IndexError):  # whole numbers that are no classes, to a loss of one's own
        return 0.0
    return found if math.isfinite(found) else 0.0


def example_losses_of(loss: ExampleLoss, outputs: Float[Tensor, "m *out"], targets: Tensor) -> Float[Tensor, "m"]:
    """Each example's loss, in float64."""
    return vmap(loss)(outputs, targets).double()
