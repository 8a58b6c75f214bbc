r"""Derivatives through a training run: forward and adjoint, exact for its steps, many at once.

Differentiating the chain of a run's steps gives the change of the last weights under a change of the examples' weights,
labels or inputs, or of the first weights: forward for a direction of change, adjoint for a function of the last
weights. This is the discrete form of Thm. ``adjoint_reweighting``, whose gradient flow is the limit of small steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.autodiff import Inputs, slices
from poprisk._core.seeds import shuffled
from poprisk.errors import DataError, HyperparameterError, RunError
from poprisk.risk._influence.batch_derivatives import one_float_input
from poprisk.risk._influence.linearized_run import LinearizedRun
from poprisk.risk._influence.parameter_choice import Parameters
from poprisk.risk._influence.replayed_steps import ReplayedSteps, Work
from poprisk.risk._influence.step_jacobian import StepJacobian
from poprisk.risk._retraining.members import Members
from poprisk.risk._retraining.retrain import retrain
from poprisk.runs import Run

By = Literal["weights", "labels", "inputs", "initial"]


@dataclass(frozen=True)
class Adjoint:
    """Derivatives of q functions of the last weights; None for those not requested."""

    weights: Float[Tensor, "q n"] | None = None
    """Derivatives by each example's weight α."""
    labels: Float[Tensor, "q n p"] | None = None
    """Derivatives by a shift δ of each example's label: its residual r becomes r - δ."""
    inputs: Tensor | None = None
    """Derivatives by each example's input, ``[q, n, *input]``."""
    initial: Float[Tensor, "q d"] | None = None
    """Derivatives by the weights before the first step."""


@dataclass(frozen=True)
class SpotCheck:
    """Derivatives compared with a few real trainings."""

    examples: Int[Tensor, "count"]
    deviations: Float[Tensor, "count"]
    """Relative distance of the measured from the predicted change of the last weights."""
    trainings: float

    @property
    def worst(self) -> float:
        """The largest deviation."""
        return float(self.deviations.max())


