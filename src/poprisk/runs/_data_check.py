"""Bad data are refused: values that are not finite, labels that the loss cannot mean; with their number and place."""

import warnings

from torch import Tensor

from poprisk._core.autodiff import IGNORED
from poprisk.errors import DataError, PopRiskWarning


def check_finite(which: str, named: dict[str, Tensor], allow: bool) -> None:
    """Check that inputs and targets are finite.

    Raises:
        DataError: some are not, and that is not allowed.

    >>> import torch
    >>> try:
    ...     check_finite("training", {"inputs": torch.tensor([[1.0], [float("nan")]])}, False)
    ... except DataError as error:
    ...     print(str(error).partition(":")[0])
    training inputs must be finite, but 1 of 2 examples have NaN or infinite values, the first is example 1
    """
    for name, x in named.items():
        bad = _rows(~x.isfinite()) if x.is_floating_point() or x.is_complex() else None
        if bad is None or not bool(bad.any()):
            continue
        found = f"{which} {name} must be finite, but {_count(bad, 'have NaN or infinite values')}"
        if not allow:
            raise DataError(f"{found}: remove or replace them, or pass allow_nonfinite=True if the model handles them")
        warnings.warn(f"{found}; they are used because of allow_nonfinite=True", PopRiskWarning, stacklevel=4)


def check_targets(which: str, targets: Tensor, loss: object) -> None:
    """Check that the targets are some that the loss is defined for; a DataError if they are not."""
    wrong, must, do = targets < 0, "", ""
    if loss == "cross_entropy" and not targets.is_floating_point():
        wrong = wrong & (targets != IGNORED)
        must, do = f"class indices from 0 (or {IGNORED} for places to ignore)", "count the classes from 0"
        if bool((targets == IGNORED).all()):
            raise DataError(
                f"{which} targets are all {IGNORED}, the label that cross_entropy ignores: pass the class indices"
            )
    elif loss == "cross_entropy":
        must, do = "class indices or probabilities", "pass class indices as whole numbers, or probabilities"
    elif loss == "logistic":
        wrong = wrong | (targets > 1)
        must, do = "0, 1 or a probability", "map the two classes to 0 and 1, or use cross_entropy for several"
    if must and bool(wrong.any()):
        raise DataError(f"{which} targets must be {must} for {loss}, but {_count(_rows(wrong), 'have others')}: {do}")


def _rows(bad: Tensor) -> Tensor:
    """For each example, whether one of its values is bad."""
    return bad.reshape(len(bad), -1).any(1)


def _count(bad: Tensor, what: str) -> str:
    first = int(bad.nonzero()[0])
    return f"{int(bad.sum())} of {len(bad)} examples {what}, the first is example {first}"
