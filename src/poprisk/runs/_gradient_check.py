r"""Whether the recorded problem explains the gradients of a loop: checked at its first steps, then at samples of them.

A loop may change after its first steps: a penalty that begins later, label smoothing, another scale of the loss,
dropout that is switched on. A difference in the first steps is an error, because nothing is lost yet. A later one marks
the run and gives a warning: the training goes on, everything is recorded, and exact analyses say from which step on the
problem no longer explains the gradients.

Checked are the steps 8, 16, 32 and 64, one step of each 64, drawn from the seed, and the last one (of a sparse
recording if the number of steps was given; its replay compares all of them). Each check costs one gradient.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from poprisk._core.autodiff import call_module
from poprisk._core.seeds import step_generator
from poprisk.errors import RunError, UnexplainedGradientWarning
from poprisk.runs._gradients import randomness_of
from poprisk.runs._layout import Layout
from poprisk.runs._problem import Problem
from poprisk.runs._step import StepContext

EARLY, PERIOD = (8, 16, 32, 64), 64
_SURELY = 0.05  # part of a difference that a cause may leave unexplained
_ROUNDINGS = 8.0  # times the error of a gradient in the precision of the weights, measured in float64

Reduce = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From outputs, targets and weights of the examples to a loss."""


@dataclass(frozen=True)
class Evidence:
    """What one step did: weights before it, its gradient, and the examples it was of."""

    number: int
    weights: list[Tensor]
    gradient: Sequence[Tensor | None]
    parts: list[tuple[Tensor, Tensor | None]]
    factor: float
    seed: int


@dataclass(frozen=True)
class Unexplained:
    """Where the gradients stop to be those of the recorded problem."""

    step: int
    """The first step that may differ: the one after the last that was found to agree."""
    reason: str
    """A line: the step, the size of the difference and its likely cause."""


