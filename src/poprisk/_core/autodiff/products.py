r"""Products with the Jacobian and the Hessian of a whole batch: many columns in one pass, no Jacobian formed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, vjp, vmap

from poprisk._core.autodiff.blocks import cache_rows, plan_blocks, slices
from poprisk._core.autodiff.losses import ExampleLoss, scalar_loss
from poprisk._core.autodiff.precision import check_outputs_precision, check_precision, exact_kernels
from poprisk._core.autodiff.probing import Probe, probe
from poprisk._core.autodiff.ways import JacobianWay, OfWeights, double_backward, forward_mode, take_first_way
from poprisk.errors import DataError

# One tensor, or the tensors of a forward with several positional arguments; the first axis counts the examples.
Inputs = Tensor | tuple[Tensor, ...]


def take_examples(inputs: Inputs, rows: Tensor | slice | list[int]) -> Inputs:
    """Some examples of a batch.

    >>> take_examples(torch.arange(4), [0, 3])
    tensor([0, 3])
    """
    return tuple(part[rows] for part in inputs) if isinstance(inputs, tuple) else inputs[rows]


def parts_of(inputs: Inputs) -> tuple[Tensor, ...]:
    """The tensors of a batch."""
    return inputs if isinstance(inputs, tuple) else (inputs,)


def count_examples(inputs: Inputs) -> int:
    """n, the length of the first axis.

    >>> count_examples((torch.zeros(3, 2), torch.zeros(3)))
    3
    """
    parts = parts_of(inputs)
    lengths = {part.shape[0] if part.dim() else 0 for part in parts}
    if len(lengths) != 1 or lengths == {0}:
        raise DataError(
            f"inputs must have one and the same number of examples along their first axis, at least 1, got shapes "
            f"{[list(part.shape) for part in parts]}"
        )
    return lengths.pop()


class BatchProducts(ABC):
    r"""Products with :math:`J = D_w F(w, \cdot)` over all examples, for whoever can run a batch forward.

    N = n·p outputs are stacked example by example: entry i·p + j is output j of example i. The examples are run as one
    batch, which is what a module is made for; that they do not see each other is checked on two of them. Blocks of
    examples and columns keep the memory near ``blocks.BLOCK_BYTES``. Nothing carries an autograd graph.
    """

    loss: ExampleLoss
    chunk_size: int | None
    parameters: dict[str, Any]

    def __init__(self) -> None:
        self.jacobian_way: JacobianWay | None = None
        """How J V is formed, once it is known."""
        self.hessian_way: JacobianWay | None = None
        """How Hessian products are formed, once it is known."""
        self.own_hessian_way: JacobianWay | None = None
        """How each example's own Hessian is multiplied by a direction, once it is known."""
        self.input_way: JacobianWay | None = None
        """How derivatives by inputs and weights are formed, once it is known."""
        self._probes: dict[Any, Probe] = {}

    @property
    @abstractmethod
    def size(self) -> int:
        """d, the number of trainable weights."""

    @abstractmethod
    def output_jacobian(self, w: Float[Tensor, "d"], inputs: Inputs) -> Float[Tensor, "b p d"]:
        """The Jacobian itself."""

    @abstractmethod
    def _batch_forward(self, inputs: Inputs) -> OfWeights:
        """F(w, ·) of a whole batch, [b, *out], as a function of w."""

    def batch_outputs(self, w: Float[Tensor, "d"], inputs: Inputs) -> Float[Tensor, "b *out"]:
        """F(w, z) in the module's own shape, all examples as one batch."""
        check_precision(self.parameters, w)
        n = count_examples(inputs)
        held = self._probe(w, inputs).held
        rows, _ = plan_blocks(n, 1, held, self.size, w.element_size(), self.chunk_size)
        return torch.cat([self._run(w, take_examples(inputs, block)) for block in slices(n, rows)])

    def jvp(
        self, w: Float[Tensor, "d"], inputs: Inputs, V: Float[Tensor, "d"] | Float[Tensor, "d k"]
    ) -> Float[Tensor, "N"] | Float[Tensor, "N k"]:
        r""":math:`J V`, the change of all outputs along one direction or along each column.

        Forward mode, about the cost of two forward passes per column. Where PyTorch lacks it for some operation, double
        backward or the Jacobian's rows take its place, found at the first call (``jacobian_way``).

        Args:
            w: Where J is taken.
            inputs: n examples.
            V: One direction in weight space, or k of them as columns.

        Raises:
            DataError: weights of low precision, shapes or dtypes that do not fit, a module that mixes its examples.
        """
        check_precision(self.parameters, w)
        columns = _columns(V, self.size, "V", w.dtype)
        n, found = count_examples(inputs), self._probe(w, inputs)
        out = columns.new_zeros(n, found.outputs, columns.shape[1])
        for rows, width in self._blocks(n, columns, found, cached=w.device.type == "cpu"):
            batch = take_examples(inputs, rows)
            out[rows, :, width] = self._push(w.detach(), batch, columns[:, width])
        out = out.reshape(n * found.outputs, -1)
        return out if V.dim() == 2 else out.squeeze(1)

    def vjp(
        self, w: Float[Tensor, "d"], inputs: Inputs, C: Float[Tensor, "N"] | Float[Tensor, "N k"]
    ) -> Float[Tensor, "d"] | Float[Tensor, "d k"]:
        r""":math:`J^\top C`, one backward pass over the summed outputs for each column, all columns together.

        Args:
            w: Where J is taken.
            inputs: n examples.
            C: One vector in output space, or k of them as columns.

        Raises:
            DataError: weights of low precision, shapes or dtypes that do not fit, a module that mixes its examples.
        """
        check_precision(self.parameters, w)
        n, found = count_examples(inputs), self._probe(w, inputs)
        columns = _columns(C, n * found.outputs, "C", w.dtype)
        cotangents = columns.view(n, found.outputs, -1)
        out = columns.new_zeros(self.size, columns.shape[1])
        for rows, width in self._blocks(n, columns, found):
            with exact_kernels():
                forward = self._flat_forward(take_examples(inputs, rows))
                out[:, width] += _pull(forward, w.detach(), cotangents[rows, :, width])
        return out if C.dim() == 2 else out.squeeze(1)

    def hvp(
        self, w: Float[Tensor, "d"], inputs: Inputs, targets: Tensor, V: Float[Tensor, "d"] | Float[Tensor, "d k"]
    ) -> Float[Tensor, "d"] | Float[Tensor, "d k"]:
        r"""The Hessian by the weights of the mean loss :math:`\Phi = \frac1n\sum_i \ell_i`, times each column.

        Forward over reverse; reverse over reverse where forward mode is missing (``hessian_way``).

        Raises:
            DataError: as in ``jvp``, or targets of another number than inputs.
        """
        check_precision(self.parameters, w)
        columns = _columns(V, self.size, "V", w.dtype)
        n, found = count_examples(inputs), self._probe(w, inputs)
        if targets.dim() == 0 or targets.shape[0] != n:
            raise DataError(f"there must be one target for each of the {n} examples, got shape {list(targets.shape)}")
        out = torch.zeros_like(columns)
        for rows, width in self._blocks(n, columns, found, copies=2):
            gradient = grad(self._total_loss(take_examples(inputs, rows), targets[rows], n))
            out[:, width] += self._hessian_push(gradient, w.detach(), columns[:, width])
        return out if V.dim() == 2 else out.squeeze(1)

    def _push(self, w: Tensor, batch: Inputs, V: Tensor) -> Tensor:
        forward = self._flat_forward(batch)
        ways = {
            JacobianWay.FORWARD: lambda: forward_mode(forward, w, V),
            JacobianWay.DOUBLE_BACKWARD: lambda: double_backward(forward, w, V),
            JacobianWay.ROWS: lambda: self._rows_times(w, batch, V),
        }
        with exact_kernels():
            self.jacobian_way, result = take_first_way(ways, self.jacobian_way)
        return result

    def _rows_times(self, w: Tensor, batch: Inputs, V: Tensor) -> Tensor:
        p = self._probe(w, batch).outputs
        few, _ = plan_blocks(count_examples(batch), 1, p * self.size, 0, w.element_size(), self.chunk_size)
        parts = (self.output_jacobian(w, take_examples(batch, rows)) @ V for rows in slices(count_examples(batch), few))
        return torch.cat(list(parts))

    def _hessian_push(self, gradient: OfWeights, w: Tensor, V: Tensor) -> Tensor:
        ways = {
            JacobianWay.FORWARD: lambda: forward_mode(gradient, w, V),
            # The Hessian is symmetric: its adjoint product is its product.
            JacobianWay.DOUBLE_BACKWARD: lambda: _pull(gradient, w, V),
        }
        with exact_kernels():
            self.hessian_way, result = take_first_way(ways, self.hessian_way)
        return result

    def _total_loss(self, batch: Inputs, targets: Tensor, n: int) -> OfWeights:
        forward, score = self._batch_forward(batch), vmap(scalar_loss(self.loss))
        return lambda w: score(forward(w), targets).sum() / n

    def _flat_forward(self, inputs: Inputs) -> OfWeights:
        forward, n = self._batch_forward(inputs), count_examples(inputs)
        return lambda w: forward(w).reshape(n, -1)

    def _run(self, w: Tensor, inputs: Inputs) -> Tensor:
        forward = self._batch_forward(inputs)
        with exact_kernels():
            # Nothing is mapped: vmap is here because it refuses random operations.
            out = vmap(lambda _: forward(w.detach()))(w.new_zeros(1))[0]
        check_outputs_precision(out, w.dtype)
        return out

    def _probe(self, w: Tensor, inputs: Inputs) -> Probe:
        parts = inputs if isinstance(inputs, tuple) else (inputs,)
        key = tuple((part.shape[1:], part.dtype) for part in parts)
        if key not in self._probes:
            n = count_examples(inputs)
            found = probe(lambda rows: self._run(w, take_examples(inputs, rows)), n)
            if n == 1:
                return found
            self._probes[key] = found
        return self._probes[key]

    def _blocks(
        self, n: int, columns: Tensor, found: Probe, copies: int = 1, cached: bool = False
    ) -> Iterator[tuple[slice, slice]]:
        k = columns.shape[1]
        if k == 0:
            return
        sizes = (copies * found.held, 2 * copies * self.size, columns.element_size())
        rows, width = plan_blocks(n, k, *sizes, self.chunk_size)
        if cached and self.chunk_size is None:
            rows = min(rows, cache_rows(width, *sizes))
        yield from ((r, c) for r in slices(n, rows) for c in slices(k, width))


def _pull(function: Callable[[Tensor], Tensor], w: Tensor, cotangents: Tensor) -> Tensor:
    """The adjoint of the function's derivative, for cotangents along the last axis."""
    pullback = vjp(function, w)[1]
    return vmap(lambda c: pullback(c)[0], in_dims=-1, out_dims=-1)(cotangents)


def _columns(matrix: Tensor, length: int, name: str, dtype: torch.dtype) -> Tensor:
    if matrix.dim() not in (1, 2) or matrix.shape[0] != length or matrix.dtype != dtype:
        raise DataError(
            f"{name} must be [{length}] or [{length}, k] of {dtype}, got shape {list(matrix.shape)} of {matrix.dtype}"
        )
    return matrix.detach().unsqueeze(1) if matrix.dim() == 1 else matrix.detach()
