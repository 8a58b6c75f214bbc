"""Whether a module maps each example by itself: what per-example gradients and Jacobians take for granted."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from poprisk.errors import DataError


def check_independence(module: nn.Module) -> None:
    """Refuses modules in which examples mix or chance decides, before anything is computed with them.

    Random functions called without a module (``torch.nn.functional.dropout``) are refused when they run.
    """
    for name, child in module.named_modules():
        problem = _problem(child)
        if problem is not None:
            where = f"{type(child).__name__} {name!r}" if name else type(child).__name__
            raise DataError(
                f"every example must be mapped by itself, by a fixed function of the weights, but {where} {problem}"
            )


def _problem(child: nn.Module) -> str | None:
    if isinstance(child, _BatchNorm):
        if child.running_mean is None:
            return "has no running statistics and always mixes the batch: use GroupNorm in its place"
        if child.training:
            return "is in training mode and mixes the batch: call .eval() on it, or use GroupNorm in its place"
    if isinstance(child, _InstanceNorm) and child.training and child.track_running_stats:
        return "is in training mode and writes its running statistics: call .eval() on it"
    if draws_at_random(child):
        return "is in training mode and draws at random: call .eval() on it or set its probability to 0"
    return None


def draws_at_random(child: nn.Module) -> bool:
    """Whether a layer's outputs are random in the mode that it is in.

    >>> draws_at_random(nn.Dropout(0.5)), draws_at_random(nn.Dropout(0.5).eval())
    (True, False)
    """
    if not child.training:
        return False
    if isinstance(child, _DropoutNd):
        return child.p > 0
    if isinstance(child, nn.MultiheadAttention):
        return child.dropout > 0
    if isinstance(child, nn.RNNBase):
        return child.dropout > 0 and child.num_layers > 1
    return isinstance(child, nn.RReLU)
