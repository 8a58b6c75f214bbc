r"""The variance of a batch gradient, from its examples or from its micro-batches, for an optimizer to gate with.

Both classes serve the ``VarianceSource`` protocol. Variances are kept in float32, or float64 for float64 weights.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from poprisk._core.autodiff import ExampleLoss, FlatModel, Inputs, take_examples
from poprisk.errors import DataError, GradientError, HyperparameterError
from poprisk.optim._estimators.samples import (
    HookedSource,
    Samples,
    Tally,
    add_to_spread,
    check_cleared,
    gradient_norm,
    gradient_ratio,
    rescale,
    work_dtype,
)
from poprisk.optim._shards import is_sharded


class PerExampleVariance:
    r"""The exact variance of the batch-mean gradient, from the gradient of every example.

    .. math:: (\Sigma_B)_{kk}/(b-1), \qquad \Sigma_B = b^{-1} \sum_a (g_a - \bar g_B)(g_a - \bar g_B)^\top

    Chunks of examples are merged by the update of Chan, Golub and LeVeque (1979) on means and sums of squared
    deviations: memory is ``chunk_size`` gradients, and no large squares are subtracted. Each ``observe`` replaces the
    previous one, so pass a large batch in one call. If ``.grad`` is rescaled before the step (clipping, a summed loss),
    the variance is rescaled with it, parameter by parameter.

    Args:
        module: The model in training; its current weights are used. It must not use batch statistics or dropout.
        loss: ``"squared"``, ``"cross_entropy"``, or a function of one example's outputs and target.
        chunk_size: Number of examples whose gradients are held at a time.

    Raises:
        DataError: from ``observe``: fewer than two examples, or a module that mixes examples.

    >>> module = nn.Linear(1, 1, bias=False)
    >>> source = PerExampleVariance(module, lambda u, y: (u - y).sum())
    >>> loss = source.observe(torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1), set_grad=True)
    >>> module.weight.grad, source.variances([module.weight])  # mean 2, and ((1 - 2)² + (3 - 2)²) / (2 · 1)
    (tensor([[2.]]), [tensor([[1.]])])
    """

    def __init__(self, module: nn.Module, loss: str | ExampleLoss, *, chunk_size: int = 32) -> None:
        if chunk_size < 1:
            raise HyperparameterError(f"chunk_size must be a positive whole number, got {chunk_size}: try 32")
        self._model = FlatModel(module, loss, chunk_size=chunk_size)
        self._chunk_size = chunk_size
        self._observed: dict[Tensor, tuple[Tensor, Tensor]] = {}

    def observe(self, inputs: Inputs, targets: Tensor, *, set_grad: bool = False) -> Float[Tensor, ""]:
        """Measures one batch at the module's current weights.

        Args:
            inputs: The batch, or a tuple of tensors for a module with several arguments.
            targets: One target per example.
            set_grad: Also write the mean gradient to ``.grad``, replacing its contents; then no backward is needed.

        Returns:
            The mean loss of the batch.
        """
        b = targets.shape[0] if targets.dim() else 0
        if b < 2:
            raise DataError(f"a variance needs at least 2 examples, got {b}: pass a larger batch")
        loss, moments = self._accumulate(inputs, targets)
        means = self._model.unflatten(moments.total / b)
        variances = moments.spread.split([p.numel() for p in self._model.parameters.values()])
        self._observed = {}
        for (name, p), variance in zip(self._model.parameters.items(), variances, strict=True):
            self._observed[p] = ((variance / (b * (b - 1))).view(p.shape), gradient_norm(means[name]))
            if set_grad:
                p.grad = means[name].clone()
        return loss / b

    def variances(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The variance of each parameter's batch-mean gradient, once; None for what was not observed."""
        observed, self._observed = self._observed, {}
        found = [observed.get(p) for p in parameters]
        return [
            None if each is None else rescale(each[0], gradient_ratio(p.grad, each[1]))
            for p, each in zip(parameters, found, strict=True)
        ]

    def _accumulate(self, inputs: Inputs, targets: Tensor) -> tuple[Tensor, Samples]:
        w = self._model.weights
        moments, loss = None, torch.zeros((), device=w.device)
        for start in range(0, targets.shape[0], self._chunk_size):
            rows = slice(start, start + self._chunk_size)
            losses, G = self._model.losses_and_gradients(w, take_examples(inputs, rows), targets[rows])
            moments = Samples.of(G) if moments is None else moments.merged(Samples.of(G))
            loss = loss + losses.detach().sum()
        assert moments is not None
        return loss, moments


