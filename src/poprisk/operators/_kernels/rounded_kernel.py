r"""Kernels whose products are made in lower precision, with a bound on their error and a sample of it."""

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, take_examples
from poprisk.operators._kernels.method import check_request
from poprisk.operators._kernels.precision import Precision
from poprisk.operators._kernels.rounded_tiles import prepare_rounded
from poprisk.operators._kernels.tangent import train_kernel
from poprisk.operators._kernels.validation import Diagonal


@dataclass(frozen=True, eq=False)
class RoundedKernel:
    """A kernel and how far it may be off."""

    kernel: Float[Tensor, "rows columns"]
    precision: Precision
    bound: float
    r"""On :math:`|\Delta K_{ij}| / \sqrt{K_{ii} K_{jj}}`, from the rounding of products alone."""
    measured: float
    """The largest found against float64 arithmetic from end to end, on a sample."""
    examples: int
    """Of the sample, on each side."""


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
    r"""A kernel whose products are made in lower precision, at the speed of the tensor cores.

    Args:
        model: The model and its loss; the loss is not used.
        w: Where the Jacobians are taken.
        inputs: The examples of the rows.
        other_inputs: The examples of the columns; without them the kernel is symmetric.
        precision: Of the products; see :class:`~poprisk.operators._kernels.Precision`. Jacobians are computed in w's own.
        preconditioner: The diagonal of M: a number, or a vector like w.
        memory: Limit in bytes for work and result together; half of what is free if not given.
        examples: How many of each side are computed again in float64, to see the error.
        seed: Of that sample.

    Returns:
        The kernel [n p, n' p] in float32 with a bound on its error and the error of the sample.

    Raises:
        DataError: weights, inputs or preconditioner that do not fit, or weights of low precision.
        HyperparameterError: an unknown precision, or a memory limit that is too small.

    >>> model = FlatModel(torch.nn.Linear(2, 1), "squared")
    >>> found = rounded_kernel(model, model.weights, torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    >>> found.kernel.round(decimals=1)  # xᵀx' + 1
    tensor([[6., 3.],
            [3., 2.]])
    >>> found.measured <= found.bound
    True
    """
    job = prepare_rounded(model, w, inputs, other_inputs, precision, preconditioner, memory, held_result=True)
    K = torch.empty(job.rows, job.columns, device=w.device)
    for tile in job.tiles():
        K[tile.rows, tile.columns] = tile.block
        if other_inputs is None:
            K[tile.columns, tile.rows] = tile.block.T
    options = {"preconditioner": preconditioner, "examples": examples, "seed": seed}
    measured = measured_error(model, w, K, inputs, other_inputs, **options)
    return RoundedKernel(K, job.precision, job.bound, measured, min(examples, len(K)))


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

    The forward and backward passes are in float64 too, so that the error of the rows is seen with that of products.

    Args:
        model: The model.
        w: Where the Jacobians were taken.
        K: The kernel, of these inputs.
        inputs: The examples of its rows.
        other_inputs: Those of its columns, where they are others.
        preconditioner: As it was.
        examples: Of each side, drawn at random.
        seed: Of the draw.
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
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(n, generator=generator)[:examples]
    others = drawn if m is None else torch.randperm(m, generator=generator)[:examples]
    picked = [_in_double(take_examples(inputs, drawn.to(w.device)))]
    if other_inputs is not None:
        picked.append(_in_double(take_examples(other_inputs, others.to(w.device))))
    M = preconditioner.double() if isinstance(preconditioner, Tensor) else preconditioner
    exact = FlatModel(copy.deepcopy(model.module).double(), model.loss)
    K = train_kernel(exact, w.double(), _joined_inputs(picked), preconditioner=M)
    p = len(K) // (len(drawn) + (len(others) if other_inputs is not None else 0))
    side = len(drawn) * p if other_inputs is not None else 0  # where the columns begin
    roots = K.diagonal().clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    rows, columns = _outputs_of(drawn, p), _outputs_of(others, p)
    scales = roots[: len(rows), None] * roots[side:]
    return ExactSample(rows, columns, K[: len(rows), side:], scales)


def _outputs_of(examples: Tensor, p: int) -> Tensor:
    return (examples[:, None] * p + torch.arange(p)).flatten()


def _in_double(inputs: Inputs) -> tuple[Tensor, ...]:
    parts = inputs if isinstance(inputs, tuple) else (inputs,)
    return tuple(part.double() if part.is_floating_point() else part for part in parts)


def _joined_inputs(picked: list[tuple[Tensor, ...]]) -> Inputs:
    joined = [torch.cat(parts) for parts in zip(*picked, strict=True)]
    return tuple(joined) if len(joined) > 1 else joined[0]
