r"""A recorded run as a chain of linearized steps in weights and optimizer state.

The chain is :math:`x_{k+1} = \mathrm{rule}_k(x_k, g_k)` with :math:`x = (w, m, v, …)`,
:math:`g_k = \sum_{i \in B_k} \sigma_i \alpha_i \nabla\ell_i(w_k)`, shares :math:`\sigma_i = S_i/n` and example weights
:math:`\alpha = 1`. Nothing is frozen: Adam's second moment, the population gate (unless ``gate="frozen"``) and the
clipping factor respond too.
"""

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from poprisk._core.autodiff import EXACT_DTYPES, FlatModel, slices, take_examples
from poprisk._core.costs import working_memory
from poprisk.errors import DataError, RunError
from poprisk.risk._duplicates import duplicate_groups
from poprisk.risk._influence.batch_derivatives import BatchDerivatives
from poprisk.risk._influence.linear_stack import batch_derivatives, linear_layers
from poprisk.risk._influence.parameter_choice import Parameters, choose_parameters
from poprisk.risk._influence.step_jacobian import GateMode, StepJacobian, clip_direction, rule_jacobian
from poprisk.runs import FlatRule, Run, as_run, check_first_steps, flat_rule

State = tuple[Tensor, ...]

# Size of the blocks of rows processed at a time: they stay in a CPU's last cache from one operation to the next.
_CACHE_BYTES = 2**23
_FEWEST_ROWS = 8
_BLOCK_BYTES = 2**29
# A GPU has room for larger blocks, and needs long operations.
_GPU_BYTES = 2**30
_PASSES = 4
"""How often the numbers of a forward pass may be held at a time, at most; where memory is granted, once is assumed."""

_MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_KINKED = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.Hardtanh, nn.Hardswish, *_MAX_POOLS)


