r"""The learning rate for PopRiskAdamW, given one for AdamW."""

import math
from numbers import Real

from poprisk.errors import HyperparameterError
from poprisk.optim._defaults import DEFAULTS

ADAMW_LR = 1e-3
"""The learning rate that :class:`torch.optim.AdamW` has if none is given."""
FACTOR = round(DEFAULTS.lr / ADAMW_LR)
"""Ratio of the default learning rate to AdamW's. For the gates of strength 1, Algorithm 1 among them, the guide's rule,
:func:`poprisk_lab.paper.learning_rate.factors.recommended_factor`, gives 10, and a test repeats it."""


def suggest_lr(adamw_lr: float) -> float:
    r"""The learning rate to start PopRiskAdamW's default gate with where AdamW would get ``adamw_lr``.

    .. math:: \eta = 60\, \eta_{AdamW}

    The default is 0.06 where AdamW's is 1e-3, by the study that chose it (see :class:`poprisk.PopRiskAdamW`), and this
    keeps the ratio. A gate of strength λ passes about signal/(λ · noise), so a weaker gate needs a smaller one: for
    ``strength=1.0``, Algorithm 1 included, use **ten times AdamW's**, the best of the factors 1, 3, 10, 30 and 100 over
    four small tasks (tables in ``docs/learning_rate.md``).

    Results at the last step of ``transformers.Trainer``, with two seeds for the defaults and three for AdamW:

    - Clean digits, test accuracy: AdamW at its best lr 97.6%, the defaults at 60 times it 96.7%.
    - Clean text, held-out nats of a small Qwen2: AdamW at its best lr 1.58, the defaults at 60 times it 1.73.
    - Digits with 40% of the labels wrong: AdamW at its best lr, 1e-4, 87.2%. The defaults at 60 times it end at 75.2%,
      at their own lr, 0.06, at 88.5%.

    **So start from AdamW's usual lr, not from one that was tuned low.** With wrong labels, a low lr keeps AdamW from
    memorizing them; the gate does that itself. Where AdamW's lr is low for other reasons, as in fine-tuning, the
    suggestion was too low as well: DPO and SFT in ``lab/results/`` end better at 0.06 than at 60 times AdamW's.

    The evidence is from small models, a few hundred steps and batches of 16 to 100; for larger ones it is a first
    guess. Weight decay is not gated and is multiplied by the learning rate; its default belongs to the default lr.

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
