r"""Products with the operators of a run, followed in stretches: a step costs two products with its batch.

Within a stretch that starts at step a, the output gradient of the batch of step k is carried from step a by one average
over the chord from :math:`w_a` to :math:`w_k`; all examples follow at the end of the stretch:

.. math::
   z_k = z_a - \bar B_{a \to k}\, \bar J_{a \to k} \sum_{a \le j < k} X_j \quad \text{(rows of the batch of step k)}

Each average is closed with the secant, so the displacements of the run are exact to rounding whatever the length of a
stretch. Stretches of one step are the steps of :class:`~poprisk.operators.Window`. Longer ones average the Jacobian
over a chord instead of the path, which changes the operators by as much as the Jacobian turns within a stretch, in
proportion to its length: two lengths say by how much.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, SegmentCurvature, SegmentJacobian, take_examples
from poprisk._core.linalg import LinearOperator, from_functions
from poprisk._core.progress import tracked
from poprisk.operators._drift_diffusion import in_dtype_of, step_in_dtype_of
from poprisk.operators._reach import effective_preconditioners
from poprisk.operators._step_maps import Block, scale_rows
from poprisk.operators._sweeps import Swept, step_direction
from poprisk.operators._trajectory import Trajectory, check_run
from poprisk.runs import AffineStep


@dataclass(eq=False)
class RunPath:
    """Weights and steps of a stretch of a run, read once, with the data that the operators are about."""

    model: FlatModel
    inputs: Inputs
    targets: Tensor
    test_inputs: Inputs | None
    start: int
    steps: list[AffineStep]
    weights: list[Float[Tensor, "d"]]
    """Before each step, and after the last."""
    momentum: Float[Tensor, "d"]
    """Carried into the first step."""

    @classmethod
    def read(
        cls,
        run: Trajectory,
        model: FlatModel,
        inputs: Inputs,
        targets: Tensor,
        test_inputs: Inputs | None = None,
        *,
        start: int = 0,
        stop: int | None = None,
    ) -> "RunPath":
        """Steps ``start`` … ``stop`` of a run, in the dtype of the model.

        Raises:
            RunError: no exact analysis is possible, or inputs were augmented.
            DataError: another number of examples than recorded.
        """
        check_run(run, targets, stop)
        stop = run.num_steps if stop is None else stop
        momentum, weights, steps = in_dtype_of(model, run.buffer(start)), [in_dtype_of(model, run.weights(start))], []
        # In order: a sparse run computes what lies between its checkpoints again.
        for k in tracked(range(start, stop), "reading the steps"):
            steps.append(step_in_dtype_of(model, run.step(k)))
            weights.append(in_dtype_of(model, run.weights(k + 1)))
        return cls(model, inputs, targets, test_inputs, start, steps, weights, momentum)

    @cached_property
    def output_gradient(self) -> Float[Tensor, "N"]:
        """g(s), the gradient of the mean training loss by the outputs before the first step."""
        return self.gradient_for(self.targets)

    def gradient_for(self, targets: Tensor) -> Float[Tensor, "N"]:
        """What g(s) would be with other targets."""
        return self.model.output_gradient(self.weights[0], self.inputs, targets).reshape(-1) / len(targets)

    @cached_property
    def start_outputs(self) -> Float[Tensor, "n *p"]:
        """Outputs on the training inputs before the first step."""
        return self.model.batch_outputs(self.weights[0], self.inputs)

    def test_outputs(self, k: int) -> Float[Tensor, "m p"]:
        """Outputs on the test inputs before the k-th step of the path; -1 for the end."""
        assert self.test_inputs is not None
        return self.model.outputs(self.weights[k], self.test_inputs)


@dataclass
class ChordStep:
    """One step of a stretch: its batch, and how the batch's output gradient changed since the stretch began."""

    step: AffineStep
    model: FlatModel
    weights: Float[Tensor, "d"]
    inputs: Inputs
    shares: Float[Tensor, "bp 1"]
    """The diagonal of S on the outputs of the batch."""
    rows: Tensor
    """Positions of these outputs among all."""
    chord: tuple[SegmentJacobian, SegmentCurvature] | None
    """From the stretch's start to this step; None for its first step."""
    scale: float
    """b/n: the curvature of a batch has 1/b inside, that of all examples 1/n."""

    def read(self, z: Block, moved: Block | None) -> Block:
        """The rows of the output gradient that the step sees, from those at the stretch's start."""
        rows = z[self.rows]
        if self.chord is None or moved is None:
            return rows
        jacobian, curvature = self.chord
        return rows - self.scale * (curvature @ (jacobian @ moved))

    def read_adjoint(self, drows: Block, dz: Block, dmoved: Block) -> None:
        """Adds the transpose of ``read`` to the weights of z and of what has moved."""
        dz.index_add_(0, self.rows, drows)
        if self.chord is not None:
            jacobian, curvature = self.chord
            dmoved.sub_(jacobian.T @ (curvature @ drows), alpha=self.scale)

    def pull(self, rows: Block) -> Block:
        r""":math:`J_k^\top S_k z` from the rows that the step sees."""
        return self.model.vjp(self.weights, self.inputs, self.shares * rows)

    def pull_adjoint(self, Y: Block) -> Block:
        r""":math:`S_k J_k Y`, on the rows that the step sees."""
        return self.shares * self.model.jvp(self.weights, self.inputs, Y)


