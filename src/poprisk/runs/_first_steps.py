r"""Checks a model against the gradients of a run's first steps, and of some later ones, when the run is analyzed.

Not every model and loss has an import path by which it could be recognized, but the recorded steps always tell: a step
that is affine in its gradient can be solved for it.
"""

import torch
from torch import Tensor

from poprisk._core.autodiff import FlatModel
from poprisk.errors import RunError
from poprisk.runs._run import Run
from poprisk.runs._step import PerWeight

# Two steps that changed weights are enough; with a gate or a warm-up the very first ones may not change them.
_STEPS, _LOOKED_AT = 2, 10
# In units of the square root of the machine epsilon; on other devices convolutions may be rounded more.
_TOLERANCE, _TOLERANCE_ON_DEVICES = 4.0, 40.0
# Roundings of a weight in one step, and of a gradient in the run's precision.
_ROUNDINGS = 8.0


def check_first_steps(run: Run, model: FlatModel, stop: int | None = None) -> None:
    r"""Check that a model has the gradients of the first two steps of a run that changed the weights, and of some more.

    .. math:: M (a \kappa + b) \odot f = w_k - w_{k+1} - \lambda w_k + \sigma - M a \beta\, v_{k-1}
              - M (a \kappa + b) \lambda^c w_k

    is solved for f and compared with :math:`J^\top S g` of the model, up to the square root of the machine epsilon and
    the rounding of the weights. The later ones are the steps 8, 16, 32, … and the last one before ``stop`` (default:
    the end of the run). A run with checkpoints only is checked when it is replayed; a run with augmented inputs or
    without exact analyses is not checked.

    Raises:
        RunError: they differ.

    >>> from poprisk.runs import Problem, train
    >>> problem = Problem(torch.nn.Linear, "squared", torch.eye(2), torch.ones(2, 1),
    ...                   arguments={"in_features": 2, "out_features": 1})
    >>> run = train(problem, torch.optim.Adam, steps=2, progress=False)
    >>> check_first_steps(run, run.model())
    """
    if not run.is_dense or run.augmented or run.manifest["obstacles"]:
        return
    last, compared = (run.num_steps if stop is None else min(stop, run.num_steps)) - 1, 0
    for k in range(min(_LOOKED_AT, last + 1)):
        if compared < _STEPS:
            compared += _compare(run, model, k)
    for k in sorted({2**i for i in range(3, 64) if 2**i < last} | {last} - set(range(_LOOKED_AT))):
        _compare(run, model, k)


def _compare(run: Run, model: FlatModel, k: int) -> bool:
    """Whether step k tells anything about the model's gradient.

    Raises:
        RunError: it tells that the model does not have it.
    """
    eps = max(torch.finfo(dtype).eps for dtype in (run.layout.dtype, model.weights.dtype))
    loose = run.manifest["numerics"]["device"] != "cpu" or model.weights.device.type != "cpu"
    tolerance = (_TOLERANCE_ON_DEVICES if loose else _TOLERANCE) * eps**0.5
    f = _gradient(run, model, k)
    recorded, rounding = _recorded_gradient(run, k)
    size = max(f.norm().item(), recorded[rounding < recorded.abs()].norm().item())
    told = rounding <= tolerance * size  # a weight that hardly changed says nothing about its gradient
    difference = (f - recorded)[told].norm().item()
    allowed = tolerance * size + rounding[told].norm().item()
    if difference <= allowed or difference <= allowed + _ROUNDINGS * _rounding(run, f, k):
        return bool(told.any())
    raise RunError(
        f"the model of problem {run.problem.name!r} does not have the gradient of step {k} of the run: relative "
        f"difference {difference / size:.1e}. Either its model or loss differs from the recorded one (pass the problem "
        "that was recorded), or the loop changed gradients in a way that was not recorded"
    )


def _rounding(run: Run, f: Tensor, k: int) -> float:
    """How far the gradient of step k is off in the precision of the run: near a minimum it is a sum that cancels."""
    return (f - _gradient(run, run.model(run.layout.dtype), k)).norm().item()


def _gradient(run: Run, model: FlatModel, k: int) -> Tensor:
    step, like = run.step(k), model.weights
    inputs, targets = run.problem.batch(step.batch, dtype=like.dtype)
    w = run.weights(k).to(like)
    shares = (step.selection / run.num_examples).to(like)
    residuals = shares[:, None] * model.output_gradient(w, inputs, targets)
    return model.vjp(w, inputs, residuals.reshape(-1)).double().cpu()


def _recorded_gradient(run: Run, k: int) -> tuple[Tensor, Tensor]:
    """The gradient that the step implies, and its uncertainty from rounding; 0 and infinity if it cannot be known."""
    step = run.step(k)
    before, after, v = (x.double() for x in (run.weights(k), run.weights(k + 1), run.buffer(k)))
    M, a = step.preconditioner.double(), _double(step.buffer_share)
    gain = M * (a * _double(step.new_gradient) + _double(step.direct_share))
    carried = M * a * _double(step.momentum) * v
    driven = before - after - _double(step.decay) * before + _double(step.source) - carried
    eps = torch.finfo(run.layout.dtype).eps
    rounding = _ROUNDINGS * eps * (before.abs() + after.abs() + carried.abs())
    moved = gain != 0
    safe = torch.where(moved, gain, 1.0)
    recorded = torch.where(moved, driven / safe - _double(step.coupled_decay) * before, 0.0)
    return recorded, torch.where(moved, rounding / safe.abs(), torch.inf)


def _double(value: PerWeight) -> PerWeight:
    return value.double() if isinstance(value, Tensor) else value
