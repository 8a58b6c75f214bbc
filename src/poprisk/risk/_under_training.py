"""Whether a run ended too early: its training loss was still falling, and the model had memorized little."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.risk._verdict import RiskEstimate
from poprisk.runs import Run

STILL_FALLING = "the loss is still falling"
"""How the sentence begins."""
FEWEST_STEPS = 16
"""Steps that show a trend: two in each eighth of the run."""
SMALLEST_FALL = 0.02
"""Relative fall of the loss from the last eighth but one to the last, below which a run is finished."""
CLEAR = 3.0
"""Standard errors by which the slope over the second half of the run must exceed the noise of the batch losses."""
FITTED = 0.05
"""Share of the first loss below which the examples are fitted, and a falling loss means nothing."""
LARGEST_GAP = 0.2
"""Share of the risk that is not in the training loss, beyond which further training may well raise the risk."""
HARDLY_LEARNED = 0.5
"""Share of the first loss above which a run has hardly learned; needed where the risk is not known."""
STILL_BEST = 0.8
"""Share of the steps before which the best measurement on held-back examples means that the risk was rising."""
ANNEALED = 0.1
"""Share of its largest value below which the learning rate has come to its end."""


def under_training(run: Run, risk: RiskEstimate | None = None) -> str:
    """The sentence that says that a run is unfinished; empty if it is finished, or if its risk may be rising already.

    The losses of the last eighth of the steps are compared with those of the eighth before. Examples that are memorized
    also lower the training loss: nothing is said where the risk exceeds the training loss by much, or, if the risk is
    not known, unless most of the first loss is left. Nor is it where a schedule brought the learning rate to its end,
    which lowers the loss by itself.

    Args:
        run: The run.
        risk: A valid estimate of its risk at the last step, if there is one.

    >>> import torch
    >>> from poprisk import Problem, train
    >>> x = torch.linspace(-1, 1, 20).reshape(20, 1)
    >>> problem = Problem(torch.nn.Linear, "squared", x, 2 * x, arguments={"in_features": 1, "out_features": 1})
    >>> under_training(train(problem, lambda p: torch.optim.SGD(p, lr=0.02), steps=40, progress=False))
    'the loss is still falling by 1.7% per pass: train longer; the figures below describe an unfinished run'
    >>> under_training(train(problem, lambda p: torch.optim.SGD(p, lr=0.5), steps=300, progress=False))
    ''
    """
    losses = run.losses
    if len(losses) < FEWEST_STEPS or not bool(losses.isfinite().all()) or _was_rising(run) or _is_annealed(run):
        return ""
    eighth = len(losses) // 8
    first, before, last = losses[:eighth].mean().item(), losses[-2 * eighth : -eighth], losses[-eighth:]
    now, fall = last.mean().item(), (before.mean() - last.mean()).item()
    left = now / first if first > 0 else 0.0
    known = risk is not None and risk.valid and math.isfinite(risk.gap)
    memorizes = risk.gap > LARGEST_GAP * float(risk.value) if known and risk is not None else left < HARDLY_LEARNED
    if left < FITTED or memorizes or fall < SMALLEST_FALL * now or not _is_clear(losses):
        return ""
    passes = eighth * len(run.batch(0)) / run.num_trained
    rate = 100 * fall / (now * max(passes, math.ulp(0)))
    speed = f"{rate:.2g}% per pass" if passes >= 1 else f"{100 * fall / now:.2g}% over the last eighth of the run"
    return f"{STILL_FALLING} by {speed}: train longer; the figures below describe an unfinished run"


def _is_clear(losses: Float[Tensor, "steps"]) -> bool:
    """Whether the slope of the losses over the second half of the run stands out from their noise."""
    y = losses[len(losses) // 2 :].double()
    t = torch.arange(len(y), dtype=torch.float64)
    t = t - t.mean()
    slope = (t @ y / (t @ t)).item()
    noise = (y.diff().square().sum().item() / 2 / (len(y) - 1)) ** 0.5  # of neighbours: a trend is not noise
    return -slope > CLEAR * noise / (t @ t).item() ** 0.5


def _was_rising(run: Run) -> bool:
    """Whether the risk on held-back examples was lowest well before the end."""
    return run.kept is not None and run.kept.risk.step < STILL_BEST * run.num_steps


def _is_annealed(run: Run) -> bool:
    """Whether the learning rate was far below its largest value at the end."""
    steps = (*range(0, run.num_steps, max(1, run.num_steps // 16)), run.num_steps)
    rates = [max((float(group["lr"]) for group in run.options(k)), default=0.0) for k in steps]
    return rates[-1] < ANNEALED * max(rates)
