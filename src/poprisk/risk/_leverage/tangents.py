r"""Tangent kernels of a run at some of its steps, in the metric of its optimizer.

.. math:: K = J M J^\top

with the Jacobian J of the outputs of m examples, and M how far the optimizer moves each weight for a unit of gradient.
The module is in evaluation mode; batch statistics follow the weights (:mod:`.batch_statistics`).
Where the Jacobian is too large to hold, its columns are added up in a fixed number of groups with random signs.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import jacrev, vmap

from poprisk._core.autodiff import call_module, loss_gradients, slices, take_examples
from poprisk._core.seeds import generator_for
from poprisk.risk._leverage.batch_statistics import Normalized, normalized_layers, without_statistics
from poprisk.risk._leverage.pace import Pace, pace_at
from poprisk.risk._moments import Network
from poprisk.runs import Run

_HELD = 2**27
"""Number of entries of the Jacobian up to which it is held as it is."""
_CHUNK = 2**25
_GROUPS = 2**15
"""Number of groups of columns otherwise: kernel entries are off by 1 / sqrt of it, relative to the diagonal."""


@dataclass(frozen=True)
class Tangent:
    """The network at one step, on m of the training examples with p outputs each."""

    step: int
    outputs: Float[Tensor, "m p"]
    kernel: Float[Tensor, "N N"]
    """Change of all N = m p outputs in one step, for a unit gradient by each output."""
    decay: float
    inertia: float
    losses_at: Float[Tensor, "n *out"]
    """Outputs of all training examples, in their own shape."""


class Tangents:
    """Reads the tangent kernels of a run.

    Args:
        run: The recorded run.
        examples: The m examples.
        seed: Seed for the random signs.
    """

    def __init__(self, run: Run, examples: Int[Tensor, "m"], seed: int = 0) -> None:
        self.run, self.examples = run, examples
        self.network = Network(run, 1024)
        self.module, self.dtype = self.network.module, self.network.parameters[0].dtype
        inputs, targets = run.problem.batch(examples, dtype=self.dtype)
        self.inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        self.targets = targets.to(self.dtype) if targets.is_floating_point() else targets
        self._places, start = {}, 0
        for name, size in zip(run.layout.names, run.layout.sizes, strict=True):
            self._places[name] = slice(start, start + size)
            start += size
        generator = generator_for(seed, "sketch")
        self._group = torch.randint(_GROUPS, (run.num_weights,), generator=generator)
        self._sign = torch.randint(2, (run.num_weights,), generator=generator) * 2.0 - 1
        self._mapped = True
        self._normalized: list[Normalized] = []

    @property
    def units(self) -> int:
        """Number of rows that each kernel takes, of one output of each example, for progress."""
        return len(self.examples) * (1 if self.run.manifest["optimizer"]["name"] == "torch.optim.SGD" else 2)

    def at(self, k: int, advance: Callable[[int], None] = lambda _: None) -> Tangent:
        """The outputs and the kernel at the weights before step k; ``advance`` is told of the ``units`` done."""
        self.network.go_to(k)
        self._normalized = normalized_layers(self.module, self.inputs) if self.network.moving else []
        outputs = self.network.outputs()
        flat = outputs[self.examples].reshape(len(self.examples), -1)
        pace = pace_at(self.run, k)
        move = pace.move if pace.lr is None else self._bounded(pace, flat, len(self.run.batch(max(0, k - 1))), advance)
        scale, d, rows = move.sqrt().to(self.dtype), self.run.num_weights, []
        for part in slices(len(self.examples), max(1, _CHUNK // (d * flat.shape[1]))):
            found = self._rows(part).cpu() * scale
            rows.append(found if len(self.examples) * flat.shape[1] * d <= _HELD else self._grouped(found))
            advance(len(self.examples[part]))
        jacobian = torch.cat(rows)
        return Tangent(k, flat, jacobian @ jacobian.T, pace.decay, pace.inertia, outputs)

    def _bounded(self, pace: Pace, outputs: Tensor, batch: int, advance: Callable[[int], None]) -> Float[Tensor, "d"]:
        """An adaptive optimizer's pace, with the squared gradients at these weights where they are larger.

        The running mean of squared gradients knows nothing of a weight that had no gradient yet.
        """
        m, p = outputs.shape
        shape = (m, *self.network_shape(p))
        residuals = loss_gradients(self.run.problem.loss, outputs.reshape(shape), self.targets.cpu()).reshape(m, 1, p)
        total, squares = torch.zeros(self.run.num_weights), torch.zeros(self.run.num_weights)
        for part in slices(m, max(1, _CHUNK // (self.run.num_weights * p))):
            each = (residuals[part] @ self._rows(part).cpu().unflatten(0, (-1, p))).squeeze(1)
            total, squares = total + each.sum(0), squares + each.square().sum(0)
            advance(len(each))
        mean = total / m
        noise = (1 - (batch - 1) / max(self.run.num_examples - 1, 1)) / batch  # of a mean over a batch of some of them
        square = mean.square() + (squares / m - mean.square()).clamp_min(0) * max(noise, 0.0)
        assert pace.lr is not None
        return torch.minimum(pace.move, pace.lr / square.sqrt().clamp_min(torch.finfo(torch.float32).tiny))

    def network_shape(self, p: int) -> tuple[int, ...]:
        """Shape of one example's outputs."""
        targets = self.targets
        same = targets.is_floating_point() and targets[0].numel() == p
        return tuple(targets.shape[1:]) if same else (p,)

    def _rows(self, part: slice) -> Float[Tensor, "rows d"]:
        """The Jacobian of some of the examples."""
        x = take_examples(self.inputs, part)
        assert isinstance(x, tuple)
        rows = self._rows_at_once(x) if self._mapped else None
        rows = self._rows_in_turn(x) if rows is None else rows
        return without_statistics(rows, self._places, self._normalized)

    def _rows_at_once(self, x: tuple[Tensor, ...]) -> Tensor | None:
        parameters = {name: p.detach() for name, p in self.module.named_parameters() if p.requires_grad}
        others = dict(self.module.named_buffers())

        def outputs(parameters: dict[str, Tensor], *x: Tensor) -> Tensor:
            batch = tuple(part.unsqueeze(0) for part in x)
            return call_module(self.module, (parameters, others), batch).reshape(-1)

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # an operation that vmap does one example at a time
                found = vmap(jacrev(outputs), in_dims=(None, *[0] * len(x)))(parameters, *x)
        except (RuntimeError, UserWarning, ValueError):
            self._mapped = False
            return None
        return torch.cat([found[name].flatten(2) for name in self.run.layout.names], 2).flatten(0, 1)

    def _rows_in_turn(self, x: tuple[Tensor, ...]) -> Tensor:
        rows, parameters = [], self.network.parameters
        for i in range(len(x[0])):
            with torch.enable_grad(), _without_cudnn():
                outputs = self.module(*(part[i : i + 1] for part in x)).reshape(-1)
                for u in outputs:
                    found = torch.autograd.grad(u, parameters, retain_graph=True, materialize_grads=True)
                    rows.append(torch.cat([g.reshape(-1) for g in found]))
        return torch.stack(rows)

    def _grouped(self, rows: Tensor) -> Tensor:
        out = rows.new_zeros(len(rows), _GROUPS)
        return out.index_add_(1, self._group, rows * self._sign)


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Recurrent layers in evaluation mode have no backward pass in cuDNN."""
    settings: Any = torch.backends.cudnn
    before = settings.enabled
    settings.enabled = False
    try:
        yield
    finally:
        settings.enabled = before
