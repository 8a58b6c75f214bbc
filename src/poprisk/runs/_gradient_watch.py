r"""What happened to the gradients between ``backward()`` and ``step()``: nothing, or one common factor, or a refusal.

Clipping by norm and unscaling multiply all gradients by one number, which belongs into the selection S of
:class:`~poprisk.runs.Step`. It is *observed*, so that it does not matter who clips, or by which function: a hook behind
each parameter's gradient notes its version counter and a few of its entries. Just before the optimizer moves, gradients
whose version has not changed have a factor of exactly 1, at no cost; for the others the factor is the number c, in the
gradients' own precision, for which fl(c · noted) is what is there now, bit by bit. Anything else (clipping by value,
noise, another factor for each layer) is no factor of the loss and is refused. A dense recording looks at every entry of
every gradient; a sparse one, for which time counts, at a few entries of a few parameters, and what escapes it is found
when the run is replayed.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from poprisk.errors import RunError

PROBED_PARAMETERS, PROBED_ENTRIES = 2, 32


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
    for candidate in _neighbours(center):  # the first is nearly always it
        if torch.equal(before * candidate, after):
            return float(candidate)
    if not bool(center.isfinite()) or not bool(after.isfinite().all()):
        raise _not_one_factor()
    # Two factors in a row (unscaled, then clipped) round twice: no single one has the same bits.
    slack = 8 * torch.finfo(before.dtype).eps * after.abs() + torch.finfo(before.dtype).tiny
    if bool(((before * center - after).abs() <= slack).all()):
        return float(center)
    raise _not_one_factor()


class GradientWatch:
    """Hooks behind the gradients of some parameters.

    Args:
        parameters: Whose gradients.
        every_entry: Note all entries of all of them: what dense recording can afford.
    """

    def __init__(self, parameters: Sequence[Tensor], *, every_entry: bool = False) -> None:
        chosen = list(parameters) if every_entry else _spread(parameters)
        self._probes = [_Probe(p, p.numel() if every_entry else PROBED_ENTRIES) for p in chosen]
        self._handles = [probe.parameter.register_post_accumulate_grad_hook(probe.note) for probe in self._probes]

    def factor(self) -> float:
        """By what the gradients were multiplied since the last ``backward()``; 1 where none has been seen.

        Raises:
            RunError: they were changed in another way.
        """
        seen = [probe for probe in self._probes if probe.noted is not None]
        if not seen:
            return 1.0
        if len(seen) < len(self._probes):
            raise RunError("a gradient was set by hand, others by backward(): let one backward() make them all")
        changed = [probe.has_changed() for probe in seen]
        if not any(changed):
            return 1.0
        before = torch.cat([probe.noted for probe in seen if probe.noted is not None])
        factor = common_factor(before, torch.cat([probe.look() for probe in seen]))
        if factor != 1.0 and not all(changed):
            raise _not_one_factor()
        return factor

    def forget(self) -> None:
        """To be called after each step."""
        for probe in self._probes:
            probe.grad = probe.noted = None

    def close(self) -> None:
        """Take the hooks away."""
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
        if grad.is_contiguous():  # one operation and not three: this runs in every step
            return torch.as_strided_copy(grad, (self._count,), (self._stride,), grad.storage_offset())
        return grad.reshape(-1)[:: self._stride].clone()


def _spread(parameters: Sequence[Tensor]) -> list[Tensor]:
    """A few from the first to the last: the layers at both ends are among them."""
    last, count = len(parameters) - 1, min(PROBED_PARAMETERS, len(parameters))
    return [parameters[round(i * last / max(1, count - 1))] for i in range(count)]


def _neighbours(center: Tensor) -> Iterator[Tensor]:
    """The number, then the two next to it on each side, where its precision knows neighbours."""
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
        "noise, a factor for each layer?): such a step is not one of the recorded loss; clip by the norm of all "
        "gradients, or not at all"
    )