class Unrolled(LinearizedRun):
    r"""A recorded run as a differentiable function of its examples' weights, labels and inputs, and of its start.

    Batches and their order, learning rates and every other option stay what they were. A label change is a shift of
    the residual, :math:`r_i \to r_i - \delta_i`: for squared loss, cross-entropy and logistic loss that is a change of
    the target (of the class probabilities) by δ.

    Args:
        run: A recorded run with its problem: exact (no batch statistics, dropout or augmentation), float32 or float64.
        dtype: Precision of the derivatives; default: that of the run. A float32 run keeps its rounding in float64.
        gate: "differentiated", or "frozen" to hold the population gate at its recorded values.
        start: First step that sees the change.
        stop: The last weights are those before this step; default: the run's end.
        memory: Limit in bytes for optimizer states and directions, and on a GPU for the activations of directions;
            beyond it, states are computed again and directions processed in turns.
        graphs: Whether to capture the work on steps of the same form as a CUDA graph and replay it, for stacks of
            linear layers and element-wise rules; default: on a GPU.
        parameters: Differentiate by these parameters alone, with all others at their recorded values: ``"last_layer"``,
            ``"lora"``, or names of parameters or modules, or patterns such as ``"*.attention.*"``. Default: all.

    Raises:
        RunError: the run allows no exact analysis, was augmented, has an optimizer or precision that is not supported,
            or its problem is unknown or not the recorded one.
        DataError: fewer than 3 examples, an empty window, or a loss that is not a mean over examples.

    >>> from poprisk import Problem, train
    >>> x = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    >>> problem = Problem(torch.nn.Linear, "squared", x, 2 * x, arguments={"in_features": 1, "out_features": 1})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.1), steps=5, dtype=torch.float64, progress=False)
    >>> unrolled = Unrolled(run)
    >>> dW = unrolled.forward(weights=torch.eye(3, dtype=torch.float64))
    >>> back = unrolled.adjoint(torch.eye(2, dtype=torch.float64), wrt=("weights",)).weights
    >>> torch.allclose(dW, back)
    True
    """

    def forward(
        self,
        *,
        weights: Float[Tensor, "n k"] | None = None,
        labels: Float[Tensor, "n p k"] | None = None,
        inputs: Tensor | None = None,
        initial: Float[Tensor, "d k"] | None = None,
    ) -> Float[Tensor, "d k"]:
        r"""The change of the last weights along each of k directions of change; several kinds are added up.

        Args:
            weights: Changes of the examples' weights α.
            labels: Changes of their labels.
            inputs: Changes of their inputs, ``[n, *input, k]``.
            initial: Changes of the first weights.

        Raises:
            DataError: no direction, shapes that do not fit, or numbers that are not finite.
        """
        given = {"weights": weights, "labels": labels, "inputs": inputs, "initial": initial}
        kinds = {name: x.to(self.device, self.dtype) for name, x in given.items() if x is not None}
        self._check_directions(kinds)
        columns = next(iter(kinds.values())).shape[-1]
        parts = []
        for part in slices(columns, self.columns_at_a_time()):
            parts.append(self._forward({name: x[..., part] for name, x in kinds.items()}))
        return torch.cat(parts, 1)

    def adjoint(
        self,
        covectors: Float[Tensor, "d q"],
        *,
        wrt: tuple[By, ...] = ("weights",),
        on_step: Callable[[StepJacobian, Tensor], None] | None = None,
        advance: Callable[[int], None] = lambda _: None,
    ) -> Adjoint:
        r"""The derivatives of q functions :math:`\psi(w_T)`, given their gradients, by everything that went in.

        Args:
            covectors: :math:`\nabla\psi(w_T)`, one per column.
            wrt: What to differentiate by: some of "weights", "labels", "inputs", "initial".
            on_step: Called with every step, last first, and the derivatives [q, b, p] by that step's labels alone.
            advance: Called after each step with the number of functions that were taken through it.

        Raises:
            DataError: shapes that do not fit, or a query that is not finite.
        """
        self._check_covectors(covectors, wrt)
        parts = [
            self._adjoint(covectors[:, part].to(self.device, self.dtype), wrt, on_step, advance)
            for part in slices(covectors.shape[1], self.columns_at_a_time())
        ]
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in wrt}
        return Adjoint(**joined)

    def spot_check(self, count: int = 3, *, epsilon: float | None = None, seed: int = 0) -> SpotCheck:
        r"""Compare :meth:`forward` with real trainings in which the weight of a few examples is changed by ±ε.

        Args:
            count: Number of examples, drawn at random; each takes two trainings.
            epsilon: The change ε; default: the cube root of the dtype's precision.
            seed: Seed for the random draw.

        Returns:
            For each example :math:`\|\Delta w - \epsilon\,\dot w\| / \|\epsilon\,\dot w\|`. In float64 a smooth
            model gives less than 1e-6; in float32 the difference itself has only one to three digits.

        Raises:
            RunError: the window does not start at step 0, or something is held fixed that a training would not.
        """
        if self.start != 0 or self.note:
            why = self.note or f"the changes begin at step {self.start}"
            raise RunError(
                f"a spot check trains the whole run again, but {why}: use start=0 and differentiate everything"
            )
        n, eps = self.num_examples, epsilon or torch.finfo(self.dtype).eps ** (1 / 3)
        examples = shuffled(n, seed, "examples")[: max(1, count)]
        change = torch.zeros(len(examples), n, dtype=self.dtype).scatter_(1, examples[:, None], 1.0)
        alpha = torch.cat([1 + eps * change, 1 - eps * change])
        kept = retrain(self.run, Members(alpha), keep=[self.stop], dtype=self.dtype, progress=False).kept[self.stop]
        measured = (kept[: len(examples)] - kept[len(examples) :]) / (2 * eps)
        predicted = self.forward(weights=change.T.contiguous()).T
        scale = predicted.norm(dim=1).clamp(min=torch.finfo(self.dtype).tiny)
        deviations = ((measured - predicted).norm(dim=1) / scale).cpu()
        return SpotCheck(examples, deviations, 2.0 * len(examples))

    def _forward(self, kinds: dict[str, Tensor]) -> Float[Tensor, "d k"]:
        columns = next(iter(kinds.values())).shape[-1]
        zero = torch.zeros(columns, self.num_weights, dtype=self.dtype, device=self.device)
        blocks = [zero.clone() for _ in range(1 + len(self.rule.state_names))]
        if "initial" in kinds:
            blocks[0] += kinds["initial"].T

        def push(step: StepJacobian) -> None:
            source = _source(step, kinds)
            for rows in self.rows_at_a_time(columns):
                part = [x[rows] for x in blocks]
                dg, _ = step.batch.push(part[0], None if source is None else source[rows])
                if "inputs" in kinds:
                    dx = kinds["inputs"][step.examples].movedim(-1, 0)[rows]
                    dg = dg + step.batch.push_inputs(torch.zeros_like(part[0]), dx)[0]
                for block, after in zip(blocks, step.rule.push(part, step.clipped(dg)), strict=True):
                    block[rows] = after

        take = self._worker(push, replay="inputs" not in kinds)
        for step in self.steps():
            take(step)
        return blocks[0].T.contiguous()

    def _worker(self, work: Work, *, replay: bool) -> Work:
        """The work itself, or a replay of it as a CUDA graph."""
        wanted = self.device.type == "cuda" if self.graphs is None else self.graphs
        return ReplayedSteps(work, capture=self.device.type == "cuda").take if wanted and replay else work

    def _adjoint(
        self,
        covectors: Tensor,
        wrt: tuple[By, ...],
        on_step: Callable[[StepJacobian, Tensor], None] | None,
        advance: Callable[[int], None],
    ) -> Adjoint:
        q, n = covectors.shape[1], self.num_examples
        blocks = [covectors.T.contiguous()]
        blocks += [torch.zeros_like(blocks[0]) for _ in self.rule.state_names]
        found = _Gathered(q, n, self.num_outputs, self.inputs, covectors, wrt)

        def pull(step: StepJacobian) -> Tensor | None:
            seen = []
            for rows in self.rows_at_a_time(q):
                before, a, du = step.pull([x[rows] for x in blocks])
                for block, new in zip(blocks, before, strict=True):
                    block[rows] = new
                found.add(step, rows, a, du)
                if on_step is not None:
                    seen.append(-step.batch.shares[:, None] * du)
            return None if on_step is None else torch.cat(seen)

        take = self._worker(pull, replay="inputs" not in wrt)
        for step in self.steps(backward=True):
            by_labels = take(step)
            if on_step is not None and by_labels is not None:
                on_step(step, by_labels.clone())
            advance(q)
        return found.adjoint(blocks[0])

    def _check_directions(self, kinds: dict[str, Tensor]) -> None:
        if not kinds:
            raise DataError("a direction of change is needed: weights, labels, inputs or initial")
        n, d, p = self.num_examples, self.num_weights, self.num_outputs
        expected: dict[str, tuple[int, ...]] = {"weights": (n,), "labels": (n, p), "initial": (d,)}
        if "inputs" in kinds:
            expected["inputs"] = tuple(one_float_input(self.inputs).shape)
        columns = next(iter(kinds.values())).shape[-1:]
        for name, x in kinds.items():
            if x.shape != expected[name] + tuple(columns) or not columns[0]:
                raise DataError(
                    f"{name} must be {[*expected[name], 'k']}, one direction per last index, got {list(x.shape)}"
                )
            if not bool(x.isfinite().all()):
                raise DataError(f"{name} has numbers that are not finite: there is no derivative along them")

    def _check_covectors(self, covectors: Tensor, wrt: tuple[By, ...]) -> None:
        known = ("weights", "labels", "inputs", "initial")
        if not wrt or any(name not in known for name in wrt):
            raise HyperparameterError(f"wrt must be some of {known}, got {wrt!r}")
        if covectors.dim() != 2 or covectors.shape[0] != self.num_weights or not covectors.shape[1]:
            raise DataError(
                f"covectors must be [{self.num_weights}, q], one query per column, got {list(covectors.shape)}"
            )
        bad = ~covectors.isfinite().all(0)
        if bool(bad.any()):
            raise DataError(
                f"query {int(bad.nonzero()[0])} is not finite: its gradient at the last weights is infinite or NaN; "
                "leave it out, or look at its loss first"
            )
        if "inputs" in wrt:
            one_float_input(self.inputs)


