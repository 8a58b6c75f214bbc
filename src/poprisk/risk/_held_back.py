r"""Held-back risk: the loss on examples that no step trained on, of the weights that were kept or of the last ones.

It needs no linearization and no further training, and is unbiased for any model, whatever the label noise.
"""

import math
from typing import Literal

from torch import Tensor

from poprisk._core.autodiff import resolve_loss
from poprisk.errors import RunError
from poprisk.optim import held_error
from poprisk.risk._error import example_losses_of, unseen_mistake
from poprisk.risk._moments import Network
from poprisk.risk._verdict import LAST_WEIGHTS, Found, RiskEstimate, judge_held_back, judge_kept
from poprisk.runs import Run

Weights = Literal["kept", "last"]
_AT_ONCE = 1024


def held_back_risk(run: Run, weights: Weights = "kept", step: int | None = None) -> RiskEstimate:
    """The risk measured on held-back examples.

    Args:
        run: A run that kept weights: of ``train(…, hold_back=…)``, or recorded together with a ``KeepBest``.
        weights: ``"kept"`` for those that did best on the held-back examples, corrected for this choice: the same
            estimate as ``run.kept.risk``. ``"last"`` for those of the last step.
        step: With ``"last"``, measure the weights before this step instead.

    Raises:
        RunError: nothing was held back, or for ``"last"`` the held-back examples are not among those of the run.
    """
    kept = run.kept
    if kept is None:
        raise RunError("the run has no held-back examples: train with hold_back=0.05, or use another method")
    trained = run.trained
    first = float(run.losses[0]) if run.num_steps else math.nan
    if weights == "kept":
        return judge_kept(kept.risk, run.num_steps, _training_loss(run, kept.weights, trained), kept.target, first)
    if not len(kept.held):
        raise RunError(
            "the held-back examples are not among the examples of the run: only the risk of the kept weights is known"
        )
    step = run.num_steps if step is None else step
    network, loss = Network(run, _AT_ONCE), resolve_loss(run.problem.loss)
    network.go_to(step)
    outputs = network.outputs()
    targets = run.problem.batch(dtype=outputs.dtype)[1].cpu()
    losses = example_losses_of(loss, outputs, targets)
    held, count = losses[kept.held], len(kept.held)
    unseen = unseen_mistake(loss, outputs[kept.held], targets[kept.held], count) or held.max().item() / count
    spread = held.std().item() / math.sqrt(count) if count > 1 else math.nan
    error = held_error(held.mean().item(), spread, unseen, count)
    target = LAST_WEIGHTS if step == run.num_steps else f"the weights before step {step}"
    about = ("held_back", target, losses[trained].mean().item(), 0.0, count, run.num_examples, (), first)
    return judge_held_back(Found(held.mean().item(), error, *about))


def _training_loss(run: Run, weights: dict[str, Tensor], trained: Tensor) -> float:
    try:
        network = Network(run, _AT_ONCE)
    except RunError:  # the problem is not known; the estimate itself was made during training
        return math.nan
    network.module.load_state_dict(weights)
    outputs = network.outputs()
    targets = run.problem.batch(dtype=outputs.dtype)[1].cpu()
    return example_losses_of(resolve_loss(run.problem.loss), outputs, targets)[trained].mean().item()
