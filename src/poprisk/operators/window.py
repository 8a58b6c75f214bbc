r"""A window of a recorded run, and its operators: exact for the steps that were taken, dense or matrix-free.

With every step written as :class:`poprisk.runs.step.Step`, the outputs at the end of the window are affine in the
output gradient at its start,

.. math:: U_S(T) - U_S(s) = -D\,g(s) + \mathrm{source}_S, \qquad U_Q(T) - U_Q(s) = -G\,g(s) + \mathrm{source}_Q

with no kernel frozen and no step assumed small: Jacobians and loss curvature are averages over each step, closed with
the secant, so that they carry it to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.autodiff import FlatModel, SegmentCurvature, SegmentJacobian
from poprisk.autodiff.flat import Inputs, take_examples
from poprisk.errors import DataError
from poprisk.linalg import LinearOperator, from_functions, tsqr_append
from poprisk.operators.reach import effective_preconditioners
from poprisk.operators.step_maps import Block, MatrixFreeStep, StepMaps
from poprisk.operators.sweeps import backward_sweep, forward_sweep
from poprisk.runs.step import Step

_MEMORY = 2**30


class Trajectory(Protocol):
    """What a window needs of a run; :class:`poprisk.runs.Run` is one."""

    @property
    def num_steps(self) -> int:
        """Steps taken."""
        ...

    def weights(self, k: int) -> Float[Tensor, "d"]:
        """Flat weights before step k, or after the last one."""
        ...

    def step(self, k: int) -> Step:
        """What step k did."""
        ...

    def buffer(self, k: int) -> Float[Tensor, "d"]:
        """The momentum carried into step k."""
        ...


@dataclass(frozen=True, eq=False)
class Sources:
    """What moved beside the initial output gradient: decay, and momentum carried in from before the window."""

    train: Float[Tensor, "N"]
    test: Float[Tensor, "M"]
    gradient: Float[Tensor, "N"]
    """g(T) = P g(s) + this."""


@dataclass(frozen=True, eq=False)
class Operators:
    """The dense operators of a window, with what really happened beside them."""

    propagator: Float[Tensor, "N N"]
    """P_g(T, s)."""
    factor: Float[Tensor, "r N"]
    r"""R, an upper-triangular factor of the dissipation gramian, :math:`W = R^\top R`."""
    train_transfer: Float[Tensor, "N N"]
    """D."""
    test_transfer: Float[Tensor, "M N"]
    """G."""
    sources: Sources
    output_gradient: Float[Tensor, "N"]
    """g(s)."""
    train_displacement: Float[Tensor, "N"]
    """U_S(T) - U_S(s), measured."""
    test_displacement: Float[Tensor, "M"]
    """U_Q(T) - U_Q(s), measured."""
    losses: tuple[float, float]
    """The mean training loss at the start and at the end."""
    num_examples: int

    @property
    def dissipation_gramian(self) -> Float[Tensor, "N N"]:
        """W. For its spectrum use ``factor``: from W nothing finer than the root of rounding can be told apart."""
        return self.factor.T @ self.factor

    @property
    def train_completion(self) -> Float[Tensor, "N N"]:
        r""":math:`F_{SS} = I - P_g` (``eq:train_complement``)."""
        return torch.eye(len(self.propagator), dtype=self.factor.dtype, device=self.factor.device) - self.propagator

    @property
    def first_order_dissipation(self) -> float:
        r""":math:`g^\top W g`. Equals the loss drop for full batches and small steps only: see ``loss_drop``."""
        return (self.factor @ self.output_gradient).square().sum().item()

    @property
    def loss_drop(self) -> float:
        """What the training loss really lost over the window."""
        return self.losses[0] - self.losses[1]

    @property
    def predicted_train(self) -> Float[Tensor, "N"]:
        """-D g + source_S."""
        return self.sources.train - self.train_transfer @ self.output_gradient

    @property
    def predicted_test(self) -> Float[Tensor, "M"]:
        """-G g + source_Q."""
        return self.sources.test - self.test_transfer @ self.output_gradient


class Window:
    r"""Steps ``start`` … ``stop`` of a run, for one training set and, if given, one test set.

    Args:
        trajectory: The run, or anything that knows weights, steps and momentum buffers.
        model: The network and loss as functions of flat weights, in the dtype the operators shall have.
        inputs: All n training inputs, in the order of the steps' example indices.
        targets: Their targets.
        test_inputs: The test set Q; without it the test transfer has no rows.
        start: First step of the window, s.
        stop: The step after its last, T; the run's end by default.
        dense: Form every step's Jacobians once (fast for small windows) instead of multiplying by them.
        nodes: Quadrature nodes per step; by default as many as each step needs.
        secant: Close Jacobians and curvature so that they carry each step to rounding. Off, what remains is the
            quadrature's own accuracy, the test that the operators are not made to fit.
        memory: Bytes that a product with W may hold on to; more columns than fit are taken in turns.

    Raises:
        DataError: the window is empty or outside the run, indices outside the training set, or sizes that do not fit.

    Example:
        >>> from poprisk.operators.gradient_descent import gradient_descent
        >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False).double(), "squared")
        >>> x, y = torch.eye(2, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
        >>> window = Window(gradient_descent(model, x, y, lr=0.5, steps=3), model, x, y)
        >>> ops = window.dense_operators()
        >>> torch.allclose(ops.predicted_train, ops.train_displacement)
        True
    """

    def __init__(
        self,
        trajectory: Trajectory,
        model: FlatModel,
        inputs: Inputs,
        targets: Tensor,
        *,
        test_inputs: Inputs | None = None,
        start: int = 0,
        stop: int | None = None,
        dense: bool = False,
        nodes: int | None = None,
        secant: bool = True,
        memory: int = _MEMORY,
    ) -> None:
        stop = trajectory.num_steps if stop is None else stop
        if not 0 <= start < stop <= trajectory.num_steps:
            raise DataError(
                f"a window needs 0 ≤ start < stop ≤ {trajectory.num_steps}, the run's steps, got {start} and {stop}"
            )
        self.model, self.inputs, self.targets, self.test_inputs = model, inputs, targets, test_inputs
        self.start, self.stop, self.memory = start, stop, memory
        self.dtype, self.device = model.weights.dtype, model.weights.device
        self._trajectory = trajectory
        self._nodes, self._secant = nodes, secant
        self.start_outputs = self._outputs(start, inputs)
        self.stop_outputs = self._outputs(stop, inputs)
        built = [self._build(k) for k in range(start, stop)]
        self.steps: Sequence[StepMaps] = [maps.to_dense() for maps in built] if dense else built

    @property
    def num_examples(self) -> int:
        """N."""
        return self.start_outputs.shape[0]

    @property
    def num_outputs(self) -> int:
        """N = n p, the length of an output gradient."""
        return self.start_outputs.numel()

    @cached_property
    def num_test_outputs(self) -> int:
        """Rows of the test transfer."""
        return 0 if self.test_inputs is None else self._outputs(self.start, self.test_inputs).numel()

    @cached_property
    def output_gradient(self) -> Float[Tensor, "N"]:
        r"""g(s), the gradient of the mean training loss by the outputs at the window's start."""
        w = self._weights(self.start)
        return self.model.output_gradient(w, self.inputs, self.targets).reshape(-1) / self.num_examples

    @cached_property
    def effective_preconditioners(self) -> list[Float[Tensor, "d"]]:
        r""":math:`\tilde M_j` of each step; see :mod:`poprisk.operators.reach`."""
        return [m.to(self.dtype) for m in effective_preconditioners([maps.step for maps in self.steps])]

    @property
    def propagator(self) -> LinearOperator:
        """P_g(T, s): the output gradient at the end from the one at the start (``eq:force_propagator``)."""
        return self._operator(
            lambda H: forward_sweep(self.steps, H, test=False).gradient,
            lambda A: backward_sweep(self.steps, like=A, gradient=A),
            self.num_outputs,
        )

    @property
    def train_transfer(self) -> LinearOperator:
        """D (``eq:train_disp_def``)."""
        return self._operator(
            lambda H: forward_sweep(self.steps, H, test=False).train,
            lambda A: backward_sweep(self.steps, like=A, train=A),
            self.num_outputs,
        )

    @property
    def test_transfer(self) -> LinearOperator:
        """G (``def:test_transfer``)."""
        return self._operator(
            lambda H: forward_sweep(self.steps, H).test,
            lambda C: backward_sweep(self.steps, like=C.new_zeros(self.num_outputs, C.shape[1]), test=C),
            self.num_test_outputs,
        )

    @property
    def dissipation_gramian(self) -> LinearOperator:
        r"""W (``def:signal_channel``): :math:`\sum_j F_j^\top \tilde M_j F_j`, one forward and one backward sweep."""
        return from_functions(
            self._dissipate,
            None,
            (self.num_outputs, self.num_outputs),
            dtype=self.dtype,
            device=self.device,
            symmetric=True,
        )

    def sources(self) -> Sources:
        """What the window adds on its own, by one sweep from g(s) = 0."""
        p = torch.zeros(self.num_outputs, 1, dtype=self.dtype, device=self.device)
        train, test = torch.zeros_like(p), p.new_zeros(self.num_test_outputs, 1)
        v = self._trajectory.buffer(self.start).to(self.device, self.dtype)
        for k, maps in enumerate(self.steps, self.start):
            step, w = maps.step, self._weights(k)
            f = maps.pull(p).squeeze(1) + step.coupled_decay * w
            v = step.momentum * v + step.new_gradient * f
            dw = -step.preconditioner * (step.buffer_share * v + step.direct_share * f) - step.decay * w + step.source
            y = maps.push(dw[:, None])
            train, test, p = train + y, test + maps.push_test(dw[:, None]), p + maps.bend(y)
        return Sources(train.squeeze(1), test.squeeze(1), p.squeeze(1))

    def dense_operators(self) -> Operators:
        """P, a factor of W, D and G as matrices, by one forward sweep of the identity, with the sources."""
        eye = torch.eye(self.num_outputs, dtype=self.dtype, device=self.device)
        R = eye.new_zeros(0, self.num_outputs)

        def append(j: int, F: Block) -> None:
            nonlocal R
            R = tsqr_append(R, self.effective_preconditioners[j].sqrt()[:, None] * F)

        swept = forward_sweep(self.steps, eye, test=self.test_inputs is not None, watch=append)
        return Operators(
            propagator=swept.gradient,
            factor=R,
            train_transfer=swept.train,
            test_transfer=swept.test,
            sources=self.sources(),
            output_gradient=self.output_gradient,
            train_displacement=(self.stop_outputs - self.start_outputs).reshape(-1),
            test_displacement=self.test_displacement(),
            losses=self.losses(),
            num_examples=self.num_examples,
        )

    def test_displacement(self) -> Float[Tensor, "M"]:
        """U_Q(T) - U_Q(s), by two evaluations of the network."""
        if self.test_inputs is None:
            return torch.zeros(0, dtype=self.dtype, device=self.device)
        after, before = (self._outputs(k, self.test_inputs) for k in (self.stop, self.start))
        return (after - before).reshape(-1)

    def losses(self) -> tuple[float, float]:
        """The mean training loss at the window's start and end."""
        values = (
            self.model.per_example_losses(self._weights(k), self.inputs, self.targets).mean()
            for k in (self.start, self.stop)
        )
        before, after = values
        return before.item(), after.item()

    def corrections(self) -> Float[Tensor, "steps 3"]:
        """Size of the secant's closure at each step, relative to the step: training Jacobian, test Jacobian, curvature.

        This much of each step the quadrature alone would miss.
        """
        rows = [(m.train_correction, m.test_correction, m.curvature_correction) for m in self.steps]
        return torch.tensor(rows, dtype=torch.float64)

    def _dissipate(self, H: Block) -> Block:
        per_column = len(self.steps) * self.model.size * H.element_size()
        size = max(1, self.memory // per_column)
        return torch.cat([self._dissipate_block(part) for part in H.split(size, dim=1)], dim=1)

    def _dissipate_block(self, H: Block) -> Block:
        kept: list[Block] = []
        forward_sweep(
            self.steps, H, test=False, watch=lambda j, F: kept.append(self.effective_preconditioners[j][:, None] * F)
        )
        return backward_sweep(self.steps, like=H, on_gradients=lambda j: kept[j])

    def _operator(self, matmat, rmatmat, rows: int) -> LinearOperator:
        shape = (rows, self.num_outputs)
        return from_functions(matmat, rmatmat, shape, dtype=self.dtype, device=self.device)

    def _build(self, k: int) -> MatrixFreeStep:
        step = self._converted(self._trajectory.step(k))
        if len(step.batch) and not 0 <= int(step.batch.min()) <= int(step.batch.max()) < self.num_examples:
            raise DataError(
                f"step {k} used the examples {int(step.batch.min())} … {int(step.batch.max())}, the window was given "
                f"{self.num_examples}: pass all training inputs in the order that was recorded"
            )
        before, after = self._weights(k), self._weights(k + 1)
        options = {"nodes": self._nodes, "secant": self._secant}
        train = SegmentJacobian(self.model, before, after, self.inputs, **options)
        test = None
        if self.test_inputs is not None:
            test = SegmentJacobian(self.model, before, after, self.test_inputs, **options)
        curvature = SegmentCurvature(
            self.model.loss,
            self.model.batch_outputs(before, self.inputs),
            self.model.batch_outputs(after, self.inputs),
            self.targets,
            **options,
        )
        chosen = take_examples(self.inputs, step.batch)
        return MatrixFreeStep(step, self.model, before, chosen, self.num_examples, train, test, curvature)

    def _converted(self, step: Step) -> Step:
        """The step's tensors in the dtype and on the device of the window."""
        changed = {
            name: value.to(self.device) if name == "batch" else value.to(self.device, self.dtype)
            for name, value in vars(step).items()
            if isinstance(value, Tensor)
        }
        return Step(**{**vars(step), **changed})

    def _weights(self, k: int) -> Float[Tensor, "d"]:
        return self._trajectory.weights(k).to(self.device, self.dtype)

    def _outputs(self, k: int, inputs: Inputs) -> Float[Tensor, "n p"]:
        return self.model.outputs(self._weights(k), inputs)
