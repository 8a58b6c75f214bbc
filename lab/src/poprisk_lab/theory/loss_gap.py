r"""The gap of the training loss to its infimum, read off the output gradient alone (a Bregman divergence)."""

from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from poprisk.errors import DataError, HyperparameterError

GapLoss = Literal["squared", "cross_entropy", "logistic"]


def bregman_gap(
    gradient: Float[Tensor, "n p"], targets: Shaped[Tensor, "rows *p2"], loss: GapLoss
) -> Float[Tensor, ""]:
    r"""How far the training loss is above its infimum, from the output gradient alone, Eq. ``bregman_loss_gap``.

    .. math:: \Phi_S(u) - \inf \Phi_S = D_{\Phi_S^*}(0, g), \qquad g = \nabla \Phi_S(u)

    For squared loss the divergence is :math:`\frac n2 \|g\|^2`. For cross-entropy and logistic loss it is the mean of
    :math:`KL(q_i \| q_i + n g_i)`, as :math:`q_i + n g_i` are the predicted probabilities.

    Differs from the paper, which asks for a minimizer: with hard labels there is none and the infimum 0 is approached
    at infinity; the identity holds with the infimum.

    Args:
        gradient: g, the gradient of the mean loss, one row per example (1/n inside).
        targets: For squared loss anything with n rows (not used); class indices [n] or probabilities [n, p] for
            cross-entropy; probabilities of class 1, [n] or [n, 1], for logistic loss.
        loss: Which loss.

    Returns:
        The gap. It is infinite where a target class has lost all probability to rounding.

    Raises:
        DataError: shapes do not fit, or a gradient that no outputs have under this loss.
        HyperparameterError: another loss.

    >>> bregman_gap(torch.tensor([[0.5], [-1.0]]), torch.zeros(2), "squared")  # residuals 1 and -2
    tensor(1.2500)
    >>> bregman_gap(torch.tensor([[-0.5, 0.5]]), torch.tensor([0]), "cross_entropy")  # log 2
    tensor(0.6931)
    """
    n, p = gradient.shape
    if len(targets) != n:
        raise DataError(f"targets must have one row per example, {n}, got {len(targets)}")
    if loss == "squared":
        return 0.5 * n * gradient.square().sum()
    if loss == "logistic":
        if p != 1 or targets.numel() != n:
            raise DataError(
                f"logistic loss has one output per example, got gradient [{n}, {p}] and {targets.numel()} targets"
            )
        one = targets.reshape(n, 1).to(gradient.dtype)
        q, ng = torch.cat([1 - one, one], dim=1), torch.cat([-gradient, gradient], dim=1) * n
    elif loss == "cross_entropy":
        q, ng = _probabilities(targets, gradient), n * gradient
    else:
        raise HyperparameterError(f'loss must be "squared", "cross_entropy" or "logistic", got {loss!r}')
    return _mean_divergence(q, ng)


def loss_gap(outputs: Float[Tensor, "n p"], targets: Shaped[Tensor, "rows *p2"], loss: GapLoss) -> Float[Tensor, ""]:
    r"""The same gap from the outputs, :math:`\Phi_S(u) - \inf \Phi_S` with :math:`\Phi_S` the mean loss.

    Args:
        outputs: u, one row per example.
        targets: As for ``bregman_gap``; the targets themselves for squared loss.
        loss: Which loss.

    >>> loss_gap(torch.tensor([[1.0], [-2.0]]), torch.zeros(2), "squared")
    tensor(1.2500)
    """
    n = outputs.shape[0]
    if loss == "squared":
        if targets.numel() != outputs.numel():
            raise DataError(f"targets must be like the outputs, {list(outputs.shape)}, got {list(targets.shape)}")
        return (outputs - targets.reshape(outputs.shape)).square().sum() / (2 * n)
    if loss == "logistic":
        one = targets.reshape(n, 1).to(outputs.dtype)
        q, u = torch.cat([1 - one, one], dim=1), torch.cat([torch.zeros_like(outputs), outputs], dim=1)
    elif loss == "cross_entropy":
        q, u = _probabilities(targets, outputs), outputs
    else:
        raise HyperparameterError(f'loss must be "squared", "cross_entropy" or "logistic", got {loss!r}')
    losses = -(q * u.log_softmax(dim=1)).sum(dim=1)
    return (losses + torch.xlogy(q, q).sum(dim=1)).mean()


def _probabilities(targets: Tensor, like: Tensor) -> Tensor:
    n, p = like.shape
    if targets.dim() == 1 and not targets.is_floating_point():
        return torch.nn.functional.one_hot(targets.long(), p).to(like.dtype)
    if tuple(targets.shape) != (n, p):
        raise DataError(f"targets must be class indices [{n}] or probabilities [{n}, {p}], got {list(targets.shape)}")
    return targets.to(like.dtype)


def _mean_divergence(q: Tensor, ng: Tensor) -> Tensor:
    """Mean KL(q ‖ q + ng), by log1p where q is 1: the gap of a well fitted example is far below rounding of q."""
    predicted = q + ng
    if (predicted < -1e-4).any() or (ng.sum(dim=1).abs() > 1e-4).any():
        raise DataError(
            "rows of n·gradient must be probabilities minus targets, got some that are not: check the 1/n and the loss"
        )
    log_ratio = torch.log1p(torch.where(q > 0, ng / q, 0.0).clamp(min=-1.0))
    return -(q * log_ratio).sum(dim=1).mean()