class MicrobatchVariance(HookedSource):
    r"""The variance of an accumulated gradient, from the micro-batches it was accumulated over.

    Every ``backward`` call between two steps is one micro-batch with gradient :math:`x_j`, and ``.grad`` ends as their
    sum. For k independent micro-batches of one size the variance of that sum is estimated without bias by

    .. math:: \frac{k \sum_j x_j^2 - \big(\sum_j x_j\big)^2}{k-1} = \frac{k}{k-1} \sum_j (x_j - \bar x)^2

    It is the variance of whatever ``.grad`` holds: for losses divided by k, :math:`x_j` is a k-th of a micro-batch
    gradient and the sum is the batch mean; for undivided losses it is k times that, and the variance k² times. The
    gate, which compares squares of ``.grad`` with it, is the same in both cases. With micro-batches of one example
    and losses divided by k it equals :math:`(\Sigma_B)_{kk}/(b-1)`.

    The right-hand form is what is computed, with ``.grad`` as the running sum: no large squares are subtracted, and
    the only memory is one buffer per parameter, made at the second micro-batch and given back after the step. A
    uniform rescaling of ``.grad`` afterwards (clipping, ``GradScaler.unscale_``) rescales the variance by the square
    of the factor, which is found by comparing the norms of each gradient before and after. A micro-batch in which a
    parameter had no part counts as a zero gradient.

    With one micro-batch there is no variance: ``variances`` gives None and the optimizer uses the stream. If the
    gradients are cleared without a step, the next ``backward`` starts a new batch. Use one source per optimizer, in
    one process (an all-reduce is not a micro-batch: see :class:`poprisk.RankVariance` for several), and zero
    the gradients between steps, as usual. Frozen and complex parameters are left to the stream.

    Args:
        parameters: The optimizer's parameters. Hooks stay on them until ``close()``, or the end of a ``with`` block.

    Raises:
        DataError: there is no parameter to watch, or one is spread over processes.
        GradientError: a gradient is sparse (from ``backward``), or was not zeroed before the first micro-batch (from
            ``variances``).

    >>> w = torch.zeros(1, requires_grad=True)
    >>> with MicrobatchVariance([w]) as source:
    ...     for x in (1.0, 3.0):
    ...         (w * x / 2).sum().backward()
    ...     print(w.grad, source.variances([w]))  # the mean of 1 and 3, and its variance
    tensor([2.]) [tensor([1.])]
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        unique = dict.fromkeys(parameters)
        self._parameters = [p for p in unique if p.requires_grad and not p.is_complex()]
        if not self._parameters:
            raise DataError(
                f"MicrobatchVariance needs a real parameter that requires a gradient, got {len(unique)} without"
            )
        if any(is_sharded(p) for p in self._parameters):
            raise DataError(
                "MicrobatchVariance works in one process, got sharded parameters: use poprisk.RankVariance, "
                "which takes every rank's micro-batches as samples"
            )
        self._tallies: dict[Tensor, _Tally] = {}
        self._arriving: dict[Tensor, Tensor] = {}
        # A strong reference from the hooks would keep the source and its buffers alive.
        arrive, accumulate = weakref.WeakMethod(self._arrive), weakref.WeakMethod(self._accumulated)
        self._handles = []
        for p in self._parameters:
            self._handles.append(p.register_hook(partial(_call, arrive, weakref.ref(p))))
            self._handles.append(p.register_post_accumulate_grad_hook(partial(_call, accumulate)))

    def variances(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The variance of each accumulated gradient, once; None for all if there were fewer than two micro-batches."""
        tallies = {p: tally for p, tally in self._tallies.items() if tally.samples > 0 and p.grad is not None}
        self.reset()
        k = max((tally.samples for tally in tallies.values()), default=0)
        if k < 2:
            return [None] * len(parameters)
        check_cleared(tally.leftover for tally in tallies.values())
        return [None if p not in tallies else _sum_variance(p, tallies[p], k) for p in parameters]

    def reset(self) -> None:
        """Discards the micro-batches seen so far."""
        self._tallies, self._arriving = {}, {}

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.reset()

    def _arrive(self, here: "weakref.ref[Tensor]", x: Tensor) -> None:
        """Before accumulation: notices cleared gradients, and keeps a reference to x from the second micro-batch on.

        It is used only once it has been accumulated, so that ``torch.autograd.grad`` leaves no trace.
        """
        if x.layout != torch.strided:
            raise GradientError(
                f"MicrobatchVariance needs dense gradients, got layout {x.layout}: create the embedding with "
                "sparse=False, or leave its parameters out"
            )
        p = here()
        if p is None:
            return
        tally = self._tallies.get(p)
        if tally is not None and tally.touched(p.grad):
            if p.grad is None or not p.grad.any():
                self.reset()  # gradients are cleared together, so what is known of the others is stale too
            else:
                tally.follow(p)
        tally = self._tallies.get(p)
        if tally is not None and tally.samples > 0:
            self._arriving[p] = x.detach()
        else:
            self._tallies[p] = _Tally(leftover=None if p.grad is None else gradient_norm(p.grad))

    def _accumulated(self, p: Tensor) -> None:
        if p.grad is None or p.grad.layout != torch.strided:
            return
        tally = self._tallies.setdefault(p, _Tally())
        x = self._arriving.pop(p, None)
        if tally.samples > 0 and x is not None:
            tally.spread = add_to_spread(tally.spread, p.grad.detach(), x, tally.samples)
        tally.samples += 1
        tally.norm = gradient_norm(p.grad)
        tally.mark = _mark(p.grad)


