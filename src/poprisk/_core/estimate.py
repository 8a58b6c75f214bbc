"""The common form of everything estimated: a value, its standard error, whether to trust it, why not, and the price."""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from poprisk._core.html import card, short
from poprisk.errors import DataError


@dataclass(frozen=True, eq=False)
class Estimate:
    """An estimate that says how far to trust it.

    ``value`` and ``standard_error`` are floats, or tensors of one shape with an error for each entry. A tensor with a
    single number and no axes becomes a float. The standard error is NaN where it is not known, and then the estimate
    is not valid; 0 means exact up to rounding.

    Args:
        value: The estimate.
        standard_error: One standard deviation of ``value``; not negative.
        valid: Whether value and error can be taken at their word. Only a finite value with a finite error can.
        reason: Why the estimate is not valid (required then), or what a reader of a valid one should know.
        cost: What it took, in the unit the estimator names: products with an operator, replays, trainings.

    Raises:
        DataError: shapes that differ, a negative error or cost, "valid" without finite numbers, or "not valid"
            without a reason.

    >>> print(Estimate(0.41234, 0.0312, cost=30))
    0.412 ± 0.031 (valid)
    >>> print(Estimate(3, float("nan"), valid=False, reason="a single probe has no spread"))
    3 ± nan (not valid: a single probe has no spread)
    >>> print(Estimate(torch.tensor([1.0, 2.0]), torch.tensor([0.1, 0.3])))
    tensor of shape [2] with mean 1.5, standard errors from 0.1 to 0.3 (valid)
    """

    value: float | Tensor
    standard_error: float | Tensor
    valid: bool = True
    reason: str = ""
    cost: float = 0.0

    def __post_init__(self) -> None:
        for name in ("value", "standard_error"):
            object.__setattr__(self, name, _number_or_tensor(name, getattr(self, name)))
        object.__setattr__(self, "cost", float(self.cost))
        if _shape(self.value) != _shape(self.standard_error):
            raise DataError(
                f"value and standard_error must have one shape, got {_shape(self.value)} and "
                f"{_shape(self.standard_error)}: give an error for each entry"
            )
        if (torch.as_tensor(self.standard_error) < 0).any():
            raise DataError(f"standard_error must not be negative, got {self.standard_error}: pass its absolute value")
        if not (math.isfinite(self.cost) and self.cost >= 0):
            raise DataError(f"cost must be a finite number and not negative, got {self.cost}: count products or runs")
        if not self.valid and not self.reason:
            raise DataError("an estimate that is not valid needs a reason, got an empty one: say what went wrong")
        if self.valid and not all(torch.as_tensor(x).isfinite().all() for x in (self.value, self.standard_error)):
            raise DataError(
                f"a valid estimate needs a finite value and error, got {_text(self.value, self.standard_error)}: pass "
                "valid=False and a reason"
            )

    def __str__(self) -> str:
        verdict = "valid" if self.valid else "not valid"
        return f"{_text(self.value, self.standard_error)} ({verdict}{': ' if self.reason else ''}{self.reason})"

    def _repr_html_(self) -> str:
        own = {f.name for f in fields(Estimate)}
        more = {f.name.replace("_", " "): short(getattr(self, f.name)) for f in fields(self) if f.name not in own}
        verdict = ("valid" if self.valid else "not valid") + (f": {self.reason}" if self.reason else "")
        rows = {"value": _text(self.value, self.standard_error), "verdict": verdict, **more}
        return card(type(self).__name__, {**rows, "cost": f"{self.cost:g}" if self.cost else ""})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: tensors as nested lists, numbers that are not finite as None.

        >>> Estimate(1.5, 0.5, cost=8).to_dict()
        {'value': 1.5, 'standard_error': 0.5, 'valid': True, 'reason': '', 'cost': 8.0}
        """
        return {
            "value": _plain(self.value),
            "standard_error": _plain(self.standard_error),
            "valid": self.valid,
            "reason": self.reason,
            "cost": self.cost,
        }


def _number_or_tensor(name: str, x: Any) -> float | Tensor:
    if isinstance(x, Tensor):
        if not x.is_floating_point():
            raise DataError(f"{name} must be real numbers, got a tensor of {x.dtype}: convert it with .double()")
        return x.detach() if x.dim() else x.item()
    try:
        return float(x)
    except (TypeError, ValueError):
        raise DataError(f"{name} must be a number or a tensor, got {type(x).__name__}: convert it first") from None


def _shape(x: float | Tensor) -> list[int]:
    return list(x.shape) if isinstance(x, Tensor) else []


def _plain(x: Any) -> Any:
    if isinstance(x, Tensor):
        return _plain(x.tolist())
    if isinstance(x, list):
        return [_plain(each) for each in x]
    return x if math.isfinite(x) else None


def _text(value: float | Tensor, error: float | Tensor) -> str:
    if isinstance(value, Tensor) and isinstance(error, Tensor):
        if value.numel() == 0:
            return f"tensor of shape {_shape(value)}"
        low, high = error.min().item(), error.max().item()
        mean = value.mean().item()
        return f"tensor of shape {_shape(value)} with mean {mean:.4g}, standard errors from {low:.2g} to {high:.2g}"
    return _rounded(float(value), float(error))


def _rounded(value: float, error: float) -> str:
    """Both numbers to the second digit of the error: the rest of the value is not known."""
    if not (math.isfinite(value) and math.isfinite(error) and error > 0):
        return f"{value:.6g} ± {error:.2g}"
    last = 1 - math.floor(math.log10(error))
    if 0 <= last <= 6:
        return f"{value:.{last}f} ± {error:.{last}f}"
    first = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(first + last + 1, 1)}g} ± {error:.2g}"
