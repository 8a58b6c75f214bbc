r"""The learning rate of PopRiskAdamW, which is AdamW's, and how it relates to that of a gate that is not normalized."""

import math
import warnings
from numbers import Real

from poprisk.errors import HyperparameterError

FACTOR = 60
"""Learning rate of a literal gate (``Gate(normalize=False)``) of strength 100, as a multiple of AdamW's."""
WEAK_FACTOR = 10
"""The same for a strength of 1, Algorithm 1 included."""


def suggest_lr(adamw_lr: float) -> float:
    """Deprecated: the learning rate of PopRiskAdamW is AdamW's, so this returns ``adamw_lr``.

    Args:
        adamw_lr: The (peak) learning rate you would give :class:`torch.optim.AdamW`.

    Raises:
        HyperparameterError: ``adamw_lr`` is not a positive finite number.
    """
    if isinstance(adamw_lr, bool) or not isinstance(adamw_lr, Real) or not 0 < adamw_lr < math.inf:
        raise HyperparameterError(
            f"adamw_lr must be a positive finite number, the learning rate you would give AdamW, got {adamw_lr!r}"
        )
    warnings.warn(
        "suggest_lr is deprecated: the learning rate of PopRiskAdamW is now AdamW's, so pass lr unchanged",
        DeprecationWarning,
        stacklevel=2,
    )
    return float(adamw_lr)


def conversion() -> str:
    """How to convert the learning rate of a literal gate to AdamW's units, for messages."""
    return f"AdamW's learning rate is about lr/{FACTOR} for a strength of 100 and lr/{WEAK_FACTOR} for a strength of 1"
