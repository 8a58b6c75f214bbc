r"""Which learning rate to give PopRiskAdamW, if you know AdamW's."""

import math
from numbers import Real

from poprisk.errors import HyperparameterError
from poprisk.optim._defaults import DEFAULTS

ADAMW_LR = 1e-3
"""The learning rate that :class:`torch.optim.AdamW` has if none is given."""
FACTOR = round(DEFAULTS.lr / ADAMW_LR)
"""What the default learning rate is at AdamW's. For the gates of strength 1, Algorithm 1 among them, the guide's rule,
:func:`poprisk_lab.paper.learning_rate.factors.recommended_factor`, gives 10, and a test repeats it."""


def suggest_lr(adamw_lr: float) -> float:
    r"""The learning rate to start PopRiskAdamW's default gate with where AdamW would get ``adamw_lr``.

    .. math:: \eta = 60\, \eta_{AdamW}

    The default is 0.06 where AdamW's is 1e-3, by the study that chose it (see :class:`poprisk.PopRiskAdamW`), and this
    keeps the ratio. A gate of strength λ passes about signal/(λ · noise), so a weaker one wants less: for
    ``strength=1.0``, Algorithm 1 included, take **ten times AdamW's**, which of 1, 3, 10, 30, 100 costs them least over
    four small tasks (tables in ``docs/learning_rate.md``).

    What it does at the last step of ``transformers.Trainer``, two seeds of the defaults beside three of AdamW:

    - Clean digits, test accuracy: AdamW at its best lr 97.6%, the defaults at 60 times it 96.7%.
    - Clean text, held-out nats of a small Qwen2: AdamW at its best lr 1.58, the defaults at 60 times it 1.73.
    - Digits with 40% of the labels wrong: AdamW at its best lr, 1e-4, 87.2%. The defaults at 60 times it end at 75.2%,
      at their own lr, 0.06, at 88.5%.

    **So start from AdamW's usual lr, not from one that was tuned low.** On wrong labels a low lr is what stops AdamW in
    time, and the gate does that itself. Where AdamW's lr is low for other reasons, as in fine-tuning, the suggestion
    was too low as well: DPO and SFT in ``results/`` end better at 0.06 than at 60 times AdamW's.

    The evidence is small models, some hundred steps, batches of 16 to 100: a first guess for larger ones. Weight decay
    is not gated and grows with the learning rate; the default goes with the default learning rate.

    Args:
        adamw_lr: The (peak) learning rate you would give :class:`torch.optim.AdamW`; schedules stay as they are.

    Returns:
        The (peak) learning rate for :class:`poprisk.PopRiskAdamW`.

    Raises:
        HyperparameterError: ``adamw_lr`` is not a positive finite number.

    >>> suggest_lr(5e-5), suggest_lr(1e-3)
    (0.003, 0.06)
    """
    if isinstance(adamw_lr, bool) or not isinstance(adamw_lr, Real) or not 0 < adamw_lr < math.inf:
        raise HyperparameterError(
            f"adamw_lr must be a positive finite number, the learning rate you would give AdamW, got {adamw_lr!r}"
        )
    return FACTOR * float(adamw_lr)
