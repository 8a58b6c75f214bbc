r"""Runs whose steps saw another function than the one to analyze: batch statistics, dropout, augmentation, rounding.

The operators are those of the network in its evaluation form, one fixed function of the weights for every example:
dropout off, inputs as they are in the training set, at least single precision, and batch normalization with the
statistics of some fixed training examples, computed again at every weight vector and differentiated with it. A step is
then the gradient of this function, and a source: whatever else the recorded step did, so that it closes to rounding.

.. math:: \sigma_k = w_{k+1} - w_k + M_k (a v_k + b f_k) + \lambda w_k, \qquad
   f_k = J_S(w_k)^\top S_k\, g_k \ \text{of the evaluation form}, \quad v_k = \beta v_{k-1} + \kappa f_k
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from poprisk._core.autodiff import FlatModel, Inputs, draws_at_random
from poprisk._core.seeds import shuffled
from poprisk.errors import DataError, RunError
from poprisk.operators._drift_diffusion import in_dtype_of, step_in_dtype_of, weighted_gradient, window_limits
from poprisk.operators._trajectory import Trajectory
from poprisk.runs import AffineStep, Run

REFERENCE = 128
"""Training examples whose statistics batch normalization uses, or all if there are fewer."""
_BLOCK = 4 * REFERENCE
"""Examples worked on at a time beside the fixed ones."""


@dataclass(frozen=True, eq=False)
class EvaluatedRun:
    """Steps ``start`` … ``stop`` of a run as those of its evaluation form; a :class:`Trajectory` between the two."""

    run: Run
    start: int
    momentum: Float[Tensor, "d"]
    """Carried into the first of them, as recorded."""
    all_weights: list[Float[Tensor, "d"]]
    all_steps: list[AffineStep] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return self.run.num_steps

    @property
    def num_examples(self) -> int:
        return self.run.num_examples

    @property
    def kept(self) -> Any:
        """What was kept by held-back examples, which no step drew."""
        return self.run.kept

    def weights(self, k: int) -> Float[Tensor, "d"]:
        return self.all_weights[k - self.start]

    def buffer(self, k: int) -> Float[Tensor, "d"]:
        """The momentum carried into the first step."""
        if k != self.start:
            raise DataError(
                f"the steps were read from step {self.start} on, so their momentum is known there, not at {k}"
            )
        return self.momentum

    def step(self, k: int) -> AffineStep:
        """What step k did, with its source; before ``start`` as it was recorded."""
        return self.run.step(k) if k < self.start else self.all_steps[k - self.start]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What is analyzed of a run."""

    trajectory: Trajectory
    model: FlatModel
    note: str = ""
    """What was put in place of what the steps saw, in a sentence; empty for a run that is analyzed as it was."""
    share: float = 0.0
    """Size of what the steps did beyond the gradients of the evaluation form, relative to the steps."""


def evaluation_of(
    run: Run, dtype: torch.dtype = torch.float64, *, start: int = 0, stop: int | None = None
) -> Evaluation:
    """The run itself where its steps saw a fixed function of the weights, else its evaluation form.

    Raises:
        RunError: the problem is not known, does not explain the gradients, or has a layer without evaluation form.
        DataError: the steps are empty or not within the run.
    """
    changes = _changes(run)
    if not changes:
        run.require_exact(stop)
        return Evaluation(run, run.model(dtype))
    found = run.unexplained
    if found is not None and (stop is None or stop > found.step):
        raise RunError(f"no exact analysis of this run is possible: {found.reason}")
    model = evaluation_model(run, dtype)
    start, stop = window_limits(run, start, stop)
    seen, share = _evaluated(run, model, start, stop)
    text = (
        f"The network is analyzed in its evaluation form: {', '.join(changes)}. What the steps did beyond the "
        f"gradients of this form is counted with weight decay and momentum, as the rest of the steps; it is "
        f"{100 * share:.0f}% of their size."
    )
    return Evaluation(seen, model, text, share)


def evaluation_model(run: Run, dtype: torch.dtype | None = None) -> FlatModel:
    """The model of a run as a fixed function of its weights, for windows and kernels.

    Raises:
        RunError: the problem is not known, or has a layer without evaluation form.

    >>> from poprisk.runs import Problem, train
    >>> network = lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 1))
    >>> run = train(Problem(network, "squared", torch.eye(2), torch.ones(2, 1)), torch.optim.Adam, 2, progress=False)
    >>> model = evaluation_model(run)
    >>> model.outputs(run.weights(2), torch.eye(2)).shape
    torch.Size([2, 1])
    """
    if dtype is None:
        dtype = run.layout.dtype if run.layout.dtype in (torch.float32, torch.float64) else torch.float32
    if not _changes(run):
        return run.model(dtype)
    module = run.module(dtype)
    norms: dict[nn.Module, _FixedStatistics] = {}
    for part in module.modules():
        if isinstance(part, _BatchNorm) and _mixes(part):
            norms[part] = _FixedStatistics(part)
    module.eval()
    if not norms:
        return FlatModel(module, run.problem.loss)
    _replace(module, norms)
    rows = shuffled(run.num_examples, 0, "reference")[:REFERENCE]
    inputs, _ = run.problem.batch(rows.sort().values, dtype=dtype)
    wrapped = _WithReference(norms.get(module, module), list(norms.values()), inputs)
    return FlatModel(wrapped, run.problem.loss, chunk_size=_BLOCK)