@dataclass
class _Tally(Tally):
    """That of a parameter's micro-batches, which notices what is done to ``.grad`` between them."""

    mark: tuple[int, int] | None = None

    def touched(self, grad: Tensor | None) -> bool:
        """Whether someone replaced or wrote the gradient since the last micro-batch; no device is waited for."""
        return self.samples > 0 and (grad is None or _mark(grad) != self.mark)

    def follow(self, p: Tensor) -> None:
        """Takes over a rescaling between two micro-batches."""
        assert p.grad is not None
        assert self.norm is not None
        if self.spread is not None:
            self.spread = rescale(self.spread, gradient_ratio(p.grad, self.norm))
        self.norm, self.mark = gradient_norm(p.grad), _mark(p.grad)


@torch.no_grad()
def _call(method: "weakref.WeakMethod[Any]", *arguments: Any) -> None:
    """Calls a method of a source, if the source is still there."""
    bound = method()
    if bound is not None:
        bound(*arguments)


@torch.no_grad()
def _sum_variance(p: Tensor, tally: _Tally, k: int) -> Tensor:
    assert p.grad is not None
    assert tally.norm is not None
    n, total = tally.samples, p.grad.to(work_dtype(p.grad.dtype))
    sum_sq = torch.zeros_like(total) if tally.spread is None else tally.spread
    sum_sq = rescale(sum_sq, gradient_ratio(p.grad, tally.norm))
    if n < k:  # k - n micro-batches did not touch this parameter: as many zeros beside n gradients of mean total / n
        sum_sq = sum_sq + total.square() * ((k - n) / (n * k))
    return sum_sq * (k / (k - 1))


def _mark(grad: Tensor) -> tuple[int, int]:
    """Changes when the gradient is replaced or written in place."""
    return grad.data_ptr(), grad._version
