r"""Derivatives through a training run that happened: forward and adjoint, exact for its steps, many at once.

A recorded run is a chain of steps :math:`x_{k+1} = \mathrm{rule}_k(x_k, g_k)` of weights and optimizer state
:math:`x = (w, m, v, …)`, with :math:`g_k = \sum_{i \in B_k} \sigma_i \alpha_i \nabla\ell_i(w_k)`, shares
:math:`\sigma_i = S_i/n` and example weights :math:`\alpha = 1`. Differentiating the chain gives the change of the last
weights under a change of the examples' weights, labels or inputs, or of the first weights: forward for a direction of
change, adjoint for a function of the last weights. Nothing is frozen: Adam's second moment, the population gate (unless
``gate="frozen"``) and the clipping factor respond too. That is the discrete form of Thm. ``adjoint_reweighting``, whose
gradient flow it is in the limit of small steps.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from poprisk._core.autodiff import EXACT_DTYPES, Inputs, slices, take_examples
from poprisk.errors import DataError, HyperparameterError, RunError
from poprisk.risk._influence.batch_derivatives import BatchDerivatives
from poprisk.risk._influence.linear_stack import batch_derivatives, linear_layers
from poprisk.risk._influence.linear_step import StepJacobian, clip_direction
from poprisk.risk._influence.replayed_states import ReplayedStates
from poprisk.risk._influence.replayed_steps import ReplayedSteps, Work
from poprisk.risk._influence.rule_jacobian import GateMode, rule_jacobian
from poprisk.risk._retraining.members import Members
from poprisk.risk._retraining.retrain import retrain
from poprisk.runs import Run, check_first_steps, flat_rule

By = Literal["weights", "labels", "inputs", "initial"]

# Rows worked on at a time: blocks of this size stay in a CPU's last cache from one operation to the next.
_CACHE_BYTES = 2**23
_FEWEST_ROWS = 8
_BLOCK_BYTES = 2**29
# A GPU has room and wants long operations.
_GPU_BYTES = 2**30

_KINKED = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.Hardtanh,
    nn.Hardswish,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
)


@dataclass(frozen=True)
class Adjoint:
    """Derivatives of q functions of the last weights; None for what was not asked for."""

    weights: Float[Tensor, "q n"] | None = None
    """By each example's weight α."""
    labels: Float[Tensor, "q n p"] | None = None
    """By a shift of each example's label: its residual r becomes r - δ."""
    inputs: Tensor | None = None
    """By each example's input, ``[q, n, *input]``."""
    initial: Float[Tensor, "q d"] | None = None
    """By the weights before the first step."""


@dataclass(frozen=True)
class SpotCheck:
    """What a few real trainings said."""

    examples: Int[Tensor, "count"]
    deviations: Float[Tensor, "count"]
    """Relative distance of the measured from the predicted change of the last weights."""
    trainings: float

    @property
    def worst(self) -> float:
        """The largest deviation."""
        return float(self.deviations.max())