class LinearizedRun:
    """The steps of a recorded run, each linearized at its recorded values; see :class:`~poprisk.risk.Unrolled`."""

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
        parameters: Parameters | None = None,
    ) -> None:
        _check_run(run, dtype, stop)
        stop = run.num_steps if stop is None else stop
        if not 0 <= start < stop <= run.num_steps:
            raise DataError(f"a run to differentiate needs 0 ≤ start < stop ≤ {run.num_steps}, got {start} and {stop}")
        self.run, self.start, self.stop, self.memory, self.graphs = run, start, stop, working_memory(memory), graphs
        self.gate: GateMode = gate
        """Whether the gate is differentiated, or held at its recorded values."""
        self.dtype = run.layout.dtype if dtype is None else dtype
        self.device = run.problem.device
        self.model = whole = run.model(self.dtype)
        self.inputs, self.targets = run.problem.batch(dtype=self.dtype)
        self.parameters = run.layout.names
        """Names of the parameters that are differentiated; the others are held at their recorded values."""
        self._chosen: Int[Tensor, "d"] | None = None
        if parameters is not None:
            self._restrict(parameters)
        self.rule = flat_rule(run, run.layout.part(self.parameters))
        self._layers = linear_layers(self.model, self.inputs)
        manifest = run.manifest
        self._linear_rule = manifest["optimizer"]["name"] == "torch.optim.SGD"
        self.clip_norm: float | None = (manifest.get("training") or {}).get("clip_norm")
        """The norm to which ``train`` clipped gradients; if known, the clipping factor is differentiated."""
        gradient = lambda k: self.batch(k).gradient  # noqa: E731
        self._states = OptimizerStates(self.rule, self.weights, gradient, stop, self.memory // 2)
        self._check_separable()
        check_first_steps(run, whole)

    @property
    def num_examples(self) -> int:
        """Number of training examples, n."""
        return self.run.num_examples

    @property
    def num_weights(self) -> int:
        """Number of weights that are differentiated, d."""
        return self.model.size

    @cached_property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of one example's outputs."""
        return tuple(self.model.batch_outputs(self.weights(0), take_examples(self.inputs, slice(0, 1))).shape[1:])

    @cached_property
    def num_outputs(self) -> int:
        """Number of outputs per example, p."""
        return self.model.outputs(self.weights(0), take_examples(self.inputs, slice(0, 1))).shape[1]

    @cached_property
    def groups(self) -> Int[Tensor, "n"]:
        """The group of each training example: those with equal inputs share one."""
        return duplicate_groups(self.run.problem.inputs)

    @cached_property
    def _activation_bytes(self) -> int:
        """Approximate memory of one direction in the forward and backward pass of a batch."""
        held = self.model._probe(self.weights(self.start), self.inputs).held
        return _PASSES * held * len(self.run.batch(self.start)) * self.dtype.itemsize

    @property
    def note(self) -> str:
        """What is held fixed instead of differentiated; empty if nothing is."""
        notes = []
        if self._chosen is not None:
            notes.append(
                f"all weights but those of {len(self.parameters)} parameters are held at their recorded values"
            )
        if self.gate == "frozen":
            notes.append("the gate is held at its recorded values")
        held = self.clip_norm is None or self._chosen is not None
        if held and any(self._factor(k) != 1 for k in range(self.start, self.stop)):
            why = "no clip_norm was recorded" if self.clip_norm is None else "they depend on the whole gradient"
            notes.append(f"recorded gradient factors are held fixed, because {why}")
        return "; ".join(notes)

    @cached_property
    def kinks(self) -> tuple[str, ...]:
        """Names of modules whose slope jumps (ReLU, max pooling), where derivatives poorly predict a whole removal.

        Each unit that changes side during training moves the gradient by a jump that derivatives do not contain; over a
        long run these jumps outweigh the effect of one example. Smooth activations (GELU, SiLU, tanh) have none. Kinks
        in functions that are not modules are not found.
        """
        return tuple(sorted({type(m).__name__ for m in self.model.module.modules() if isinstance(m, _KINKED)}))

    @property
    def last_model(self) -> FlatModel:
        """The model at the last step: what is not differentiated has its values of that moment."""
        return self.model_at(self.stop)

    @cached_property
    def last_weights(self) -> Float[Tensor, "d"]:
        """Weights after the last step, w_T."""
        return self.weights(self.stop)

    def weights(self, k: int) -> Float[Tensor, "d"]:
        """The recorded weights before step k that are differentiated."""
        w = self.run.weights(k)
        return (w if self._chosen is None else w[self._chosen]).to(self.device, self.dtype)

    def batch(self, k: int) -> BatchDerivatives:
        """The derivatives of the batch of step k at the recorded weights."""
        recorded = self.run.recorded(k)
        examples = recorded.batch(k).to(self.device)
        shares = recorded.selection(k).to(self.device, self.dtype) / self.num_examples
        x, y = take_examples(self.inputs, examples), self.targets[examples]
        self.model = self.model_at(k)  # which also knows the derivatives that the one before it could form
        return batch_derivatives(self.model, self._layers, self.weights(k), x, y, shares)

    def step(self, k: int) -> StepJacobian:
        """Step k, linearized."""
        batch = self.batch(k)
        clips = self.clip_norm is not None and self._chosen is None and self._factor(k) != 1
        clip = clip_direction(batch.gradient, self.clip_norm) if clips and self.clip_norm is not None else None
        # SGD's step is linear: its derivative does not depend on the momentum.
        state = self.rule.initial(batch.w) if self._linear_rule else self._states.before(k)
        rule = rule_jacobian(self.rule, k, batch.w, batch.gradient, state, gate=self.gate)
        return StepJacobian(k, self.run.batch(k).to(self.device), batch, rule, clip)

    def steps(self, *, backward: bool = False) -> Iterator[StepJacobian]:
        """The linearized steps of the window, in order or from the last to the first."""
        numbers = range(self.start, self.stop)
        return (self.step(k) for k in (reversed(numbers) if backward else numbers))

    def columns_at_a_time(self) -> int:
        """Number of directions or queries that fit in half of ``memory``."""
        blocks = 2 + len(self.rule.state_names)
        return max(1, self.memory // 2 // (blocks * self.num_weights * self.dtype.itemsize))

    def rows_at_a_time(self, rows: int) -> Iterator[slice]:
        """Blocks of directions whose numbers stay in a CPU's cache, or fill a GPU."""
        per_row = self.num_weights * self.dtype.itemsize
        on_gpu = self.device.type == "cuda"
        if self._layers is None:  # automatic differentiation holds the activations of every direction
            room = 8 * _GPU_BYTES if on_gpu else _BLOCK_BYTES
            allowed = self.memory // 2 // (8 * per_row + self._activation_bytes // _PASSES) if on_gpu else 1
            return slices(rows, max(1, allowed, room // (8 * per_row + self._activation_bytes)))
        return slices(rows, max(_FEWEST_ROWS, (_GPU_BYTES if on_gpu else _CACHE_BYTES) // per_row))

    def _restrict(self, parameters: Parameters) -> None:
        """Differentiate by these parameters alone."""
        module, layout = self.model.module, self.run.layout
        example = take_examples(self.inputs, slice(0, 1))
        self.parameters = choose_parameters(module, layout.names, parameters, example)
        if self.parameters == layout.names:
            return
        for name, p in module.named_parameters():
            p.requires_grad_(name in self.parameters)
        self.model = FlatModel(module, self.model.loss)
        self._chosen = layout.indices(self.parameters)

    def model_at(self, k: int) -> FlatModel:
        """The model whose frozen parameters have their values before step k."""
        if self._chosen is None:
            return self.model
        layout = self.run.layout
        pieces = zip(layout.names, layout.split(self.run.weights(k)), strict=True)
        others = {name: x.to(self.device, self.dtype) for name, x in pieces if name not in self.parameters}
        return self.model.with_constants(others)

    def _factor(self, k: int) -> float:
        factor, scale = self.run.recorded(k).factor(k)
        return factor * scale

    def _check_separable(self) -> None:
        """Refuse a batch loss that is not the mean of the examples' losses."""
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


class OptimizerStates:
    """The optimizer's state before each step of a run, computed again from the recorded weights and gradients.

    The states of every c-th step are kept; those between are computed when needed, a stretch at a time. c is the
    smallest for which both fit in ``memory``, or √steps if none does. Descending or ascending order is fastest.

    Args:
        rule: The run's optimizer.
        weights: The recorded weights before step k.
        gradient: The gradient that step k used.
        stop: The states before the steps 0 … stop - 1 can be asked for.
        memory: Limit in bytes.
    """

    def __init__(
        self,
        rule: FlatRule,
        weights: Callable[[int], Float[Tensor, "d"]],
        gradient: Callable[[int], Float[Tensor, "d"]],
        stop: int,
        memory: int,
    ) -> None:
        self._rule, self._weights, self._gradient, self._stop = rule, weights, gradient, stop
        w = weights(0)
        self.every = _spacing(stop, len(rule.state_names) * w.numel() * w.element_size(), memory)
        self._kept: dict[int, State] = {0: rule.initial(w)}
        self._stretch: dict[int, State] = {}

    def before(self, k: int) -> State:
        """The state before step k."""
        if not self._rule.state_names:
            return ()
        if k in self._kept:
            return self._kept[k]
        if k not in self._stretch:
            self._fill(k)
        return self._stretch[k]

    def _fill(self, k: int) -> None:
        """Compute the states around step k, and keep every c-th one."""
        start = max(at for at in self._kept if at <= k)
        end = min((k // self.every + 1) * self.every, self._stop)
        state = self._kept[start]
        self._stretch = {}
        for j in range(start, end):
            if j % self.every == 0:
                self._kept[j], self._stretch = state, {}
            self._stretch[j] = state
            if j + 1 < end:
                state = self._rule.step(j, self._weights(j), self._gradient(j), state)[1]


def _spacing(steps: int, state_bytes: int, memory: int) -> int:
    """The smallest c with steps/c + c states in memory.

    >>> _spacing(100, 8, 8 * 1000), _spacing(100, 8, 8 * 30), _spacing(100, 8, 8)
    (1, 4, 10)
    """
    for c in range(1, max(2, int(steps**0.5) + 1)):
        if (steps / c + c) * state_bytes <= memory:
            return c
    return max(1, round(steps**0.5))


def _check_run(run: Run, dtype: torch.dtype | None, stop: int | None) -> None:
    run.require_exact()
    if run.augmented:
        raise RunError(
            "the inputs of this run were augmented, so that the influence of an example is not defined: train without "
            "augment"
        )
    if not run.num_steps:
        raise RunError("the run has no steps to differentiate: record at least one")
    if stop is None or stop == run.num_steps:
        as_run(run)
    if run.num_examples < 3:
        raise DataError(f"influence needs at least 3 training examples, got {run.num_examples}")
    for found in (run.layout.dtype, dtype):
        if found is not None and found not in EXACT_DTYPES:
            raise RunError(
                f"derivatives through a run need float32 or float64 weights, got {found}: train in one of them"
            )
