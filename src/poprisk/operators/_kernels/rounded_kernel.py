r"""Kernels whose products are computed in lower precision, with a bound on their error and a sample of it."""

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, parts_of, take_examples
from poprisk._core.seeds import generator_for
from poprisk.operators._kernels.method import check_request
from poprisk.operators._kernels.precision import Precision
from poprisk.operators._kernels.tangent import train_kernel
from poprisk.operators._kernels.tiles import tiled_kernel
from poprisk.operators._kernels.validation import Diagonal


@dataclass(frozen=True, eq=False)
class RoundedKernel:
    """A kernel in lower precision, and its error."""

    kernel: Float[Tensor, "rows columns"]
    precision: Precision
    bound: float
    r"""Bound on :math:`|\Delta K_{ij}| / \sqrt{K_{ii} K_{jj}}`, from the rounding of products alone."""
    measured: float
    """The largest such error found on a sample, against float64 arithmetic from end to end."""
    examples: int
    """Number of examples of the sample, on each side."""


def rounded_kernel(
    model: FlatModel,
    w: Float[Tensor, "d"],
    inputs: Inputs,
    other_inputs: Inputs | None = None,
    *,
    precision: Precision | str = Precision.FLOAT16,
    preconditioner: Diagonal | None = None,
    memory: int | None = None,
    examples: int = 16,
    seed: int = 0,
) -> RoundedKernel:
    r"""A kernel whose products are computed in lower precision, at the speed of tensor cores.

    Args:
        model: The model and its loss; the loss is not used.
        w: Weights at which the Jacobians are taken.
        inputs: The examples of the rows.
        other_inputs: The examples of the columns; without them the kernel is symmetric.
        precision: Precision of the products, see :class:`~poprisk.operators.Precision`. Jacobians are computed in w's.
        preconditioner: The diagonal of M: a number, or a vector like w.
        memory: Memory limit in bytes for work and result together; default: half of what is free.
        examples: Number of examples of each side that are computed again in float64, to measure the error.
        seed: Seed for that sample.

    Returns:
        The kernel [n p, n' p] in float32 with a bound on its error and the error measured on the sample.

    Raises:
        DataError: weights, inputs or preconditioner do not fit the model, or weights are of low precision.
        HyperparameterError: the precision is unknown, or the memory limit too small.

    >>> model = FlatModel(torch.nn.Linear(2, 1), "squared")
    >>> found = rounded_kernel(model, model.weights, torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    >>> found.kernel.round(decimals=1)  # xᵀx' + 1
    tensor([[6., 3.],
            [3., 2.]])
    >>> found.measured <= found.bound
    True
    """
    kind = {"preconditioner": preconditioner, "precision": precision, "memory": memory}
    tiled = tiled_kernel(model, w, inputs, other_inputs, **kind, holds_result=True)
    K = tiled.assembled()
    options = {"preconditioner": preconditioner, "examples": examples, "seed": seed}
    measured = measured_error(model, w, K, inputs, other_inputs, **options)
    assert tiled.maker.precision is not None
    assert tiled.maker.bound is not None
    return RoundedKernel(K, tiled.maker.precision, tiled.maker.bound, measured, min(examples, len(K)))


def measured_error(
    model: FlatModel,
    w: Float[Tensor, "d"],
    K: Float[Tensor, "rows columns"],
    inputs: Inputs,
    other_inputs: Inputs | None = None,
    *,
    preconditioner: Diagonal | None = None,
    examples: int = 16,
    seed: int = 0,
) -> float:
    r"""The largest :math:`|\Delta K_{ij}| / \sqrt{K_{ii} K_{jj}}` of a kernel on a sample, against float64.

    The forward and backward passes are in float64 too, so that the error of the rows is included.

    Arguments as in :func:`rounded_kernel`.
    """
    options = {"preconditioner": preconditioner, "examples": examples, "seed": seed}
    return exact_sample(model, w, inputs, other_inputs, **options).error(K)


@dataclass(frozen=True, eq=False)
class ExactSample:
    """Some entries of a kernel in float64."""

    rows: Int[Tensor, "a"]
    columns: Int[Tensor, "b"]
    entries: Float[Tensor, "a b"]
    scales: Float[Tensor, "a b"]
    r""":math:`\sqrt{K_{ii} K_{jj}}`."""

    def error(self, K: Float[Tensor, "rows columns"]) -> float:
        """The largest difference of a kernel from these entries, in units of the scales."""
        found = K[self.rows.to(K.device)][:, self.columns.to(K.device)].to(self.entries)
        return float(((found - self.entries).abs() / self.scales).max())


def exact_sample(
    model: FlatModel,
    w: Float[Tensor, "d"],
    inputs: Inputs,
    other_inputs: Inputs | None = None,
    *,
    preconditioner: Diagonal | None = None,
    examples: int = 16,
    seed: int = 0,
) -> ExactSample:
    """All pairs of outputs of some examples of each side; arguments as in :func:`measured_error`."""
    n, m = check_request(model, w, inputs, other_inputs)
    generator = generator_for(seed, "examples")
    drawn = torch.randperm(n, generator=generator)[:examples]
    others = drawn if m is None else torch.randperm(m, generator=generator)[:examples]
    picked = [_in_double(take_examples(inputs, drawn.to(w.device)))]
    if other_inputs is not None:
        picked.append(_in_double(take_examples(other_inputs, others.to(w.device))))
    M = preconditioner.double() if isinstance(preconditioner, Tensor) else preconditioner
    exact = FlatModel(copy.deepcopy(model.module).double(), model.loss)
    joined = [torch.cat(parts) for parts in zip(*picked, strict=True)]
    K = train_kernel(exact, w.double(), tuple(joined) if len(joined) > 1 else joined[0], preconditioner=M)
    p = len(K) // (len(drawn) + (len(others) if other_inputs is not None else 0))
    side = len(drawn) * p if other_inputs is not None else 0  # where the columns begin
    roots = K.diagonal().clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    rows, columns = _outputs_of(drawn, p), _outputs_of(others, p)
    scales = roots[: len(rows), None] * roots[side:]
    return ExactSample(rows, columns, K[: len(rows), side:], scales)


def _outputs_of(examples: Tensor, p: int) -> Tensor:
    return (examples[:, None] * p + torch.arange(p)).flatten()


def _in_double(inputs: Inputs) -> tuple[Tensor, ...]:
    return tuple(part.double() if part.is_floating_point() else part for part in parts_of(inputs))
