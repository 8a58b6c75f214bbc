r"""The gradient of one step: computed from a problem's examples, and watched until the optimizer uses it.

Between ``backward()`` and ``step()`` the gradients may stay as they are or be multiplied by one common factor, as
clipping by norm and unscaling do; anything else (clipping by value, noise, a factor per layer) is refused. The factor
belongs to the selection S of :class:`~poprisk.runs.AffineStep`. It is observed, so it does not matter which function
clips: a hook on each parameter's gradient notes its version counter and some of its entries. Just before the
optimizer's update, gradients with an unchanged version have a factor of exactly 1, at no cost; for the others the
factor is the number c, in the gradients' own precision, for which fl(c · noted) equals the current gradient bit by bit.
A dense recording compares every entry of every gradient. A sparse recording, which must be fast, compares a few entries
of a few parameters; other changes are found when the run is replayed.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Generator, Tensor, nn

from poprisk._core.autodiff import check_independence
from poprisk.errors import DataError, RunError
from poprisk.runs._problem import Problem

PROBED_PARAMETERS, PROBED_ENTRIES = 2, 32
Parts = Sequence[tuple[Tensor, Tensor | None]]
"""Micro-batches: indices, and weights of their examples' losses if these are not 1 / (their number)."""


def randomness_of(module: nn.Module) -> str | None:
    """Why the module does not map each example by a fixed function of the weights; None if it does."""
    try:
        check_independence(module)
    except DataError as error:
        return str(error)
    return None


def add_gradients(
    problem: Problem, module: nn.Module, parts: Parts, *, generator: Generator | None, loss_scale: float = 1.0
) -> Tensor:
    r"""Backward of :math:`\sum_{parts} \frac1A \mathrm{mean}(\ell)` (or the weighted sum), part by part.

    Returns:
        The loss, not scaled, on the module's device.
    """
    first = next(module.parameters())
    total = torch.zeros((), device=first.device, dtype=first.dtype)
    for indices, weights in parts:
        inputs, targets = problem.batch(indices, generator=generator, dtype=first.dtype)
        outputs = module(*inputs) if isinstance(inputs, tuple) else module(inputs)
        if weights is None:
            loss = problem.batch_loss(outputs, targets)
            loss = loss / len(parts) if len(parts) > 1 else loss
        else:
            loss = problem.batch_loss(outputs, targets, weights.to(first))
        (loss if loss_scale == 1.0 else loss * loss_scale).backward()
        total += loss.detach()
    return total


def common_factor(before: Tensor, after: Tensor) -> float:
    r"""The c with :math:`\mathrm{after} = c \cdot \mathrm{before}`, chosen so that the product has the same bits.

    Raises:
        RunError: there is no such number.

    >>> g = torch.tensor([3.0, -4.0])
    >>> common_factor(g, g * 0.2) == torch.tensor(0.2).item()
    True
    """
    if torch.equal(before, after):
        return 1.0
    largest = before.abs().argmax()
    center = after[largest] / before[largest]
    for candidate in _neighbours(center):  # nearly always the first
        if torch.equal(before * candidate, after):
            return float(candidate)
    if not bool(center.isfinite()) or not bool(after.isfinite().all()):
        raise _not_one_factor()
    # Two factors in a row (unscaling, then clipping) round twice: no single factor gives the same bits.
    slack = 8 * torch.finfo(before.dtype).eps * after.abs() + torch.finfo(before.dtype).tiny
    if bool(((before * center - after).abs() <= slack).all()):
        return float(center)
    raise _not_one_factor()


class GradientWatch:
    """Hooks that watch the gradients of some parameters.

    Args:
        parameters: The trained parameters.
        every_entry: Whether to note all entries of all gradients (slower, for dense recording) or a few.
    """

    def __init__(self, parameters: Sequence[Tensor], *, every_entry: bool = False) -> None:
        chosen = list(parameters) if every_entry else _spread(parameters)
        self._probes = [_Probe(p, p.numel() if every_entry else PROBED_ENTRIES) for p in chosen]
        self._handles = [probe.parameter.register_post_accumulate_grad_hook(probe.note) for probe in self._probes]

    def factor(self) -> float:
        """Factor by which the gradients were multiplied since the last ``backward()``; 1 if there was none.

        Raises:
            RunError: they were changed in another way.
        """
        seen = [probe for probe in self._probes if probe.noted is not None]
        if not seen:
            return 1.0
        if len(seen) < len(self._probes):
            raise RunError("some gradients were set by hand, others by backward(): compute all of them with backward()")
        changed = [probe.has_changed() for probe in seen]
        if not any(changed):
            return 1.0
        before = torch.cat([probe.noted for probe in seen if probe.noted is not None])
        factor = common_factor(before, torch.cat([probe.look() for probe in seen]))
        if factor != 1.0 and not all(changed):
            raise _not_one_factor()
        return factor

    def forget(self) -> None:
        """Forget the noted gradients; call it after each step."""
        for probe in self._probes:
            probe.grad = probe.noted = None

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self.forget()


class _Probe:
    """Entries of one parameter's gradient as the last ``backward()`` left them."""

    def __init__(self, parameter: Tensor, entries: int) -> None:
        self.parameter, self.grad, self.noted, self.version = parameter, None, None, 0
        self.grad: Tensor | None
        self.noted: Tensor | None
        self._stride = max(1, parameter.numel() // max(1, entries))
        self._count = -(-parameter.numel() // self._stride)

    def note(self, parameter: Tensor) -> None:
        """The hook."""
        grad = parameter.grad
        if grad is not None and grad.layout is torch.strided:
            self.grad, self.version = grad, grad._version
            self.noted = self._entries(grad)

    def look(self) -> Tensor:
        """The same entries now."""
        assert self.parameter.grad is not None
        return self._entries(self.parameter.grad)

    def has_changed(self) -> bool:
        return self.parameter.grad is not self.grad or self.grad is None or self.grad._version != self.version

    def _entries(self, grad: Tensor) -> Tensor:
        grad = grad.detach() if grad.requires_grad else grad
        if grad.is_contiguous():  # one operation instead of three: this runs in every step
            return torch.as_strided_copy(grad, (self._count,), (self._stride,), grad.storage_offset())
        return grad.reshape(-1)[:: self._stride].clone()


def _spread(parameters: Sequence[Tensor]) -> list[Tensor]:
    """A few parameters, evenly spaced; the first and the last are among them."""
    last, count = len(parameters) - 1, min(PROBED_PARAMETERS, len(parameters))
    return [parameters[round(i * last / max(1, count - 1))] for i in range(count)]


def _neighbours(center: Tensor) -> Iterator[Tensor]:
    """The number, then its two nearest neighbours on each side (float32 and float64 only)."""
    yield center
    if center.dtype not in (torch.float32, torch.float64):
        return
    for direction in (torch.inf, -torch.inf):
        limit = torch.full_like(center, direction)
        near = torch.nextafter(center, limit)
        yield near
        yield torch.nextafter(near, limit)


def _not_one_factor() -> RunError:
    return RunError(
        "the gradients were changed between backward() and step() by more than one common factor (clipping by value, "
        "added noise, or a factor for each layer), which cannot be recorded: clip by the norm of all gradients, or do "
        "not clip"
    )
