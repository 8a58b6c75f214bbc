"""Follow the run without an example, each step linearized about the recorded one, for many examples at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import vmap

from poprisk._core.autodiff import (
    JacobianWay,
    OfWeights,
    double_backward,
    exact_kernels,
    forward_mode,
    slices,
    take_examples,
    take_first_way,
)
from poprisk._core.progress import Progress
from poprisk.errors import DataError, LimitError
from poprisk.risk._influence.linearized_run import LinearizedRun
from poprisk.risk._influence.step_jacobian import StepJacobian

FEWEST = 32
"""Number of examples that are worth a result, if there is no time for more."""
_ROUNDINGS = 100.0
"""Displacements of an output of up to this many rounding errors say nothing about the model."""


@dataclass(frozen=True, eq=False)
class ExcludedOutputs:
    """Outputs of the run's model for some of its examples, and the change if it had not seen them."""

    examples: Int[Tensor, "m"]
    outputs: Float[Tensor, "m p"]
    """Outputs of the run's model."""
    tangent: Float[Tensor, "m p"]
    r"""The displacement along the network's tangent, :math:`J_i \dot w`."""
    displaced: Float[Tensor, "m p"]
    r"""The displacement by the network itself, :math:`F(w + \dot w, z_i) - F(w, z_i)`."""
    shape: tuple[int, ...]
    """Shape of one example's outputs."""

    def shaped(self, outputs: Float[Tensor, "m p"]) -> Float[Tensor, "m *out"]:
        """Flat outputs in the shape of the network's outputs."""
        return outputs.reshape(len(outputs), *self.shape)

    @property
    def bend(self) -> Float[Tensor, "m"]:
        """Relative difference of the two displacements; 0 for a linear model, and where both are rounding errors."""
        size, difference = self.tangent.norm(dim=1), (self.displaced - self.tangent).norm(dim=1)
        own = self.outputs.norm(dim=1)
        rounding = _ROUNDINGS * torch.finfo(own.dtype).eps * own.clamp(min=own.square().mean().sqrt())
        bend = difference / size.clamp(min=torch.finfo(size.dtype).tiny)
        return torch.where((size <= rounding) & (difference <= rounding), 0.0, bend)


