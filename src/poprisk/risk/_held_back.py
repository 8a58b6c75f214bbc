r"""Held-back risk: the loss on examples that no step trained on, of the weights that were kept or of the last ones.

It needs no linearization and no further training, and is unbiased for any model, whatever the label noise.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from poprisk._core.autodiff import resolve_loss
from poprisk.errors import RunError
from poprisk.risk._error import example_losses_of, unseen_mistake
from poprisk.risk._verdict import LAST_WEIGHTS, Found, RiskEstimate, judge_held_back, judge_kept
from poprisk.runs import MODULE_BUFFER, Run

Weights = Literal["kept", "last"]
_AT_ONCE = 1024


def held_back_risk(run: Run, weights: Weights = "kept") -> RiskEstimate:
    """The risk measured on held-back examples.

    Args:
        run: A run that kept weights: of ``train(…, hold_back=…)``, or recorded together with a ``KeepBest``.
        weights: ``"kept"`` for those that did best on the held-back examples, corrected for this choice: the same
            estimate as ``run.kept.risk``. ``"last"`` for those of the last step.

    Raises:
        RunError: nothing was held back, or for ``"last"`` the held-back examples are not among those of the run.
    """
    kept = run.kept
    if kept is None:
        raise RunError("the run has no held-back examples: train with hold_back=0.05, or use another method")
    trained = torch.ones(run.num_examples, dtype=torch.bool)
    trained[kept.held] = False
    if weights == "kept":
        return judge_kept(kept.risk, run.num_steps, _training_loss(run, kept.weights, trained))
    if not len(kept.held):
        raise RunError(
            "the held-back examples are not among the examples of the run: only the risk of the kept weights is known"
        )
    module, loss = _module(run, None), resolve_loss(run.problem.loss)
    outputs, targets = _outputs(run, module, kept.held)
    losses = example_losses_of(loss, outputs, targets)
    count = len(losses)
    mistake = unseen_mistake(loss, outputs, targets, count)
    error = math.hypot(losses.std().item() / math.sqrt(count), mistake) if count > 1 else math.nan
    training = _mean_loss(run, module, trained)
    about = ("held_back", LAST_WEIGHTS, training, 0.0, count, run.num_examples)
    return judge_held_back(Found(losses.mean().item(), error, *about))


def _training_loss(run: Run, weights: dict[str, Tensor], trained: Tensor) -> float:
    try:
        return _mean_loss(run, _module(run, weights), trained)
    except RunError:  # the problem is not known; the estimate itself was made during training
        return math.nan


def _mean_loss(run: Run, module: nn.Module, trained: Tensor) -> float:
    return float(
        example_losses_of(resolve_loss(run.problem.loss), *_outputs(run, module, trained.nonzero()[:, 0])).mean()
    )


@torch.no_grad()
def _module(run: Run, weights: dict[str, Tensor] | None) -> nn.Module:
    """The run's module in evaluation mode with a state, or as after the last step."""
    module = run.module().eval()
    if weights is not None:
        module.load_state_dict(weights)
    else:
        end = run.checkpoint(run.num_steps)
        parameters = [p for p in module.parameters() if p.requires_grad]
        for p, piece in zip(parameters, run.layout.split(run.weights(run.num_steps)), strict=True):
            p.copy_(piece)
        for name, buffer in module.named_buffers():
            buffer.copy_(end.get(MODULE_BUFFER + name, buffer))
    return module.float() if run.layout.dtype.itemsize < 4 else module


@torch.no_grad()
def _outputs(run: Run, module: nn.Module, rows: Int[Tensor, "m"]) -> tuple[Float[Tensor, "m *out"], Tensor]:
    dtype, found, targets = next(module.parameters()).dtype, [], []
    for part in rows.split(_AT_ONCE):
        inputs, target = run.problem.batch(part, dtype=dtype)
        found.append(module(*inputs) if isinstance(inputs, tuple) else module(inputs))
        targets.append(target)
    return torch.cat(found), torch.cat(targets)
