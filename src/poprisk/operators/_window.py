r"""A window of a recorded run, and its operators: exact for the steps that were taken, dense or matrix-free.

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
from poprisk._core.linalg import LinearOperator, from_functions, tsqr_append
from poprisk.errors import DataError, PopRiskError
from poprisk.operators._coupling import anchored_coupling_of_jacobians
from poprisk.operators._cumulative import CumulativeError, LiftedStep, cumulative_error
from poprisk.operators._dense import Operators, Sources
from poprisk.operators._reach import effective_preconditioners
from poprisk.operators._step_maps import Block, DenseStep, MatrixFreeStep, StepMaps
from poprisk.operators._sweeps import backward_sweep, forward_sweep
from poprisk.operators._trajectory import Trajectory, check_run
from poprisk.runs import AffineStep, Run, check_first_steps

_MEMORY = 2**30
# Blocks [d, N] that a sweep of the identity holds at its fullest: gradients, momentum before and after, the step.
_SWEPT = 5


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
        dense: Form every step's Jacobians once (fast for small windows) instead of multiplying by them; by default
            where all of them fit in ``memory``.
        nodes: Quadrature nodes per step; by default as many as each step needs.
        secant: Close Jacobians and curvature so that they carry each step to rounding. Off, what remains is the
            quadrature's own accuracy, the test that the operators are not made to fit.
        memory: Bytes for the Jacobians of a dense window, and for the matrices of ``dense_operators``,
            ``anchored_coupling`` and ``lifted_steps``, which are refused where they need more; and that a product with
            W may hold on to: every step's gradients where they fit, else the rows of its batch, from which they are
            formed again; where even those do not fit, columns are taken in turns.

    Raises:
        DataError: the window is empty or outside the run, indices outside the training set, sizes that do not fit, or
            inputs that the model cannot take.
        RunError: the run says why no exact analysis of it is possible, or its inputs were augmented.

    Example:
        >>> from poprisk.operators._gradient_descent import gradient_descent
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
        dense: bool | None = None,
        nodes: int | None = None,
        secant: bool = True,
        memory: int = _MEMORY,
    ) -> None:
        check_run(trajectory, targets)
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
        # Asked for once and in order: between its checkpoints a sparse run computes weights and steps again.
        self._momentum = trajectory.buffer(start).to(self.device, self.dtype)
        self._path = [trajectory.weights(start).to(self.device, self.dtype)]
        self.start_outputs = self._first_outputs("training", inputs)
        self.num_test_outputs = 0 if test_inputs is None else self._first_outputs("test", test_inputs).numel()
        """Rows of the test transfer."""
        built = []
        for k in range(start, stop):
            step = trajectory.step(k)
            self._path.append(trajectory.weights(k + 1).to(self.device, self.dtype))
            built.append(self._build(k, self._converted(step)))
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
        """The window of a run that knows its problem: model, training examples and test set are taken from there.

        Args:
            run: Recorded with ``problem=…``, or loaded with it.
            test_inputs: The test set Q; by default the inputs of ``run.problem.test``, where there are any.
            start: First step of the window, s.
            stop: The step after its last, T; the run's end by default.
            dtype: Of the operators, whatever the run's own; single precision for scale.
            options: ``dense``, ``nodes``, ``secant`` and ``memory``, as of the constructor.

        Raises:
            RunError: no exact analysis of the run is possible, its inputs were augmented, its problem is not known, or
                the problem's model is not the recorded one: in names, shapes, frozen numbers, or in the gradients of
                the first recorded steps.
            DataError: the window is empty or outside the run, or the model cannot take the test inputs.

        >>> from poprisk.runs import Problem
        >>> from poprisk.runs import train
        >>> problem = Problem(torch.nn.Linear, "squared", torch.eye(2), torch.ones(2, 1),
        ...                   arguments={"in_features": 2, "out_features": 1})
        >>> run = train(problem, lambda params: torch.optim.SGD(params, lr=0.1), steps=3, progress=False)
        >>> Window.of_run(run, start=1).train_transfer.shape
        (2, 2)
        """
        check_run(run, run.problem.targets)
        model = run.model(dtype)
        check_first_steps(run, model)
        inputs, targets = run.problem.batch(dtype=dtype)
        if test_inputs is None and run.problem.test is not None:
            test_inputs = run.problem.test[0]
        return cls(
            run,
            model,
            inputs,
            targets,
            test_inputs=None if test_inputs is None else _cast(test_inputs, dtype, targets.device),
            start=start,
            stop=stop,
            **options,
        )

    def with_nodes(self, nodes: int) -> "Window":
        """The same window with this many nodes for the training Jacobians; everything else is shared with it.

        With one node its W is a cheap stand-in for the search of eigenpairs: ``surrogate`` of ``top_eigenpairs``.

        Raises:
            DataError: the window is dense, so that nodes cost nothing.
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

    @property
    def num_examples(self) -> int:
        """N."""
        return self.start_outputs.shape[0]

    @property
    def num_outputs(self) -> int:
        """N = n p, the length of an output gradient."""
        return self.start_outputs.numel()

    @cached_property
    def output_gradient(self) -> Float[Tensor, "N"]:
        r"""g(s), the gradient of the mean training loss by the outputs at the window's start."""
        w = self._weights(self.start)
        return self.model.output_gradient(w, self.inputs, self.targets).reshape(-1) / self.num_examples

    @cached_property
    def effective_preconditioners(self) -> list[Float[Tensor, "d"]]:
        r""":math:`\tilde M_j` of each step; see :mod:`poprisk.operators._reach`."""
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
    def train_completion(self) -> LinearOperator:
        r""":math:`F_{SS} = I - P_g` (``eq:train_complement``): what of an output gradient the window has worked off."""
        P = self.propagator
        return self._operator(lambda H: H - P @ H, lambda A: A - P.T @ A, self.num_outputs)

    @property
    def augmented_propagator(self) -> LinearOperator:
        r"""The propagator of gradient and momentum together, [N + d, N + d]; it composes where :math:`P_g` does not.

        .. math:: \begin{pmatrix} g(T) \\ v_{T-1} \end{pmatrix} =
                  \mathsf P(T, s) \begin{pmatrix} g(s) \\ v_{s-1} \end{pmatrix} + \text{source}, \qquad
                  \mathsf P(T, s) = \mathsf P(T, r)\, \mathsf P(r, s)

        Differs from the paper, whose flow has no momentum: with it the gradient alone is not a state, and
        :math:`P_g(T, s) \ne P_g(T, r) P_g(r, s)`. The first N rows and columns are :math:`P_g`.
        """
        N, size = self.num_outputs, self.num_outputs + self.model.size

        def forward(X: Block) -> Block:
            swept = forward_sweep(self.steps, X[:N], momentum=X[N:], test=False)
            return torch.cat([swept.gradient, swept.momentum])

        def backward(Y: Block) -> Block:
            kept: list[Block] = []
            dz = backward_sweep(self.steps, like=Y[:N], gradient=Y[:N], momentum=Y[N:], on_momentum=kept.append)
            return torch.cat([dz, *kept])

        return from_functions(forward, backward, (size, size), dtype=self.dtype, device=self.device)

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
        r"""W (``def:signal_channel``): :math:`\sum_j F_j^\top \tilde M_j F_j`, one forward and one backward sweep.

        This is the paper's :math:`\mathcal W_S^M`: the preconditioner of every step is inside, as it is in P, D and G
        (its superscript M). For plain SGD, :math:`M = \eta I`, it is :math:`\mathcal W_S` in the time Ση.
        There is no second one without M: :math:`\ker W \subseteq \ker G` needs the same M on both sides.
        """
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
            DataError: that needs more than ``memory``.
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
        """The steps as :func:`poprisk.operators.cumulative_error` wants them, each with what it could have reached.

        Raises:
            DataError: the window is not dense, or its lifted steps need more than ``memory``.
        """
        if not all(isinstance(maps, DenseStep) for maps in self.steps):
            raise DataError("lifted steps are matrices: make the window with dense=True, shorter if need be")
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
            DataError: the window is not dense, or A does not map train to test outputs.
        """
        return cumulative_error(self.lifted_steps(), A, cutoff=cutoff)

    def anchored_coupling(self, *, preconditioned: bool = True, cutoff: float | None = None) -> Float[Tensor, "M N"]:
        r"""The predictor of kernel regression with the kernel at the window's start, from the Jacobians.

        .. math:: A_s = K_{QS}^M(s) K_{SS}^M(s)^\dagger, \qquad K^M = J \tilde M_s J^\top

        Args:
            preconditioned: With the first step's :math:`\tilde M`, as the run had it; else with M = I.
            cutoff: As of :func:`poprisk.operators.anchored_coupling_of_jacobians`.

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
        room = self.memory // (H.shape[1] * H.element_size() or 1)
        if len(self.steps) * self.model.size <= room:
            return self._dissipate_block(H, keep_gradients=True)
        rows = sum(len(maps.step.batch) for maps in self.steps) * (self.num_outputs // self.num_examples)
        size = max(1, room * H.shape[1] // max(rows, 1))
        blocks = [self._dissipate_block(part, keep_gradients=False) for part in H.split(size, dim=1)]
        return torch.cat(blocks, dim=1)

    def _dissipate_block(self, H: Block, *, keep_gradients: bool) -> Block:
        """One forward and one backward sweep; between them each F_j H is kept, or formed again from what it read."""
        kept: list[Block] = []

        def keep(_: int, block: Block) -> None:
            kept.append(block)

        watch, watch_rows = (keep, None) if keep_gradients else (None, keep)
        forward_sweep(self.steps, H, test=False, watch=watch, watch_rows=watch_rows)

        def weighed(j: int) -> Block:
            F = kept.pop()  # the last step comes first
            F = F if keep_gradients else self.steps[j].pull_gathered(F)
            return self.effective_preconditioners[j][:, None] * F

        return backward_sweep(self.steps, like=H, on_gradients=weighed)

    def _operator(self, matmat, rmatmat, rows: int) -> LinearOperator:
        shape = (rows, self.num_outputs)
        return from_functions(matmat, rmatmat, shape, dtype=self.dtype, device=self.device)

    def _build(self, k: int, step: AffineStep) -> MatrixFreeStep:
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

    def _jacobian_bytes(self, steps: Sequence[MatrixFreeStep]) -> int:
        """What the Jacobians of all steps would take."""
        rows = len(steps) * (self.num_outputs + self.num_test_outputs)
        rows += sum(len(maps.step.batch) for maps in steps) * (self.num_outputs // self.num_examples)
        return rows * self.model.size * self.dtype.itemsize

    def _converted(self, step: AffineStep) -> AffineStep:
        """The step's tensors in the dtype and on the device of the window."""
        changed = {
            name: value.to(self.device) if name == "batch" else value.to(self.device, self.dtype)
            for name, value in vars(step).items()
            if isinstance(value, Tensor)
        }
        return AffineStep(**{**vars(step), **changed})

    def _require_room(self, what: str, numbers: int) -> None:
        """Refuses what would hold so many numbers at once."""
        need = numbers * self.dtype.itemsize
        if need > self.memory:
            raise DataError(
                f"{what} need about {need / 2**20:.0f} MiB for {self.num_outputs} outputs and {self.model.size} "
                f"weights, memory={self.memory} allows {self.memory / 2**20:.0f}: raise memory=…, or use the operators "
                "as products (window.test_transfer @ H and so on) and top_channels(window, …)"
            )

    def _weights(self, k: int) -> Float[Tensor, "d"]:
        return self._path[k - self.start]

    def _first_outputs(self, which: str, inputs: Inputs) -> Float[Tensor, "n p"]:
        """At the window's start; the first time that the model sees these inputs."""
        try:
            return self._outputs(self.start, inputs)
        except (PopRiskError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            parts = inputs if isinstance(inputs, tuple) else (inputs,)
            got = ", ".join(f"{x.dtype} {list(x.shape)} on {x.device}" for x in parts)
            raise DataError(
                f"the model, with weights of {self.dtype} on {self.device}, cannot take the {which} inputs {got}: pass "
                f"inputs of the kind it was trained on, in its dtype and on its device ({str(error).splitlines()[0]})"
            ) from error

    def _outputs(self, k: int, inputs: Inputs) -> Float[Tensor, "n p"]:
        return self.model.outputs(self._weights(k), inputs)


def _with_nodes(maps: StepMaps, nodes: int) -> MatrixFreeStep:
    if not isinstance(maps, MatrixFreeStep):
        raise DataError("a dense window has its Jacobians at hand, nodes cost nothing: make it with dense=False")
    return replace(maps, train=maps.train.with_nodes(nodes))


def _cast(inputs: Inputs, dtype: torch.dtype, device: torch.device) -> Inputs:
    """The inputs on a device, floating-point ones in another dtype; indices stay what they are."""
    if isinstance(inputs, tuple):
        return tuple(x.to(device, dtype if x.is_floating_point() else x.dtype) for x in inputs)
    return inputs.to(device, dtype if inputs.is_floating_point() else inputs.dtype)