class ExclusionSweep:
    """Carries the change of the weights without each of some examples forward along a run.

    One pass over the run serves every step: the risk at all of them costs what it costs at the last.

    Args:
        unrolled: The run with its steps linearized (an ``Unrolled`` is one).
        examples: Indices of the training examples, each left out alone.
        mass_preserving: Whether the weights of the others grow by n/(n - 1), as in a mean over n - 1 examples.
        groups: Number of the group of each training example: an example is left out with its group; default: alone.
        advance: Called after each step with the number of examples that were taken along.

    >>> from poprisk import Problem, train
    >>> y = torch.tensor([[0.0], [0.0], [3.0]])
    >>> problem = Problem(torch.nn.Linear, "squared", torch.ones(3, 1), y,
    ...                   arguments={"in_features": 1, "out_features": 1, "bias": False})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.5), steps=60, progress=False)
    >>> sweep = ExclusionSweep(LinearizedRun(run), torch.arange(3))
    >>> found = sweep.outputs_at(60)  # the mean of the two others, exactly: the model is linear
    >>> (found.outputs + found.displaced).squeeze(1).round(decimals=3).abs()
    tensor([1.5000, 1.5000, 0.0000])
    """

    def __init__(
        self,
        unrolled: LinearizedRun,
        examples: Int[Tensor, "m"],
        *,
        mass_preserving: bool = True,
        groups: Int[Tensor, "n"] | None = None,
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        n = unrolled.num_examples
        self.unrolled, self.examples, self._taken = unrolled, examples, advance
        self._groups = (torch.arange(n) if groups is None else groups).to(unrolled.device)
        left_out = self._groups.bincount()[self._groups][examples.to(unrolled.device)].to(unrolled.dtype)
        self.others = n / (n - left_out) if mass_preserving else torch.ones_like(left_out)
        w = unrolled.weights(unrolled.start)
        states = 1 + len(unrolled.rule.state_names)
        self._blocks = [w.new_zeros(len(examples), unrolled.num_weights) for _ in range(states)]
        self.step = unrolled.start

    def at(self, k: int) -> Float[Tensor, "m d"]:
        """The predicted change of the weights before step k, one row for each example.

        Raises:
            DataError: the sweep has passed k already, or k lies outside the window.
        """
        if not self.step <= k <= self.unrolled.stop:
            raise DataError(f"a sweep goes forward: k must lie in {self.step} … {self.unrolled.stop}, got {k}")
        while self.step < k:
            self._advance(self.unrolled.step(self.step))
            self.step += 1
            self._taken(len(self.examples))
        return self._blocks[0]

    def outputs_at(self, k: int) -> ExcludedOutputs:
        """Every example's outputs with and without it, at the weights before step k."""
        dW, unrolled = self.at(k), self.unrolled
        w, forward = unrolled.weights(k), unrolled.model_at(k)._forward()
        x = take_examples(unrolled.inputs, self.examples)
        several, parts = isinstance(x, tuple), x if isinstance(x, tuple) else (x,)

        def of(x: tuple[Tensor, ...]) -> OfWeights:
            return lambda w: forward(w, x if several else x[0]).reshape(-1)

        def both(dw: Tensor, *x: Tensor) -> tuple[Tensor, Tensor]:
            u = of(x)(w)
            return u, of(x)(w + dw) - u

        def tangents(derivative: Callable[[OfWeights, Tensor, Tensor], Tensor]) -> Tensor:
            along = lambda dw, *x: derivative(of(x), w, dw.unsqueeze(1)).squeeze(1)  # noqa: E731
            return vmap(along, chunk_size=self._examples_at_once())(dW, *parts)

        ways: dict[JacobianWay, Callable[[], Tensor]] = {
            JacobianWay.FORWARD: lambda: tangents(forward_mode),
            JacobianWay.DOUBLE_BACKWARD: lambda: tangents(double_backward),
        }
        with exact_kernels(unrolled.model.module):
            unrolled.model.jacobian_way, tangent = take_first_way(ways, unrolled.model.jacobian_way)
            u, displaced = vmap(both, chunk_size=self._examples_at_once())(dW, *parts)
        return ExcludedOutputs(self.examples, u, tangent, displaced, unrolled.output_shape)

    def extend(self, unrolled: LinearizedRun) -> None:
        """Continue along a longer recording of the same run.

        Raises:
            DataError: the recording ends before the step that has been reached.
        """
        if unrolled.stop < self.step or unrolled.num_weights != self.unrolled.num_weights:
            raise DataError(f"the sweep has reached step {self.step}; the run given ends at {unrolled.stop}")
        self.unrolled = unrolled

    def _advance(self, step: StepJacobian) -> None:
        groups = self._groups
        own = groups[step.examples][None, :] == groups[self.examples.to(groups.device)][:, None]  # [m, b]
        more = self.others[:, None] - 1
        change = torch.where(own, -torch.ones_like(more), more)
        source = change[:, :, None] * (step.batch.shares[:, None] * step.batch.residuals)
        for rows in self.unrolled.rows_at_a_time(len(self.examples)):
            part = [x[rows] for x in self._blocks]
            dg = self._gradient_without(step, part[0], source[rows], own[rows], self.others[rows])
            for block, after in zip(self._blocks, step.rule.push(part, step.clipped(dg)), strict=True):
                block[rows] = after

    def _gradient_without(self, step: StepJacobian, V: Tensor, source: Tensor, own: Tensor, others: Tensor) -> Tensor:
        """The change of the batch's gradient without the example and with larger weights of the others."""
        dg, _ = step.batch.push(V, source / others[:, None, None])
        columns, places = own.nonzero(as_tuple=True)
        if len(columns):
            dg = dg.index_add(0, columns, step.batch.push_alone(V[columns], places), alpha=-1)
        return dg * others[:, None]

    def _examples_at_once(self) -> int:
        per_example = 8 * self.unrolled.num_weights * self.unrolled.dtype.itemsize
        return max(1, self.unrolled.memory // per_example)


def excluded_outputs(
    unrolled: LinearizedRun,
    examples: Int[Tensor, "m"],
    *,
    mass_preserving: bool = True,
    groups: Int[Tensor, "n"] | None = None,
) -> ExcludedOutputs:
    """Outputs at the end of the run with and without each example, as many at a time as memory allows.

    Where a time limit or Ctrl-C ends this early, those of the examples so far, if there are a few.
    """
    steps, parts, done = unrolled.stop - unrolled.start, [], 0
    least = min(FEWEST, len(examples)) * steps
    with Progress("exclusion", len(examples) * steps, shown=None, patient=True, least=least) as progress:
        for rows in slices(len(examples), unrolled.columns_at_a_time()):
            enough = done >= FEWEST
            if enough and not progress.fits(len(examples[rows]) * steps):
                break
            try:
                options = {"mass_preserving": mass_preserving, "groups": groups, "advance": progress.advance}
                parts.append(ExclusionSweep(unrolled, examples[rows], **options).outputs_at(unrolled.stop))
            except (KeyboardInterrupt, LimitError):
                if not enough:
                    raise
                break
            done += len(examples[rows])
    return joined(parts)


def joined(parts: Sequence[ExcludedOutputs]) -> ExcludedOutputs:
    """The outputs of several groups of examples as one."""
    whole = {n: torch.cat([getattr(p, n) for p in parts]) for n in ("examples", "outputs", "tangent", "displaced")}
    return ExcludedOutputs(**whole, shape=parts[0].shape)