class Unrolled:
    r"""A recorded run as a differentiable function of its examples' weights, labels and inputs, and of its start.

    Batches and their order, learning rates and every other option stay what they were. A label change is a shift of
    the residual, :math:`r_i \to r_i - \delta_i`: for squared loss, cross-entropy and logistic loss that is a change of
    the target (of the class probabilities) by δ.

    Args:
        run: With its problem; exact (no batch statistics, dropout or augmentation), float32 or float64.
        dtype: Of the derivatives; default: the run's own. A float32 run in float64 has its rounding as an error.
        gate: Whether the population gate answers to the change, or is held at what it was.
        start: First step that sees the change.
        stop: Weights before this step are the last; default: the run's end.
        memory: Bytes for kept optimizer states and directions; past it states are computed again, directions taken
            in turns.
        graphs: Whether the work on steps of one form is captured as a CUDA graph and replayed, for stacks of linear
            layers and rules that act on every weight alone. Default: on a GPU.

    Raises:
        RunError: no exact analysis of the run is possible, it was augmented, its problem is not known or another than
            the recorded one, its optimizer or precision allows none.
        DataError: fewer than 3 examples, an empty window, a loss that is no mean over examples.

    >>> from poprisk.runs import Problem
    >>> from poprisk.runs import train
    >>> x = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    >>> problem = Problem(torch.nn.Linear, "squared", x, 2 * x, arguments={"in_features": 1, "out_features": 1})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.1), steps=5, dtype=torch.float64, progress=False)
    >>> unrolled = Unrolled(run)
    >>> dW = unrolled.forward(weights=torch.eye(3, dtype=torch.float64))
    >>> back = unrolled.adjoint(torch.eye(2, dtype=torch.float64), wrt=("weights",)).weights
    >>> torch.allclose(dW, back)
    True
    """

    def __init__(
        self,
        run: Run,
        *,
        dtype: torch.dtype | None = None,
        gate: GateMode = "differentiated",
        start: int = 0,
        stop: int | None = None,
        memory: int = 2**31,
        graphs: bool | None = None,
    ) -> None:
        _check_run(run, dtype, gate)
        stop = run.num_steps if stop is None else stop
        if not 0 <= start < stop <= run.num_steps:
            raise DataError(f"a run to differentiate needs 0 ≤ start < stop ≤ {run.num_steps}, got {start} and {stop}")
        self.run, self.start, self.stop, self.memory, self.graphs = run, start, stop, memory, graphs
        self.gate: GateMode = gate
        """Whether the gate answers to the change."""
        self.dtype = run.layout.dtype if dtype is None else dtype
        self.device = run.problem.device
        self.model = run.model(self.dtype)
        self.rule = flat_rule(run)
        self.inputs, self.targets = run.problem.batch(dtype=self.dtype)
        self._layers = linear_layers(self.model, self.inputs)
        manifest = run.manifest
        self._linear_rule = manifest["optimizer"]["name"] == "torch.optim.SGD"
        self.clip_norm: float | None = (manifest.get("training") or {}).get("clip_norm")
        """The norm that gradients were clipped to, where ``train`` did it; then the factor is differentiated."""
        self._states = ReplayedStates(self.rule, self.weights, lambda k: self.batch(k).gradient, stop, memory // 2)
        self._check_separable()
        check_first_steps(run, self.model)

    @property
    def num_examples(self) -> int:
        """How many training examples there are, n."""
        return self.run.num_examples

    @property
    def num_weights(self) -> int:
        """How many weights there are, d."""
        return self.run.num_weights

    @cached_property
    def output_shape(self) -> tuple[int, ...]:
        """Of one example's outputs, as the network gives them."""
        return tuple(self.model.batch_outputs(self.weights(0), take_examples(self.inputs, slice(0, 1))).shape[1:])

    @cached_property
    def num_outputs(self) -> int:
        """How many outputs an example has, p."""
        return self.model.outputs(self.weights(0), take_examples(self.inputs, slice(0, 1))).shape[1]

    @cached_property
    def _activation_bytes(self) -> int:
        """What one direction holds of a batch's forward and backward pass, about."""
        held = self.model._probe(self.weights(self.start), self.inputs).held
        return 4 * held * len(self.run.batch(self.start)) * self.dtype.itemsize

    @property
    def note(self) -> str:
        """What is held where it was, in words; empty where everything is differentiated."""
        notes = []
        if self.gate == "frozen":
            notes.append("the gate is held at what it was in the run")
        if self.clip_norm is None and any(self._factor(k) != 1 for k in range(self.start, self.stop)):
            notes.append("gradients were multiplied by recorded factors, which are held: no clip_norm was recorded")
        return "; ".join(notes)

    @cached_property
    def kinks(self) -> tuple[str, ...]:
        """Modules whose slope jumps (ReLU, max pooling): the derivative is exact, and says little of a whole removal.

        Each unit that changes side during training moves the gradient by a jump that no derivative knows of; over a
        long run these outweigh the effect of one example. With smooth activations (GELU, SiLU, tanh) there are none.
        Kinks in functions that are not modules are not seen.
        """
        return tuple(sorted({type(m).__name__ for m in self.model.module.modules() if isinstance(m, _KINKED)}))

    @cached_property
    def last_weights(self) -> Float[Tensor, "d"]:
        """w_T."""
        return self.weights(self.stop)

    def weights(self, k: int) -> Float[Tensor, "d"]:
        """The recorded weights before step k."""
        return self.run.weights(k).to(self.device, self.dtype)

    def batch(self, k: int) -> BatchDerivatives:
        """The batch of step k at the weights it was taken with."""
        recorded = self.run.recorded(k)
        examples = recorded.batch(k).to(self.device)
        shares = recorded.selection(k).to(self.device, self.dtype) / self.num_examples
        x, y = take_examples(self.inputs, examples), self.targets[examples]
        return batch_derivatives(self.model, self._layers, self.weights(k), x, y, shares)

    def step(self, k: int) -> StepJacobian:
        """Step k, linearized."""
        batch = self.batch(k)
        clips = self.clip_norm is not None and self._factor(k) != 1
        clip = clip_direction(batch.gradient, self.clip_norm) if clips and self.clip_norm is not None else None
        # SGD's step is linear: its derivative is the same whatever momentum it found.
        state = self.rule.initial(batch.w) if self._linear_rule else self._states.before(k)
        rule = rule_jacobian(self.rule, k, batch.w, batch.gradient, state, gate=self.gate)
        return StepJacobian(k, self.run.batch(k).to(self.device), batch, rule, clip)

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
    ) -> Adjoint:
        r"""The derivatives of q functions :math:`\psi(w_T)`, given their gradients, by everything that went in.

        Args:
            covectors: :math:`\nabla\psi(w_T)`, one per column.
            wrt: By what.
            on_step: Called with every step, last first, and the derivatives [q, b, p] by that step's labels alone.

        Raises:
            DataError: shapes that do not fit, or a query that is not finite.
        """
        self._check_covectors(covectors, wrt)
        parts = [
            self._adjoint(covectors[:, part].to(self.device, self.dtype), wrt, on_step)
            for part in slices(covectors.shape[1], self.columns_at_a_time())
        ]
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in wrt}
        return Adjoint(**joined)

    def spot_check(self, count: int = 3, *, epsilon: float | None = None, seed: int = 0) -> SpotCheck:
        r"""Real trainings with the weight of a few examples changed by ±ε, against :meth:`forward`.

        Args:
            count: How many examples, drawn at random; each costs two trainings.
            epsilon: Default: the cube root of the dtype's precision.
            seed: Of the draw.

        Returns:
            For each example :math:`\|\Delta w - \epsilon\,\dot w\| / \|\epsilon\,\dot w\|`. In float64 a smooth
            model gives less than 1e-6; in float32 the difference itself has only one to three digits.

        Raises:
            RunError: the window does not begin with the run, or something is held that a training would not hold.
        """
        if self.start != 0 or self.note:
            why = self.note or f"the changes begin at step {self.start}"
            raise RunError(f"a spot check trains the whole run again as it was, but {why}: use a window from step 0 on")
        n, eps = self.num_examples, epsilon or torch.finfo(self.dtype).eps ** (1 / 3)
        examples = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: max(1, count)]
        change = torch.zeros(len(examples), n, dtype=self.dtype).scatter_(1, examples[:, None], 1.0)
        alpha = torch.cat([1 + eps * change, 1 - eps * change])
        kept = retrain(self.run, Members(alpha), keep=[self.stop], dtype=self.dtype, progress=False).kept[self.stop]
        measured = (kept[: len(examples)] - kept[len(examples) :]) / (2 * eps)
        predicted = self.forward(weights=change.T.contiguous()).T
        scale = predicted.norm(dim=1).clamp(min=torch.finfo(self.dtype).tiny)
        deviations = ((measured - predicted).norm(dim=1) / scale).cpu()
        return SpotCheck(examples, deviations, 2.0 * len(examples))

    def columns_at_a_time(self) -> int:
        """Directions or queries that fit in half of ``memory``, for whoever makes them in turns."""
        blocks = 2 + len(self.rule.state_names)
        return max(1, self.memory // 2 // (blocks * self.num_weights * self.dtype.itemsize))

    def steps(self, *, backward: bool = False) -> Iterator[StepJacobian]:
        """The window's steps, linearized, in order or from the last to the first."""
        numbers = range(self.start, self.stop)
        return (self.step(k) for k in (reversed(numbers) if backward else numbers))

    def rows_at_a_time(self, rows: int) -> Iterator[slice]:
        """Blocks of directions whose numbers stay in a CPU's cache, or fill a GPU."""
        per_row = self.num_weights * self.dtype.itemsize
        on_gpu = self.device.type == "cuda"
        if self._layers is None:  # automatic differentiation holds the activations of every direction
            room = 8 * _GPU_BYTES if on_gpu else _BLOCK_BYTES
            return slices(rows, max(1, room // (8 * per_row + self._activation_bytes)))
        return slices(rows, max(_FEWEST_ROWS, (_GPU_BYTES if on_gpu else _CACHE_BYTES) // per_row))

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
        """The work itself, or one that replays it as a CUDA graph."""
        wanted = self.device.type == "cuda" if self.graphs is None else self.graphs
        return ReplayedSteps(work, capture=self.device.type == "cuda").take if wanted and replay else work

    def _adjoint(
        self, covectors: Tensor, wrt: tuple[By, ...], on_step: Callable[[StepJacobian, Tensor], None] | None
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
        return found.adjoint(blocks[0])

    def _factor(self, k: int) -> float:
        factor, scale = self.run.recorded(k).factor(k)
        return factor * scale

    def _check_directions(self, kinds: dict[str, Tensor]) -> None:
        if not kinds:
            raise DataError("a direction of change is needed: weights, labels, inputs or initial")
        n, d, p = self.num_examples, self.num_weights, self.num_outputs
        expected: dict[str, tuple[int, ...]] = {"weights": (n,), "labels": (n, p), "initial": (d,)}
        if "inputs" in kinds:
            expected["inputs"] = _input_shape(self.inputs)
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
            _input_shape(self.inputs)

    def _check_separable(self) -> None:
        """Refuses a batch loss that is not the mean of the examples' losses."""
        examples = self.run.batch(self.start)
        x, y = take_examples(self.inputs, examples), self.targets[examples]
        w = self.weights(self.start)
        mean = self.model.per_example_losses(w, x, y).mean()
        whole = self.run.problem.batch_loss(self.model.batch_outputs(w, x), y)
        if not torch.allclose(mean, whole.to(mean), rtol=1e-4, atol=1e-6):
            raise DataError(
                f"the batch's loss must be the mean of its examples' losses, {float(mean):.6g}, got {float(whole):.6g}"
                ": influence is defined for separable losses; give the problem a loss of one example that it averages"
            )


class _Gathered:
    """Collects the derivatives of every example over the steps."""

    def __init__(self, q: int, n: int, p: int, inputs: Inputs, like: Tensor, wrt: tuple[By, ...]) -> None:
        self._wrt = wrt
        shapes: dict[By, tuple[int, ...]] = {"weights": (q, n), "labels": (q, n, p)}
        if "inputs" in wrt:
            shapes["inputs"] = (q, *_input_shape(inputs))
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


def as_unrolled(run: "Run | Unrolled", dtype: torch.dtype | None = None) -> Unrolled:
    """The run, made differentiable if it is not yet."""
    return run if isinstance(run, Unrolled) else Unrolled(run, dtype=dtype)


def _source(step: StepJacobian, kinds: dict[str, Tensor]) -> Tensor | None:
    """What changes of weights and labels put into the batch's residuals, [k, b, p]."""
    shares, source = step.batch.shares[:, None], None
    if "weights" in kinds:
        source = kinds["weights"][step.examples].T.unsqueeze(2) * (shares * step.batch.residuals)
    if "labels" in kinds:
        shift = -shares * kinds["labels"][step.examples].movedim(-1, 0)
        source = shift if source is None else source + shift
    return source


def _input_shape(inputs: Inputs) -> tuple[int, ...]:
    if isinstance(inputs, tuple) or not inputs.is_floating_point():
        kind = f"{len(inputs)} tensors" if isinstance(inputs, tuple) else str(inputs.dtype)
        raise DataError(f"derivatives by inputs need one floating-point input tensor, got {kind}: leave inputs out")
    return tuple(inputs.shape)


def _check_run(run: Run, dtype: torch.dtype | None, gate: str) -> None:
    run.require_exact()
    if run.augmented:
        raise RunError(
            "inputs of this run were augmented: no step saw the problem's examples as they are, and no influence of "
            "one is defined; train without augment"
        )
    if not run.num_steps:
        raise RunError("the run has no steps: there is nothing to differentiate")
    if run.num_examples < 3:
        raise DataError(f"influence needs at least 3 training examples, got {run.num_examples}")
    if gate not in ("differentiated", "frozen"):
        raise HyperparameterError(f'gate must be "differentiated" or "frozen", got {gate!r}')
    for found in (run.layout.dtype, dtype):
        if found is not None and found not in EXACT_DTYPES:
            raise RunError(
                f"derivatives through a run need float32 or float64 weights, got {found}: train in one of them"
            )