class GradientCheck:
    """Compares the gradients of a loop with those of its recorded examples.

    Args:
        problem: The problem; None checks nothing.
        module: The module that is trained.
        layout: Layout of its flat weights.
        parameters: Its trained parameters, in the layout's order.
        first: Number of initial steps to check; 0 checks nothing.
        seed: Seed of the later samples.
        steps: Number of planned steps, if known.
    """

    def __init__(
        self,
        problem: Problem | None,
        module: nn.Module,
        layout: Layout,
        parameters: Sequence[Tensor],
        *,
        first: int,
        seed: int,
        steps: int | None,
    ) -> None:
        self._module, self._layout, self._parameters = module, layout, parameters
        self._problem = problem if all(p.dtype in (torch.float32, torch.float64) for p in parameters) else None
        self._first, self._seed, self._steps = first, seed, steps
        self._explained = 0
        self._drawn = (-1, -1)
        self._last: Evidence | None = None
        self._random_from_start: bool | None = None
        self.found: Unexplained | None = None

    @property
    def is_on(self) -> bool:
        """Whether there is anything left to check."""
        return self._problem is not None and self._first > 0 and self.found is None and not self._random_from_start

    def is_due(self, k: int) -> bool:
        """Whether step k is one of those to check.

        >>> check = GradientCheck(None, nn.Linear(1, 1), None, [], first=2, seed=0, steps=1000)
        >>> sum(check.is_due(k) for k in range(1000))
        21
        """
        if k < self._first or k in EARLY or (self._steps is not None and k == self._steps - 1):
            return True
        block = k // PERIOD
        if block > 0 and self._drawn[0] != block:
            place = torch.randint(PERIOD, (), generator=step_generator(self._seed, -1 - block))
            self._drawn = block, block * PERIOD + int(place)
        return k == self._drawn[1]

    def look(self, step: StepContext) -> None:
        """Check a step whose gradients are ready and whose weights have not moved, if it is due.

        Raises:
            RunError: it is one of the first steps, and its gradient is not that of its examples.
        """
        if not self.is_on or not (self.is_due(step.number) or not self._explained):  # a resumed run: its first step
            return
        self._last = None
        weights = [p.detach() for p in self._parameters]
        gradient = [None if p.grad is None else p.grad.detach() for p in self._parameters]
        self._check(Evidence(step.number, weights, gradient, step.parts, step.factor * step.loss_scale, step.seed))

    def keep(self, step: StepContext) -> None:
        """Keep what is needed to check this step later, should it be the last one; only dense recordings have it."""
        before, gradient = step.weights_before, step.gradient
        if not self.is_on or before is None or gradient is None or self._explained > step.number:
            return
        if len(gradient) == self._layout.size:
            weights, used = self._layout.split(before), self._layout.split(gradient)
            self._last = Evidence(step.number, weights, used, step.parts, step.factor * step.loss_scale, step.seed)

    def finish(self) -> None:
        """Check the last step, if it was not checked and what it did is known."""
        last, self._last = self._last, None
        if last is not None and self.is_on and last.number >= self._explained:
            self._check(last)

    def _check(self, step: Evidence) -> None:
        random = randomness_of(self._module)
        if self._random_from_start is None:
            self._random_from_start = random is not None
        if self._random_from_start:
            return
        if random is not None:
            self._mark(step.number, f"the model was switched to another mode ({random})")
            return
        difference, cause = self._difference(step)
        if cause is None:
            self._explained = step.number + 1
        elif step.number < self._first:
            raise _first_error(step.number, self._problem, difference)
        else:
            self._mark(step.number, f"their relative difference is {difference:.1e}. Likely cause: {cause}")

    def _mark(self, number: int, what: str) -> None:
        agreed = f"in steps 0 … {self._explained - 1} only" if self._explained else "in no step that was checked"
        reason = (
            f"the gradients agree with the recorded problem {agreed}; at step {number} {what}. Record the loss that is "
            "trained as the problem's loss"
        )
        self.found = Unexplained(self._explained, reason)
        warnings.warn(f"{reason}. The run is recorded as it is", UnexplainedGradientWarning, stacklevel=2)

    def _difference(self, step: Evidence) -> tuple[float, str | None]:
        """The relative difference of the gradients, and its likely cause; None if it is rounding."""
        with torch.random.fork_rng(devices=_cuda(step.weights)):
            expected = self._expected(step)
            used = [g for g in step.gradient if g is not None]
            there = [i for i, g in enumerate(step.gradient) if g is not None]
            flat, mine = _flat(used), _flat([expected[i] for i in there])
            size = max(flat.norm().item(), mine.norm().item())
            difference = (flat - mine).norm().item()
            tolerance = max(torch.finfo(w.dtype).eps for w in step.weights) ** 0.5 * size
            if not (flat.isfinite().all() or mine.isfinite().all()):  # a training that diverges explains itself
                return 0.0, None
            if difference <= tolerance or difference <= tolerance + self._rounding(step, mine, there):
                return difference / (size or 1.0), None
            weights = [step.weights[i] for i in there]
            return difference / (size or 1.0), self._cause(step, flat, mine, weights, there)

    def _rounding(self, step: Evidence, mine: Tensor, there: list[int]) -> float:
        """How far the gradient in the precision of the weights may be off, by comparing it with float64."""
        try:
            exact = self._expected(step, torch.float64)
        except (RuntimeError, TypeError):  # a module that insists on its precision
            return 0.0
        return _ROUNDINGS * (mine - _flat([exact[i] for i in there])).norm().item()

    def _expected(self, step: Evidence, dtype: torch.dtype | None = None, reduce: Reduce | None = None) -> list[Tensor]:
        """The gradient of the recorded examples; without the hooks of the parameters, which belong to the loop."""
        assert self._problem is not None
        weights = [w.detach().to(dtype or w.dtype).requires_grad_() for w in step.weights]
        real = {name for name, x in _rest(self._module) if x.is_floating_point()}
        state = {name: x.to(dtype) if dtype and name in real else x.clone() for name, x in _rest(self._module)}
        state |= dict(zip(self._layout.names, weights, strict=True))
        total = [torch.zeros_like(w) for w in weights]
        generator, device = step_generator(step.seed, step.number), weights[0].device
        for indices, given in step.parts:
            inputs, targets = self._problem.batch(indices, generator=generator, dtype=weights[0].dtype)
            inputs = tuple(x.to(device) for x in (inputs if isinstance(inputs, tuple) else (inputs,)))
            mean = torch.full((len(indices),), 1 / (len(step.parts) * len(indices)), dtype=torch.float64)
            omega = (mean if given is None else given).to(weights[0])
            with torch.enable_grad():
                outputs = call_module(self._module, state, inputs)
                loss = (reduce or self._problem.batch_loss)(outputs, targets.to(device), omega)
                gradients = torch.autograd.grad(loss, weights, allow_unused=True)
            total = [t if g is None else t + step.factor * g for t, g in zip(total, gradients, strict=True)]
        return [t.detach() for t in total]

    def _cause(self, step: Evidence, used: Tensor, mine: Tensor, weights: list[Tensor], there: list[int]) -> str:
        assert self._problem is not None
        rest = used - mine
        scale = _share(used, mine)
        if _left(used, scale * mine, rest):
            return f"the scale of the loss changed by {scale:.3g} (pass weights= or loss_scale= to the step)"
        pieces = list(zip(rest.split([w.numel() for w in weights]), weights, strict=True))
        decays = [_share(r, _flat([w])) for r, w in pieces]
        shrunk = torch.cat([c * _flat([w]) for c, (_, w) in zip(decays, pieces, strict=True)])
        if _left(rest, shrunk, rest):
            decay = max(decays, key=abs) / step.factor
            return f"an L2 penalty whose gradient is {decay:.2g} times the weights (use the optimizer's weight_decay)"
        if self._problem.loss == "cross_entropy":
            uniform = self._expected(step, reduce=_uniform)
            towards = _flat([uniform[i] for i in there]) - mine
            share = _share(rest, towards)
            if _left(rest, share * towards, rest):
                return f"label smoothing of {share:.2g}"
        return "another loss or a penalty, or inputs or gradients changed outside of the record (noise, clipping)"


def _first_error(number: int, problem: Problem | None, difference: float) -> RunError:
    assert problem is not None
    return RunError(
        f"the gradient of step {number} is not that of the recorded examples under loss={problem.loss!r}: relative "
        f"difference {difference:.1e}. Check that the indices are right, that the loss is their mean (otherwise pass "
        "weights=), that gradients are zeroed, and that inputs are not changed at random (otherwise pass "
        "augmentation=). verify_steps=0 records without this check"
    )


def _uniform(outputs: Tensor, _: Tensor, weights: Tensor) -> Tensor:
    """The cross-entropy of labels that are spread over all classes."""
    return -(weights * outputs.log_softmax(1).flatten(1).mean(1)).sum()


def _rest(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers and frozen parameters."""
    frozen = [(name, p.detach()) for name, p in module.named_parameters() if not p.requires_grad]
    return [*module.named_buffers(), *frozen]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.detach().reshape(-1).double() for x in tensors])


def _share(a: Tensor, b: Tensor) -> float:
    """The c for which c b is nearest to a."""
    return float(a @ b / (b @ b)) if bool(b.any()) else 0.0


def _left(a: Tensor, b: Tensor, rest: Tensor) -> bool:
    return bool((a - b).norm() <= _SURELY * rest.norm())


def _cuda(tensors: Sequence[Tensor]) -> list[torch.device]:
    return sorted({x.device for x in tensors if x.device.type == "cuda"}, key=str)
