r"""A window of a recorded run and its operators: exact for the steps taken, dense or matrix-free.

With every step written as :class:`~poprisk.runs.AffineStep`, the outputs at the end of the window are affine in the
output gradient at its start,

.. math:: U_S(T) - U_S(s) = -D\,g(s) + \mathrm{source}_S, \qquad U_Q(T) - U_Q(s) = -G\,g(s) + \mathrm{source}_Q

with no kernel frozen and no step assumed small: Jacobians and loss curvature are averages over each step, closed with
the secant, so that they carry it to rounding.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, SegmentCurvature, SegmentJacobian, take_examples
from poprisk._core.html import card
from poprisk._core.linalg import tsqr_append
from poprisk.errors import DataError, HyperparameterError, PopRiskError
from poprisk.operators._coupling import anchored_coupling_of_jacobians
from poprisk.operators._cumulative import CumulativeError, LiftedStep, cumulative_error
from poprisk.operators._dense import Operators, Sources
from poprisk.operators._drift_diffusion import step_like, window_limits
from poprisk.operators._evaluation import evaluation_of
from poprisk.operators._step_maps import Block, DenseStep, MatrixFreeStep, StepMaps
from poprisk.operators._sweeps import forward_sweep
from poprisk.operators._swept_operators import SweptOperators
from poprisk.operators._trajectory import Trajectory, check_run
from poprisk.runs import AffineStep, Run, check_first_steps

_MEMORY = 2**30
# Blocks [d, N] that a sweep of the identity holds at its fullest: gradients, momentum before and after, the step.
_SWEPT = 5


class Window(SweptOperators):
    r"""Steps ``start`` … ``stop`` of a run, for one training set and, if given, one test set.

    Args:
        trajectory: The run, or anything that knows weights, steps and momentum buffers.
        model: The network and loss as functions of flat weights, in the dtype of the operators.
        inputs: All n training inputs, in the order of the steps' example indices.
        targets: Their targets.
        test_inputs: The test set Q; without it the test transfer has no rows.
        start: First step of the window, s.
        stop: Step after the last one of the window, T; default: the end of the run.
        dense: Form the Jacobians of every step once (fast for small windows) instead of multiplying by them; default:
            if all of them fit in ``memory``.
        nodes: Number of quadrature nodes per step; default: as many as each step needs.
        quadrature: ``"gauss"`` averages the Jacobians over each step; ``"kinks"`` splits the step of each example where
            one of its ReLUs (or another piecewise linear activation) switches, so that the operators are exact to
            rounding on such networks too. See the page on operators for the error and the cost.
        secant: Correct Jacobians and curvature so that they reproduce each step up to rounding. Without it, what
            remains is the accuracy of the quadrature, which tests that the operators are not made to fit.
        memory: Bytes for the Jacobians of a dense window, and for the matrices of ``dense_operators``,
            ``anchored_coupling`` and ``lifted_steps``, which are refused where they need more; and that a product with
            W may hold on to: every step's gradients where they fit, else the rows of its batch, from which they are
            formed again; where even those do not fit, columns are taken in turns.

    Raises:
        HyperparameterError: an unknown quadrature.
        DataError: the window is empty or not within the run, indices are outside the training set, sizes do not fit, or
            the model does not accept the inputs.
        RunError: no exact analysis of the run is possible (the message says why), or its inputs were augmented.

    Example:
        >>> from poprisk.operators._gradient_descent import gradient_descent
        >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False).double(), "squared")
        >>> x, y = torch.eye(2, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
        >>> window = Window(gradient_descent(model, x, y, lr=0.5, steps=3), model, x, y)
        >>> ops = window.dense_operators()
        >>> torch.allclose(ops.predicted_train, ops.train_displacement)
        True
    """

    note: str = ""
    """What the network is analyzed as, if not as the steps saw it; see :meth:`of_run`."""

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
        dense: bool | None = None,
        nodes: int | None = None,
        quadrature: str = "gauss",
        secant: bool = True,
        memory: int = _MEMORY,
    ) -> None:
        check_run(trajectory, targets, stop)
        start, stop = window_limits(trajectory, start, stop)
        self.model, self.inputs, self.targets, self.test_inputs = model, inputs, targets, test_inputs
        self.start, self.stop, self.memory = start, stop, memory
        self.dtype, self.device = model.weights.dtype, model.weights.device
        self._trajectory = trajectory
        if quadrature not in ("gauss", "kinks"):
            raise HyperparameterError(f'quadrature must be "gauss" or "kinks", got {quadrature!r}')
        self._nodes, self._kinks, self._secant = nodes, quadrature == "kinks", secant
        # Requested once and in order: a sparse run recomputes weights and steps between its checkpoints.
        self._momentum = trajectory.buffer(start).to(self.device, self.dtype)
        self._path = [trajectory.weights(start).to(self.device, self.dtype)]
        self.start_outputs = self._first_outputs("training", inputs)
        self.num_test_outputs = 0 if test_inputs is None else self._first_outputs("test", test_inputs).numel()
        built = []
        for k in range(start, stop):
            step = trajectory.step(k)
            self._path.append(trajectory.weights(k + 1).to(self.device, self.dtype))
            built.append(self._build(k, step_like(self._momentum, step)))
        self.stop_outputs = self._outputs(stop, inputs)
        dense = self._jacobian_bytes(built) <= memory if dense is None else dense
        self.steps: Sequence[StepMaps] = [maps.to_dense() for maps in built] if dense else built

    @classmethod
    def of_run(
        cls,
        run: Run,
        *,
        test_inputs: Inputs | None = None,
        start: int = 0,
        stop: int | None = None,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> "Window":
        """The window of a run with a known problem, which provides model, training examples and test set.

        Args:
            run: A run recorded or loaded with ``problem=…``.
            test_inputs: The test set Q; default: the inputs of ``run.problem.test``, if there are any.
            start: First step of the window, s.
            stop: Step after the last one of the window, T; default: the end of the run.
            dtype: Data type of the operators; use float32 for large windows.
            options: ``dense``, ``nodes``, ``quadrature``, ``secant`` and ``memory``, as in the constructor.

        Raises:
            RunError: no exact analysis of the run is possible, its inputs were augmented, its problem is not known, or
                the problem's model is not the recorded one: in names, shapes, frozen numbers, or in the gradients of
                the first recorded steps.
            DataError: the window is empty or outside the run, or the model cannot take the test inputs.

        >>> from poprisk.runs import Problem, train
        >>> problem = Problem(torch.nn.Linear, "squared", torch.eye(2), torch.ones(2, 1),
        ...                   arguments={"in_features": 2, "out_features": 1})
        >>> run = train(problem, lambda params: torch.optim.SGD(params, lr=0.1), steps=3, progress=False)
        >>> Window.of_run(run, start=1).train_transfer.shape
        (2, 2)
        """
        found = evaluation_of(run, dtype, start=start, stop=stop)
        if not found.note:
            check_first_steps(run, found.model, stop)
        inputs, targets = run.problem.batch(dtype=dtype)
        if test_inputs is None and run.problem.test is not None:
            test_inputs = run.problem.test[0]
        window = cls(
            found.trajectory,
            found.model,
            inputs,
            targets,
            test_inputs=None if test_inputs is None else _cast(test_inputs, dtype, targets.device),
            start=start,
            stop=stop,
            **options,
        )
        window.note = found.note
        return window

    def with_nodes(self, nodes: int) -> "Window":
        """The same window with this number of nodes for the training Jacobians; everything else is shared.

        With one node, its W is a cheap ``surrogate`` for ``top_eigenpairs``.

        Raises:
            DataError: the window is dense, so the number of nodes makes no difference.
        """
        coarse = copy(self)
        coarse.steps = [_with_nodes(maps, nodes) for maps in self.steps]
        return coarse

    def __repr__(self) -> str:
        how = "matrix-free" if isinstance(self.steps[0], MatrixFreeStep) else "dense"
        return f"<Window of steps {self.start} … {self.stop}, {self.num_examples} examples, {how}>"

    def _repr_html_(self) -> str:
        N, M = self.num_outputs, self.num_test_outputs
        how = "products only" if isinstance(self.steps[0], MatrixFreeStep) else "with every step's Jacobians at hand"
        rows = {
            "steps": f"{self.start} … {self.stop}, {how}",
            "weights": self.model.size,
            "examples": f"{self.num_examples}, {N} outputs in all",
            "test outputs": M or "none: pass test_inputs=…",
            "numbers": f"{str(self.dtype).removeprefix('torch.')} on {self.device}",
            "propagator, P": f"{N} × {N}",
            "train_transfer, D": f"{N} × {N}",
            "test_transfer, G": f"{M} × {N}",
            "dissipation_gramian, W": f"{N} × {N}",
        }
        return card("Window", rows, notes=["dense_operators() forms all four; window.test_transfer @ h is a product"])

    @cached_property
    def output_gradient(self) -> Float[Tensor, "N"]:
        r"""g(s), the gradient of the mean training loss by the outputs at the window's start."""
        w = self._weights(self.start)
        return self.model.output_gradient(w, self.inputs, self.targets).reshape(-1) / self.num_examples

    def sources(self) -> Sources:
        """The displacements that do not depend on the gradient, by one sweep from g(s) = 0."""
        p = torch.zeros(self.num_outputs, 1, dtype=self.dtype, device=self.device)
        train, test = torch.zeros_like(p), p.new_zeros(self.num_test_outputs, 1)
        v = self._momentum
        for k, maps in enumerate(self.steps, self.start):
            step, w = maps.step, self._weights(k)
            f = maps.pull(p).squeeze(1) + step.coupled_decay * w
            v = step.momentum * v + step.new_gradient * f
            dw = -step.preconditioner * (step.buffer_share * v + step.direct_share * f) - step.decay * w + step.source
            y = maps.push(dw[:, None])
            train, test, p = train + y, test + maps.push_test(dw[:, None]), p + maps.bend(y)
        return Sources(train.squeeze(1), test.squeeze(1), p.squeeze(1))

    def dense_operators(self) -> Operators:
        """P, a factor of W, D and G as matrices, by one forward sweep of the identity, with the sources.

        Raises:
            DataError: the matrices need more than ``memory``.
        """
        N, M, d = self.num_outputs, self.num_test_outputs, self.model.size
        self._require_room("P, W, D and G as matrices", N * (_SWEPT * d + 8 * N + 2 * M))
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

    def lifted_steps(self) -> list[LiftedStep]:
        """The steps in the form that :func:`poprisk.operators.cumulative_error` takes.

        Raises:
            DataError: the window is not dense, or its lifted steps need more than ``memory``.
        """
        if not all(isinstance(maps, DenseStep) for maps in self.steps):
            raise DataError("lifted steps are matrices: create the window with dense=True, shorter if necessary")
        N, d = self.num_outputs, self.model.size
        self._require_room("the lifted steps", N * ((_SWEPT + 2 * len(self.steps)) * d + 4 * N))
        eye = torch.eye(self.num_outputs, dtype=self.dtype, device=self.device)
        lifted: list[LiftedStep] = []

        def lift(j: int, F: Block) -> None:
            maps = self.steps[j]
            assert isinstance(maps, DenseStep)
            lifted.append(LiftedStep(maps.step, F, maps.pull(eye), maps.train_jacobian, maps.test_jacobian))

        forward_sweep(self.steps, eye, test=False, watch=lift)
        return lifted

    def cumulative_error(self, A: Float[Tensor, "M N"], *, cutoff: float | None = None) -> CumulativeError:
        r""":math:`\mathcal D_A` of a linear predictor and its split; see :func:`poprisk.operators.cumulative_error`.

        Raises:
            DataError: the window is not dense, or A does not map training outputs to test outputs.
        """
        return cumulative_error(self.lifted_steps(), A, cutoff=cutoff)

    def anchored_coupling(self, *, preconditioned: bool = True, cutoff: float | None = None) -> Float[Tensor, "M N"]:
        r"""The predictor of kernel regression with the kernel at the window's start, from the Jacobians.

        .. math:: A_s = K_{QS}^M(s) K_{SS}^M(s)^\dagger, \qquad K^M = J \tilde M_s J^\top

        Args:
            preconditioned: Use :math:`\tilde M` of the first step; otherwise M = I.
            cutoff: As in :func:`poprisk.operators.anchored_coupling_of_jacobians`.

        Raises:
            DataError: the window has no test set, or the Jacobians need more than ``memory``.
        """
        if self.test_inputs is None:
            raise DataError("a coupling needs a test set: pass test_inputs=… to the window")
        N, M, d = self.num_outputs, self.num_test_outputs, self.model.size
        self._require_room("the Jacobians of a coupling", (4 * N + 2 * M) * d + N * (2 * N + M))
        w = self._weights(self.start)
        root = self.effective_preconditioners[0].sqrt() if preconditioned else torch.ones_like(w)
        J_Q, J_S = (self.model.output_jacobian(w, x).flatten(0, 1) * root for x in (self.test_inputs, self.inputs))
        return anchored_coupling_of_jacobians(J_Q, J_S, cutoff=cutoff)

    def test_displacement(self) -> Float[Tensor, "M"]:
        """U_Q(T) - U_Q(s), by two evaluations of the network."""
        if self.test_inputs is None:
            return torch.zeros(0, dtype=self.dtype, device=self.device)
        after, before = (self._outputs(k, self.test_inputs) for k in (self.stop, self.start))
        return (after - before).reshape(-1)

    def losses(self) -> tuple[float, float]:
        """The mean training loss at the start and at the end of the window."""
        weights = (self._weights(k) for k in (self.start, self.stop))
        before, after = (self.model.per_example_losses(w, self.inputs, self.targets).mean().item() for w in weights)
        return before, after

    def corrections(self) -> Float[Tensor, "steps 3"]:
        """Relative size of the secant correction of each step: training Jacobian, test Jacobian, curvature.

        This is the part of each step that the quadrature alone would miss.
        """
        rows = [(m.train_correction, m.test_correction, m.curvature_correction) for m in self.steps]
        return torch.tensor(rows, dtype=torch.float64)

    def _build(self, k: int, step: AffineStep) -> MatrixFreeStep:
        if len(step.batch) and not 0 <= int(step.batch.min()) <= int(step.batch.max()) < self.num_examples:
            raise DataError(
                f"step {k} used examples {int(step.batch.min())} … {int(step.batch.max())}, but the window has "
                f"{self.num_examples} examples: pass all training inputs in the order that was recorded"
            )
        before, after = self._weights(k), self._weights(k + 1)
        options = {"nodes": self._nodes, "secant": self._secant}
        train, test = (
            None if inputs is None else SegmentJacobian(self.model, before, after, inputs, kinks=self._kinks, **options)
            for inputs in (self.inputs, self.test_inputs)
        )
        assert train is not None
        curvature = SegmentCurvature(
            self.model.loss,
            self.model.batch_outputs(before, self.inputs),
            self.model.batch_outputs(after, self.inputs),
            self.targets,
            **options,
        )
        return MatrixFreeStep(
            step=step,
            train_jacobian=train,
            test_jacobian=test,
            curvature=curvature,
            train_correction=train.correction,
            test_correction=0.0 if test is None else test.correction,
            nodes=train.nodes,
            model=self.model,
            weights=before,
            batch_inputs=take_examples(self.inputs, step.batch),
            num_examples=self.num_examples,
        )

    def _jacobian_bytes(self, steps: Sequence[MatrixFreeStep]) -> int:
        """Memory that the Jacobians of all steps would take."""
        rows = len(steps) * (self.num_outputs + self.num_test_outputs)
        rows += sum(len(maps.step.batch) for maps in steps) * (self.num_outputs // self.num_examples)
        return rows * self.model.size * self.dtype.itemsize

    def _require_room(self, what: str, numbers: int) -> None:
        """Refuses work that would hold more numbers at once than fit in ``memory``."""
        need = numbers * self.dtype.itemsize
        if need > self.memory:
            raise DataError(
                f"{what} need about {need / 2**20:.0f} MiB for {self.num_outputs} outputs and {self.model.size} "
                f"weights, but memory={self.memory} allows {self.memory / 2**20:.0f} MiB: raise memory=…, or use the "
                "operators as products (window.test_transfer @ H and so on) and top_channels(window, …)"
            )

    def _weights(self, k: int) -> Float[Tensor, "d"]:
        return self._path[k - self.start]

    def _first_outputs(self, which: str, inputs: Inputs) -> Float[Tensor, "n p"]:
        """Outputs at the start of the window, the first call of the model with these inputs."""
        try:
            return self._outputs(self.start, inputs)
        except (PopRiskError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            parts = inputs if isinstance(inputs, tuple) else (inputs,)
            got = ", ".join(f"{x.dtype} {list(x.shape)} on {x.device}" for x in parts)
            raise DataError(
                f"the model, with weights of {self.dtype} on {self.device}, does not accept the {which} inputs {got}: "
                f"pass inputs like those of the training, in its dtype and on its device ({str(error).splitlines()[0]})"
            ) from error

    def _outputs(self, k: int, inputs: Inputs) -> Float[Tensor, "n p"]:
        return self.model.outputs(self._weights(k), inputs)


def _with_nodes(maps: StepMaps, nodes: int) -> MatrixFreeStep:
    if not isinstance(maps, MatrixFreeStep):
        raise DataError("the number of nodes makes no difference to a dense window: create it with dense=False")
    train = maps.train_jacobian.with_nodes(nodes)
    return replace(maps, train_jacobian=train, train_correction=train.correction, nodes=nodes)


def _cast(inputs: Inputs, dtype: torch.dtype, device: torch.device) -> Inputs:
    """The inputs on a device, floating-point ones in another dtype; indices keep theirs."""
    if isinstance(inputs, tuple):
        return tuple(x.to(device, dtype if x.is_floating_point() else x.dtype) for x in inputs)
    return inputs.to(device, dtype if inputs.is_floating_point() else inputs.dtype)
