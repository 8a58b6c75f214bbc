"""Bad data are refused: values that are not finite, labels that the loss cannot mean; with their number and place."""

import warnings
from typing import Any

from torch import Tensor

from poprisk._core.autodiff import IGNORED, Inputs, parts_of
from poprisk.errors import DataError, PopRiskWarning, RunError

_FEW = 20
"""Number of examples below which equal ones are taken to be meant."""


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
        _warn(f"{found}; they are used because of allow_nonfinite=True")


def check_targets(which: str, targets: Tensor, loss: object) -> None:
    """Check that the targets are some that the loss is defined for; a DataError if they are not."""
    if targets.is_complex():
        raise DataError(f"{which} targets must be real numbers, got {targets.dtype}: pass torch.view_as_real(targets)")
    wrong, must, do = targets < 0, "", ""
    ignored = _ignored_class(loss)
    if ignored is not None and not targets.is_floating_point():
        loss, left_out = "cross_entropy", targets == ignored
        wrong = wrong & ~left_out
        must, do = f"class indices from 0 (or {ignored} for places to ignore)", "count the classes from 0"
        if bool(left_out.all()):
            raise DataError(
                f"{which} targets must be class indices, but all are {ignored}, the label that cross_entropy ignores: "
                "pass the class indices"
            )
        if bool((nothing := left_out.reshape(len(targets), -1).all(1)).any()):
            found = _count(nothing, f"have only the label {ignored}, which cross_entropy ignores")
            _warn(f"{which} targets: {found}; they count with a loss of 0: leave these examples out")
    elif loss == "cross_entropy" and targets.dim() < 2:
        got = f"{str(targets.dtype).removeprefix('torch.')} {list(targets.shape)}"
        raise DataError(
            f"{which} targets must be class indices as whole numbers, or probabilities of every class, got {got}: pass "
            "targets.long() if they are classes"
        )
    elif loss == "cross_entropy":
        must, do = "class indices or probabilities", "pass class indices as whole numbers, or probabilities"
    elif loss == "logistic":
        wrong = wrong | (targets > 1)
        must, do = "0, 1 or a probability", "map the two classes to 0 and 1, or use cross_entropy for several"
    if must and bool(wrong.any()):
        raise DataError(f"{which} targets must be {must} for {loss}, but {_count(_rows(wrong), 'have others')}: {do}")


def check_varied(inputs: Inputs, targets: Tensor) -> None:
    """Warn of training examples that are all equal in their inputs, or in their targets: nothing can be learned."""
    if len(targets) < _FEW:
        return
    for name, several in (("inputs", parts_of(inputs)), ("targets", (targets,))):
        if all(bool((x == x[:1]).all()) for x in several):
            say = f"training {name} are the same for all {len(targets)} examples, from example 0 on"
            _warn(f"{say}: if this is not meant, check how they were read")


def check_classes(loss: object, which: str, targets: Tensor, classes: int | None) -> None:
    """Check that labels are among the classes that a model has outputs for; a DataError if they are not."""
    if _ignored_class(loss) is None or targets.is_floating_point() or classes is None:
        return
    if bool((beyond := targets >= classes).any()):
        rows = _rows(beyond)
        raise DataError(
            f"{which} targets must be class indices from 0 to {classes - 1}, as the model has {classes} outputs, "
            f"but {_count(rows, 'have others')} with {int(targets[rows].max())}: give the model "
            f"{int(targets.max()) + 1} outputs, or correct the labels"
        )


def check_converged(run: Any) -> None:
    """Check that a run has finite weights and losses at its end; what came before says nothing about them.

    Raises:
        RunError: they are not; the message says from which step on.
    """
    steps, losses = run.num_steps, run.losses
    bad = ~losses.isfinite()
    diverged = not bool(run.weights(steps).isfinite().all())
    if not steps or not (diverged or (bool(bad[-1]) and not bool(losses.isnan().all()))):
        return
    finite = (~bad).nonzero()
    first = int(finite[-1]) + 1 if len(finite) else 0
    what = "loss is" if first < steps else "weights are"
    raise RunError(
        f"the {what} not finite from step {first} of {steps} on, so that there is nothing to analyze: train again with "
        "a lower learning rate or with clip_norm, and check the inputs"
    )


def _ignored_class(loss: object) -> int | None:
    """The label that a cross-entropy ignores; None for other losses."""
    if loss == "cross_entropy":
        return IGNORED
    options = getattr(loss, "keywords", {})
    return options["ignore_index"] if {"ignore_index", "label_smoothing"} == set(options) else None


def _warn(message: str) -> None:
    warnings.warn(message, PopRiskWarning, stacklevel=4)


def _rows(bad: Tensor) -> Tensor:
    """For each example, whether one of its values is bad."""
    return bad.reshape(len(bad), -1).any(1)


def _count(bad: Tensor, what: str) -> str:
    first = int(bad.nonzero()[0])
    return f"{int(bad.sum())} of {len(bad)} examples {what}, the first is example {first}"
