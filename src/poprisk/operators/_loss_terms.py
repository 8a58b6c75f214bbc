r"""What changed the loss of given examples: each part of a displacement by its share of the change, for any loss.

.. math::
   \ell(u + \Delta) - \ell(u) = \Bigl\langle \int_0^1 \nabla \ell(u + \theta \Delta)\, d\theta,\ \Delta \Bigr\rangle,
   \qquad \Delta = \sum_i \Delta_i

The integral is the same for all parts, so their terms add up to the change.
"""

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import ExampleLoss, gauss_legendre, loss_gradients

_NODES = 32


def loss_weights(
    loss: ExampleLoss, before: Float[Tensor, "m *p"], after: Float[Tensor, "m *p"], targets: Tensor
) -> Float[Tensor, "M"]:
    """The weight of each output's displacement in the change of the mean loss: its gradient, averaged on the way.

    >>> import torch
    >>> from poprisk._core.autodiff import squared_loss
    >>> loss_weights(squared_loss, torch.zeros(1, 1), torch.full((1, 1), 2.0), torch.full((1, 1), 3.0))
    tensor([-2.])
    """
    move = after - before
    total = sum(
        weight * loss_gradients(loss, before + theta * move, targets) for theta, weight in gauss_legendre(_NODES)
    )
    assert isinstance(total, Tensor)
    return total.reshape(-1) / len(before)


def loss_terms(weights: Float[Tensor, "M"], parts: Mapping[str, Float[Tensor, "M"]]) -> dict[str, float]:
    """The terms of the change of the mean loss, one for each part of the displacement.

    >>> import torch
    >>> loss_terms(torch.tensor([-2.0]), {"clean": torch.tensor([3.0]), "noise": torch.tensor([-1.0])})
    {'clean': -6.0, 'noise': 2.0}
    """
    return {name: (weights @ part.to(weights)).item() for name, part in parts.items()}