class _Gathered:
    """Collects the derivatives of every example over the steps."""

    def __init__(self, q: int, n: int, p: int, inputs: Inputs, like: Tensor, wrt: tuple[By, ...]) -> None:
        self._wrt = wrt
        shapes: dict[By, tuple[int, ...]] = {"weights": (q, n), "labels": (q, n, p)}
        if "inputs" in wrt:
            shapes["inputs"] = (q, *one_float_input(inputs).shape)
        self._sums = {name: like.new_zeros(shape) for name, shape in shapes.items() if name in wrt}

    def add(self, step: StepJacobian, rows: slice, a: Tensor, du: Tensor) -> None:
        shares, residuals = step.batch.shares, step.batch.residuals
        if "weights" in self._sums:
            self._sums["weights"][rows].index_add_(1, step.examples, (du * (shares[:, None] * residuals)).sum(2))
        if "labels" in self._sums:
            self._sums["labels"][rows].index_add_(1, step.examples, -shares[:, None] * du)
        if "inputs" in self._sums:
            self._sums["inputs"][rows].index_add_(1, step.examples, step.batch.input_slopes(a))

    def adjoint(self, first: Tensor) -> Adjoint:
        return Adjoint(**self._sums, initial=first if "initial" in self._wrt else None)


def as_unrolled(
    run: "Run | Unrolled", dtype: torch.dtype | None = None, parameters: Parameters | None = None
) -> Unrolled:
    """The run, made differentiable if it is not yet."""
    if not isinstance(run, Unrolled):
        return Unrolled(run, dtype=dtype, parameters=parameters)
    if parameters is not None:
        raise HyperparameterError("choose the parameters where the run is unrolled: Unrolled(run, parameters=…)")
    return run


def _source(step: StepJacobian, kinds: dict[str, Tensor]) -> Tensor | None:
    """What changes of weights and labels put into the batch's residuals, [k, b, p]."""
    shares, source = step.batch.shares[:, None], None
    if "weights" in kinds:
        source = kinds["weights"][step.examples].T.unsqueeze(2) * (shares * step.batch.residuals)
    if "labels" in kinds:
        shift = -shares * kinds["labels"][step.examples].movedim(-1, 0)
        source = shift if source is None else source + shift
    return source