@dataclass
class Stretch:
    """Consecutive steps, and the chord over all of them for training and test outputs."""

    steps: list[ChordStep]
    train: SegmentJacobian
    test: SegmentJacobian | None
    curvature: SegmentCurvature


class StretchedWindow:
    """The steps of a path in stretches of ``length`` steps, known by their products.

    >>> from poprisk.operators._gradient_descent import gradient_descent
    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False).double(), "squared")
    >>> x, y = torch.eye(2, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    >>> path = RunPath.read(gradient_descent(model, x, y, lr=0.5, steps=4), model, x, y, x)
    >>> swept = StretchedWindow(path, 2).forward(path.output_gradient[:, None])
    >>> torch.allclose(-swept.test[:, 0], (path.test_outputs(-1) - path.test_outputs(0))[:, 0])
    True
    """

    def __init__(self, path: RunPath, length: int, *, nodes: int = 1) -> None:
        self.path, self._nodes, count = path, nodes, len(path.steps)
        self._p = path.output_gradient.numel() // len(path.targets)
        begins = tracked(range(0, count, length), "linearizing the steps")
        self.stretches = [self._stretch(a, min(a + length, count)) for a in begins]

    def _stretch(self, a: int, b: int) -> Stretch:
        path, nodes = self.path, self._nodes
        model, first, last = path.model, path.weights[a], path.weights[b]
        before, after = (model.batch_outputs(w, path.inputs) for w in (first, last))
        train, test = (
            None if inputs is None else SegmentJacobian(model, first, last, inputs, nodes=nodes)
            for inputs in (path.inputs, path.test_inputs)
        )
        assert train is not None
        curvature = SegmentCurvature(model.loss, before, after, path.targets, nodes=nodes)
        return Stretch([self._step(a, k, before) for k in range(a, b)], train, test, curvature)

    def _step(self, a: int, k: int, before: Tensor) -> ChordStep:
        path, step, p = self.path, self.path.steps[k], self._p
        model, w, inputs = path.model, path.weights[k], take_examples(path.inputs, step.batch)
        chord = None
        if k > a:
            nodes = self._nodes
            after, there = model.batch_outputs(w, inputs), path.targets[step.batch]
            chord = (
                SegmentJacobian(model, path.weights[a], w, inputs, nodes=nodes),
                SegmentCurvature(model.loss, before[step.batch], after, there, nodes=nodes),
            )
        rows = (step.batch[:, None] * p + torch.arange(p, device=step.batch.device)).reshape(-1)
        shares = step.selection.repeat_interleave(p)[:, None]
        return ChordStep(step, model, w, inputs, shares, rows, chord, len(step.batch) / len(path.targets))

    @cached_property
    def effective_preconditioners(self) -> list[Float[Tensor, "d"]]:
        r""":math:`\tilde M_j` of each step; see :mod:`poprisk.operators._reach`."""
        return effective_preconditioners(self.path.steps)

    def forward(
        self,
        H: Float[Tensor, "N k"],
        *,
        source: bool = False,
        watch: Callable[[int, Block, Block], None] | None = None,
        after: Callable[[int, Block], None] | None = None,
    ) -> Swept:
        """P H, D H and G H, as ``forward_sweep``.

        Args:
            H: Directions of the output gradient at the start.
            source: Append a column for what moved beside the gradient: minus the source of each output.
            watch: Called with each step's number, F_j H and the rows of z that it was made of.
            after: Called after each stretch with the steps taken and P H up to there.
        """
        k = H.shape[1]
        z = torch.cat([H, H.new_zeros(len(H), 1)], dim=1) if source else H
        V: Block | None = None
        if source:
            V = z.new_zeros(len(self.path.momentum), k + 1)
            V[:, -1] = self.path.momentum
        train, tested, j = torch.zeros_like(z), None, 0
        for stretch in tracked(self.stretches, "operators, forward"):
            moved: Block | None = None
            for maps in stretch.steps:
                rows = maps.read(z, moved)
                F = maps.pull(rows)
                if watch is not None:
                    watch(j, F[:, :k], rows[:, :k])
                if source:
                    F[:, -1] += maps.step.coupled_decay * maps.weights
                X, V = step_direction(maps.step, F, V)
                if source:
                    X[:, -1] += maps.step.decay * maps.weights - maps.step.source
                moved, j = X if moved is None else moved.add_(X), j + 1
            assert moved is not None, "a stretch has at least one step"
            y = stretch.train @ moved
            train, z = train.add_(y), z - stretch.curvature @ y
            if stretch.test is not None:
                u = stretch.test @ moved
                tested = u if tested is None else tested.add_(u)
            if after is not None:
                after(j, z[:, :k])
        assert V is not None, "a window has at least one step"
        return Swept(z, train, z.new_zeros(0, z.shape[1]) if tested is None else tested, V)

    @property
    def dissipation_gramian(self) -> LinearOperator:
        """W; searched in place of that of a :class:`~poprisk.operators.Window`, it is several times cheaper."""
        N, like = self._p * len(self.path.targets), self.path.momentum
        return from_functions(self.dissipate, None, (N, N), like.dtype, like.device, symmetric=True)

    def dissipate(self, H: Float[Tensor, "N k"]) -> Float[Tensor, "N k"]:
        """W H, by one forward and one backward sweep."""
        seen: list[Block] = []
        self.forward(H, watch=lambda j, F, rows: seen.append(rows))
        dz, dV = torch.zeros_like(H), None
        for stretch in tracked(self.stretches[::-1], "operators, backward"):
            dmoved = (stretch.train.T @ (stretch.curvature @ dz)).neg_()
            for maps in reversed(stretch.steps):
                step, weigh = maps.step, self.effective_preconditioners[len(seen) - 1][:, None]
                dE = step.preconditioner[:, None] * dmoved
                dV = scale_rows(step.buffer_share, dE) + (0.0 if dV is None else dV)
                dF = scale_rows(step.new_gradient, dV) + scale_rows(step.direct_share, dE)
                dF += weigh * maps.pull(seen.pop())
                maps.read_adjoint(maps.pull_adjoint(dF), dz, dmoved)
                dV = scale_rows(step.momentum, dV)
        return dz
