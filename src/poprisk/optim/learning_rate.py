r"""Which learning rate to give PopRiskAdamW, if you know AdamW's."""

import math
from numbers import Real

from poprisk.errors import HyperparameterError

FACTOR = 10
"""The factor of 1, 3, 10, 30, 100 with the smallest mean regret over the tasks of the guide, for each of the gates it
measured; :func:`poprisk.experiments.learning_rate_factors.recommended_factor` is the rule, and a test repeats it."""


def suggest_lr(adamw_lr: float) -> float:
    r"""The learning rate to start PopRiskAdamW with where AdamW would get ``adamw_lr``.

    .. math:: \eta = 10\, \eta_{AdamW}

    One factor for the default gate, ``alpha="calibrated"`` and ``gate="snr"``: of 1, 3, 10, 30, 100 it costs each of
    them least, averaged over four small tasks, when AdamW's best learning rate is multiplied by it (tables in
    ``docs/learning_rate.md``). What it does, at the last step of ``transformers.Trainer``:

    - Digits with 40% of the labels wrong, test accuracy: AdamW at its best lr 87.2%. At that lr unchanged the default
      gate ends at 64.5%, ``alpha="calibrated"`` at 73.4%; at the suggested one at 73.7% and 88.5%.
    - Clean text, held-out nats of a small Qwen2: AdamW at its best lr 1.58. Unchanged, the default gate ends at 2.14,
      ``alpha="calibrated"`` at 1.69; at the suggested one at 2.04 and 1.65.

    **What no learning rate mends**: on clean text the default gate stays far behind AdamW at every one of them. On
    clean data use ``alpha="calibrated"``, with the same suggestion. **What it does not choose**: with
    ``alpha="calibrated"`` the suggestion does about what AdamW does at ``adamw_lr``; if that one memorizes wrong
    labels, so does this. The default gate hardly memorized at any learning rate, and on wrong labels it went on
    improving to a hundred times AdamW's best one and beyond.

    The evidence is small models on a CPU, some hundred steps, batches of 16 to 100: a first guess for larger ones.
    Weight decay is not gated and grows with the learning rate: divide ``weight_decay`` by 10 to keep what AdamW had.

    Args:
        adamw_lr: The (peak) learning rate you would give :class:`torch.optim.AdamW`; schedules stay as they are.

    Returns:
        The (peak) learning rate for :class:`poprisk.PopRiskAdamW`.

    Raises:
        HyperparameterError: ``adamw_lr`` is not a positive finite number.

    >>> suggest_lr(5e-5), suggest_lr(1e-3)
    (0.0005, 0.01)
    """
    if isinstance(adamw_lr, bool) or not isinstance(adamw_lr, Real) or not 0 < adamw_lr < math.inf:
        raise HyperparameterError(
            f"adamw_lr must be a positive finite number, the learning rate you would give AdamW, got {adamw_lr!r}"
        )
    return FACTOR * float(adamw_lr)