def _changes(run: Run) -> list[str]:
    """What the evaluation form changes, in words; empty if the steps saw a fixed function of the training examples."""
    manifest, module = run.manifest, None
    if not manifest["obstacles"] and not run.augmented:
        return []
    module = run.module()
    changes = []
    for name, part in module.named_modules():
        if isinstance(part, _InstanceNorm) and part.training and part.track_running_stats:
            raise RunError(
                f"{type(part).__name__} {name!r} has no evaluation form that belongs to its training: use "
                "track_running_stats=False"
            )
    if any(_mixes(part) for part in module.modules()):
        count = min(REFERENCE, run.num_examples)
        changes.append(
            f"batch normalization has the statistics of {count} fixed training examples at each step's weights"
        )
    if any(draws_at_random(part) for part in module.modules()):
        changes.append("dropout is off")
    if run.augmented:
        changes.append("examples are not augmented")
    low = sorted({name for name in run.layout.dtypes if name not in ("torch.float32", "torch.float64")})
    if low:
        changes.append(f"the {low[0].removeprefix('torch.')} weights are not rounded between steps")
    return changes


def _mixes(part: nn.Module) -> bool:
    return isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)


def _evaluated(run: Run, model: FlatModel, start: int, stop: int) -> tuple[EvaluatedRun, float]:
    inputs, targets = run.problem.batch(dtype=model.weights.dtype)
    w, v = in_dtype_of(model, run.weights(start)), in_dtype_of(model, run.buffer(start))
    found = EvaluatedRun(run, start, v, [w])
    beyond = moved = 0.0
    for k in range(start, stop):
        step = step_in_dtype_of(model, run.step(k))
        after = in_dtype_of(model, run.weights(k + 1))
        drawn = weighted_gradient(model, w, inputs, targets, step.batch, step.selection / len(targets))
        f = drawn + step.coupled_decay * w
        v = step.momentum * v + step.new_gradient * f
        push = step.preconditioner * (step.buffer_share * v + step.direct_share * f)
        source = (after - w) + push + step.decay * w
        beyond += source.square().sum().item()
        moved += (after - w).square().sum().item()
        found.all_steps.append(replace(step, source=source))
        found.all_weights.append(after)
        w = after
    return found, (beyond / moved) ** 0.5 if moved else 0.0


class _FixedStatistics(nn.Module):
    """Batch normalization with statistics that it was shown: those of the fixed examples, in the order of its calls."""

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.shown: list[tuple[Tensor, Tensor]] = []
        self.shows = False

    def forward(self, x: Tensor) -> Tensor:
        """Normalized features, the channels along the second axis."""
        others = [axis for axis in range(x.dim()) if axis != 1]
        if self.shows:
            self.shown.append((x.mean(others, keepdim=True), x.var(others, correction=0, keepdim=True)))
        elif not self.shown:
            raise DataError("batch normalization is called more often for these examples than for others")
        mean, variance = self.shown[-1] if self.shows else self.shown.pop(0)
        y = (x - mean) * (variance + self.eps).rsqrt()
        if self.weight is None:
            return y
        shape = [1, -1] + [1] * (x.dim() - 2)
        return y * self.weight.reshape(shape) + self.bias.reshape(shape)


class _WithReference(nn.Module):
    """A network that is shown the fixed examples before each call."""

    def __init__(self, module: nn.Module, norms: list[_FixedStatistics], inputs: Inputs) -> None:
        super().__init__()
        self.module, self.norms = module, tuple(norms)
        self.count = len(inputs) if isinstance(inputs, tuple) else 1
        for i, part in enumerate(inputs if isinstance(inputs, tuple) else (inputs,)):
            self.register_buffer(f"examples{i}", part, persistent=False)

    def forward(self, *batch: Tensor) -> Tensor:
        """Outputs of the batch, each example by itself."""
        with self._showing():
            self.module(*(getattr(self, f"examples{i}") for i in range(self.count)))
        return self.module(*batch)

    @contextmanager
    def _showing(self) -> Iterator[None]:
        for norm in self.norms:
            norm.shown, norm.shows = [], True
        try:
            yield
        finally:
            for norm in self.norms:
                norm.shows = False


def _replace(module: nn.Module, norms: Mapping[nn.Module, _FixedStatistics]) -> None:
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if child in norms:
                setattr(parent, name, norms[child])
