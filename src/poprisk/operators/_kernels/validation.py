"""Checks of the model, weights, inputs and preconditioner of a kernel."""

from collections.abc import Mapping

import torch
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, check_precision
from poprisk.errors import DataError

# Diagonal of M: one number for all weights, or one for each.
Diagonal = float | Tensor


def check_weights(model: FlatModel, w: Tensor) -> None:
    """Refuses weights of another shape, of low precision, or not finite."""
    if w.shape != (model.size,):
        raise DataError(f"w must be a flat vector [{model.size}] like model.weights, got shape {list(w.shape)}")
    check_precision(model.parameters, w)
    dtypes = {p.dtype for p in model.parameters.values()}
    if len(dtypes) > 1:
        raise DataError(f"a kernel needs all weights in one dtype, got {sorted(map(str, dtypes))}: call .double()")
    if not torch.isfinite(w).all():
        raise DataError("w must be finite, got NaN or infinity: take the weights of an earlier step")


def check_same_kind(inputs: Inputs, other: Inputs) -> None:
    """Refuses a second set of examples that has other shapes or dtypes than the first."""
    kinds = [
        [(tuple(part.shape[1:]), part.dtype) for part in (each if isinstance(each, tuple) else (each,))]
        for each in (inputs, other)
    ]
    if kinds[0] != kinds[1]:
        raise DataError(f"both sets of examples must have one shape and dtype, got {kinds[0]} and {kinds[1]}")


def preconditioner_roots(model: FlatModel, w: Tensor, preconditioner: Diagonal | None) -> Mapping[str, Tensor]:
    """The root of a diagonal M, by parameter; empty for none.

    Raises:
        DataError: another size or dtype than the weights, or an entry that is negative or not finite.

    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False), "squared")
    >>> preconditioner_roots(model, model.weights, 4.0)
    {'weight': tensor([[2., 2.]])}
    """
    M = preconditioner_diagonal(model, w, preconditioner)
    return {} if M is None else model.unflatten(M.sqrt())


def preconditioner_diagonal(model: FlatModel, w: Tensor, preconditioner: Diagonal | None) -> Tensor | None:
    """M as a vector like the weights, or None.

    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False), "squared")
    >>> preconditioner_diagonal(model, model.weights, 4.0)
    tensor([4., 4.])
    """
    if preconditioner is None:
        return None
    M = preconditioner.detach() if isinstance(preconditioner, Tensor) else w.new_full((model.size,), preconditioner)
    if M.shape != (model.size,) or M.dtype != w.dtype or M.device != w.device:
        raise DataError(
            f"preconditioner must be a number or a diagonal [{model.size}] of {w.dtype} on {w.device}, got shape "
            f"{list(M.shape)} of {M.dtype} on {M.device}"
        )
    if not (torch.isfinite(M) & (M >= 0)).all():
        raise DataError(
            "preconditioner must be finite and not negative, so that the kernel is positive semidefinite: check the "
            "learning rate and gate behind it"
        )
    return M
