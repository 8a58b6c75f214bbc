r"""TailAverage: the mean of the weights over the later part of training, kept up to date after every step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poprisk.errors import HyperparameterError, StateDictError

Buffers = Literal["average", "copy"]


class TailAverage:
    r"""Means of a model's weights over about the last ``tail`` of the steps taken so far.

    After step t each average moves toward the weights by polynomial-decay averaging (Shamir and Zhang, 2013):

    .. math:: \bar w_t = \bar w_{t-1} + \frac{c}{t + c - 1} (w_t - \bar w_{t-1}), \qquad c = 1/\text{tail},

    so that step k has a weight close to :math:`k^{c-1}`. The average needs one copy of the weights, does not need to
    know when training will end, and can be used at any moment: ``tail=0.1`` is about the last tenth of the steps so
    far, ``tail=0.5`` grows linearly, ``tail=1`` is the mean of all steps. Motion that all steps share survives the
    mean; the random walk that fits the noise of single examples is averaged out.

    The average is updated by a hook of the optimizer, whichever it is; training itself does not change.

    Args:
        model: The model whose weights are averaged. Parameters that do not require a gradient are left alone.
        optimizer: The optimizer that trains it.
        tail: The share of the steps that the mean covers, in (0, 1], or several of them: one average each.
        buffers: What happens to floating-point buffers such as the statistics of batch normalization:
            ``"average"`` treats them like weights, ``"copy"`` takes them from the model (call
            :func:`torch.optim.swa_utils.update_bn` inside :meth:`swapped` to recompute them). Other buffers are copied.

    Raises:
        HyperparameterError: ``tail`` is not in (0, 1], or the model has no parameter to train.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> average = TailAverage(model, optimizer, tail=1.0)
    >>> with torch.no_grad():
    ...     _ = model.weight.fill_(0.0)
    >>> for _ in range(3):  # the weight goes to -1, -2, -3
    ...     model.weight.grad = torch.ones(1, 1)
    ...     optimizer.step()
    >>> with average.swapped():
    ...     model.weight.item()
    -2.0
    >>> model.weight.item()
    -3.0
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        tail: float | Sequence[float] = 0.2,
        *,
        buffers: Buffers = "average",
    ) -> None:
        self.tails = tuple(float(each) for each in (tail if isinstance(tail, Sequence) else (tail,)))
        if not self.tails or not all(0 < each <= 1 for each in self.tails):
            raise HyperparameterError(f"tail must be in (0, 1], or several such numbers, got {tail!r}: use 0.1")
        if buffers not in ("average", "copy"):
            raise HyperparameterError(f'buffers must be "average" or "copy", got {buffers!r}')
        self.steps = 0
        self._model, self._buffers = model, buffers
        self._names = [name for name, each in model.named_parameters() if each.requires_grad]
        if not self._names:
            raise HyperparameterError("the model has no parameter that requires a gradient: nothing to average")
        self._means = [[_wide(each) for each in self._averaged()] for _ in self.tails]
        self._hook = optimizer.register_step_post_hook(self._after_step)

    def close(self) -> None:
        """Stop following the optimizer; the averages stay as they are."""
        self._hook.remove()

    @torch.no_grad()
    def update(self) -> None:
        """Count one step and move every average toward the weights; the optimizer's hook calls this."""
        self.steps += 1
        current = [each.detach() for each in self._averaged()]
        for tail, means in zip(self.tails, self._means, strict=True):
            c = 1 / tail
            move(means, current, c / (self.steps + c - 1))

    @contextmanager
    def swapped(self, which: int = 0) -> Iterator[nn.Module]:
        """The model with the average in place of its weights; they come back when the block ends.

        Args:
            which: Index of the average, where ``tail`` has several.
        """
        current = self._averaged()
        kept = [each.detach().clone() for each in current]
        try:
            self.copy_to_model(which)
            yield self._model
        finally:
            with torch.no_grad():
                torch._foreach_copy_(current, kept)

    @torch.no_grad()
    def copy_to_model(self, which: int = 0) -> None:
        """Put an average into the model for good. Before the first step this changes nothing."""
        if self.steps:
            torch._foreach_copy_(self._averaged(), self._means[which])

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, as tensors and plain numbers; references, not copies."""
        return {
            "steps": self.steps,
            "tails": list(self.tails),
            "names": self._all_names(),
            "means": [list(means) for means in self._means],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict`.

        Raises:
            StateDictError: the state belongs to another model or to other tails.
        """
        if list(state["tails"]) != list(self.tails) or list(state["names"]) != self._all_names():
            raise StateDictError(
                f"this TailAverage has tails {list(self.tails)} of {len(self._all_names())} tensors, and the state has "
                f"tails {list(state['tails'])} of {len(state['names'])} tensors: construct it as it was when saved"
            )
        self.steps = int(state["steps"])
        for means, given in zip(self._means, state["means"], strict=True):
            torch._foreach_copy_(means, [each.to(mean) for each, mean in zip(given, means, strict=True)])

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.update()

    def _averaged(self) -> list[Tensor]:
        """The tensors of the model that are averaged: trained parameters, then floating-point buffers."""
        parameters = dict(self._model.named_parameters())
        return [*(parameters[name] for name in self._names), *self._buffer_tensors().values()]

    def _all_names(self) -> list[str]:
        return [*self._names, *self._buffer_tensors()]

    def _buffer_tensors(self) -> dict[str, Tensor]:
        if self._buffers == "copy":
            return {}
        return {name: each for name, each in self._model.named_buffers() if each.is_floating_point()}


def move(means: list[Tensor], current: list[Tensor], weight: float) -> None:
    """Move each mean toward the current tensor by ``weight``; 16-bit tensors are averaged in float32."""
    same = [m.dtype == x.dtype for m, x in zip(means, current, strict=True)]
    if all(same):
        torch._foreach_lerp_(means, current, weight)
        return
    torch._foreach_lerp_(means, [x.to(m.dtype) for m, x in zip(means, current, strict=True)], weight)


def _wide(x: Tensor) -> Tensor:
    """A copy in at least float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.detach().to(wide, copy=True)
