r"""First and second derivatives of a loss by the outputs, for a batch of examples given as outputs and targets."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, jacrev, vmap

from poprisk._core.autodiff.losses import (
    IGNORED,
    ExampleLoss,
    cross_entropy_loss,
    logistic_loss,
    resolve_loss,
    scalar_loss,
    squared_loss,
)
from poprisk._core.autodiff.precision import exact_kernels


def loss_gradients(loss: str | ExampleLoss, outputs: Float[Tensor, "n *out"], targets: Tensor) -> Float[Tensor, "n p"]:
    r"""One row per example, :math:`\nabla_u \ell(u_i, y_i)`; no 1/n inside.

    >>> loss_gradients("squared", torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 1.0]]))  # u - y
    tensor([[2., 0.]])
    """
    if _is_classification(loss, outputs, targets):
        return _cross_entropy_gradients(outputs, targets)
    with exact_kernels():
        return vmap(grad(_of_flat(loss, outputs)))(flatten_outputs(outputs), targets)


def loss_hessians(loss: str | ExampleLoss, outputs: Float[Tensor, "n *out"], targets: Tensor) -> Float[Tensor, "n p p"]:
    r"""One block per example, :math:`\nabla_u^2 \ell(u_i, y_i)`, exactly symmetric; no 1/n inside.

    Squared loss, logistic loss and cross-entropy of one class are written down, so that they keep their digits where an
    example is fitted; any other loss costs p double backward passes.

    >>> loss_hessians("cross_entropy", torch.zeros(1, 2), torch.tensor([0]))  # diag(π) - π πᵀ
    tensor([[[ 0.2500, -0.2500],
             [-0.2500,  0.2500]]])
    """
    written = _written_hessians(loss, outputs, targets)
    if written is not None:
        return written
    with exact_kernels():
        H = vmap(jacrev(grad(_of_flat(loss, outputs))))(flatten_outputs(outputs), targets)
    return (H + H.mT) / 2


def loss_hessian_products(
    loss: str | ExampleLoss, outputs: Float[Tensor, "n *out"], targets: Tensor, directions: Float[Tensor, "n p"]
) -> Float[Tensor, "n p"]:
    r"""One row per example, :math:`\nabla_u^2 \ell(u_i, y_i)\, s_i`; the blocks are formed only where written down.

    >>> loss_hessian_products("squared", torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[1.0, 5.0]]))
    tensor([[1., 5.]])
    """
    written = _written_hessians(loss, outputs, targets)
    if written is not None:
        return (written @ directions.unsqueeze(2)).squeeze(2)
    score = _of_flat(loss, outputs)

    def product(u: Tensor, y: Tensor, s: Tensor) -> Tensor:
        return grad(lambda u: (grad(score)(u, y) * s).sum())(u)

    with exact_kernels():
        return vmap(product)(flatten_outputs(outputs), targets, directions)


def flatten_outputs(outputs: Float[Tensor, "n *out"]) -> Float[Tensor, "n p"]:
    """Outputs of any shape as p numbers per example.

    >>> flatten_outputs(torch.zeros(4)).shape, flatten_outputs(torch.zeros(4, 2, 3)).shape
    (torch.Size([4, 1]), torch.Size([4, 6]))
    """
    return outputs.reshape(outputs.shape[0], -1)


def _of_flat(loss: str | ExampleLoss, outputs: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss as a function of one example's flat outputs."""
    score, shape = scalar_loss(resolve_loss(loss)), outputs.shape[1:]
    return lambda u, y: score(u.reshape(shape), y)


def _written_hessians(loss: str | ExampleLoss, outputs: Tensor, targets: Tensor) -> Tensor | None:
    flat, resolved = flatten_outputs(outputs), resolve_loss(loss)
    n, p = flat.shape
    if resolved is squared_loss:
        return torch.eye(p, dtype=flat.dtype, device=flat.device).repeat(n, 1, 1)
    if resolved is logistic_loss and p == 1:
        return (flat.sigmoid() * (-flat).sigmoid()).unsqueeze(2)
    if _is_classification(loss, outputs, targets):
        return _cross_entropy_hessians(flat) * (targets != IGNORED)[:, None, None]
    return None


def _is_classification(loss: str | ExampleLoss, outputs: Tensor, targets: Tensor) -> bool:
    """Cross-entropy of one class index for each example."""
    return resolve_loss(loss) is cross_entropy_loss and outputs.dim() == 2 and targets.dim() == 1


def _cross_entropy_gradients(logits: Float[Tensor, "n p"], targets: Tensor) -> Float[Tensor, "n p"]:
    # π - 1 as minus the sum of the others: where the class is nearly certain, the difference has no digits left.
    counted = targets != IGNORED
    classes = torch.where(counted, targets, 0).unsqueeze(1)
    others = logits.softmax(dim=1).scatter(1, classes, 0.0)
    return others.scatter(1, classes, -others.sum(dim=1, keepdim=True)) * counted.unsqueeze(1)


def _cross_entropy_hessians(logits: Float[Tensor, "n p"]) -> Float[Tensor, "n p p"]:
    # The diagonal π(1 - π) as a sum over the other classes: where one is nearly certain, 1 - π has no digits left.
    probabilities = logits.softmax(dim=1)
    products = probabilities[:, :, None] * probabilities[:, None, :]
    products.diagonal(dim1=1, dim2=2).zero_()
    return torch.diag_embed(products.sum(dim=2)) - products
