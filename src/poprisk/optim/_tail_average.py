r"""TailAverage: the mean of the weights over the later part of training, kept up to date after every step."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poprisk.errors import HyperparameterError, RunError, StateDictError
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.optim._model_tensors import ModelTensors, check_followed, check_keys, reshard, unwrapped
from poprisk.optim._shards import is_sharded, local_part
from poprisk.optim._step_average import StepAverage

Buffers = Literal["average", "copy"]


class TailAverage:
    r"""Means of a model's weights over about the last ``tail`` of the steps taken so far.

    After step t each average moves toward the weights by polynomial-decay averaging (Shamir and Zhang, 2013):

    .. math:: \bar w_t = \bar w_{t-1} + \frac{c}{t + c - 1} (w_t - \bar w_{t-1}), \qquad c = 1/\text{tail},

    so that step k has a weight close to :math:`k^{c-1}`. The average needs one copy of the weights, does not need to
    know when training will end, and can be used at any moment: ``tail=0.1`` is about the last tenth of the steps so
    far, ``tail=0.5`` grows linearly, ``tail=1`` is the mean of all steps. Motion that all steps share survives the
    mean; the random walk that fits the noise of single examples is averaged out.

    The average is updated by hooks of the optimizer, whichever it is; training itself does not change. The fused
    kernels of :class:`poprisk.PopRiskAdamW` move the first average in the same pass over memory as the weights. 16-bit
    weights are averaged in float32. Under FSDP2 (``fully_shard``) each process averages its own shards; apply
    ``fully_shard`` first.

    A copy (``copy.deepcopy``, ``pickle``) has the averages and follows no optimizer, as torch drops the hooks of a
    copied optimizer. To go on with a copied model, construct a new one and load :meth:`state_dict`.

    Args:
        model: The model whose weights are averaged. Frozen parameters (``requires_grad=False``) are left alone until
            they are unfrozen. DistributedDataParallel and ``torch.compile`` wrappers are looked through.
        optimizer: The optimizer that trains it.
        tail: The share of the steps that the mean covers, in (0, 1], or several of them: one average each.
        buffers: What happens to floating-point buffers such as the statistics of batch normalization: ``"average"``
            treats them like weights, ``"copy"`` takes them from the model. To recompute them from data instead, pass a
            loader to :meth:`swapped` or :meth:`copy_to_model`. Other buffers are copied.

    Raises:
        HyperparameterError: ``tail`` is not in (0, 1], or the optimizer does not train the model.

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
        given = tail if isinstance(tail, Sequence) else (tail,)
        if not given or not all(isinstance(each, Real) and 0 < each <= 1 for each in given):
            raise HyperparameterError(f"tail must be in (0, 1], or several such numbers, got {tail!r}: use 0.2")
        self.tails = tuple(map(float, given))
        if buffers not in ("average", "copy"):
            raise HyperparameterError(
                f'buffers must be "average" or "copy", got {buffers!r}: to recompute the statistics of batch '
                "normalization, pass a loader to swapped or copy_to_model"
            )
        check_followed(model, optimizer)
        self.steps = 0
        self._model = unwrapped(model)
        self._tensors = ModelTensors(self._model, "floating" if buffers == "average" else "none")
        self._all_buffers = ModelTensors(self._model, "all")
        if not self._tensors.trained:
            raise HyperparameterError("the model has no parameter that requires a gradient: nothing to average")
        reshard(self._model)
        self._means = [[_wide(each) for each in self._tensors.current()] for _ in self.tails]
        self._in_step: StepAverage | None = None
        self._optimizer: Optimizer | None = optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_hooks": [], "_in_step": None, "_optimizer": None}

    def close(self) -> None:
        """Stop following the optimizer; the averages stay as they are."""
        for hook in self._hooks:
            hook.remove()
        self._leave_step()

    def update(self) -> None:
        """Count one step and move every average toward the weights; the optimizer's hook does the same."""
        self._update(set())

    @torch.no_grad()
    def _update(self, moved: set[int]) -> None:
        """Count one step; ``moved`` has the ``id`` of all weights whose first average the step itself has moved."""
        weights = [self._weight(tail) for tail in self.tails]
        self.steps += 1
        if len(self.tails) == 1 and len(moved) == len(self._means[0]):
            return
        current = self._tensors.current()
        for which, (weight, means) in enumerate(zip(weights, self._means, strict=True)):
            left = [i for i, x in enumerate(current) if which or id(x) not in moved]
            if left:
                move([means[i] for i in left], [current[i] for i in left], weight)

    def _weight(self, tail: float) -> float:
        """How far an average moves in the next step."""
        c = 1 / tail
        return c / (self.steps + 1 + c - 1)

    @contextmanager
    def swapped(self, which: int = 0, *, batch_norm: Iterable[Any] | None = None) -> Iterator[nn.Module]:
        """The model with the average in place of its weights; they come back when the block ends.

        A step of the optimizer inside the block would be lost, and raises an error.

        Args:
            which: Index of the average, where ``tail`` has several.
            batch_norm: A loader of training batches (inputs, or tuples that begin with them), from which the
                statistics of batch normalization are recomputed for the averaged weights
                (:func:`torch.optim.swa_utils.update_bn`).
        """
        reshard(self._model)
        everything = self._all_buffers.current()
        kept = [each.detach().clone() for each in everything]
        guard = None if self._optimizer is None else self._optimizer.register_step_pre_hook(_refuse_step)
        if guard is not None and self._optimizer is not None:
            hooks: Any = self._optimizer._optimizer_step_pre_hooks
            hooks.move_to_end(guard.id, last=False)  # before others act
        try:
            self.copy_to_model(which, batch_norm=batch_norm)
            yield self._model
        finally:
            if guard is not None:
                guard.remove()
            reshard(self._model)
            with torch.no_grad():
                torch._foreach_copy_(self._all_buffers.current(), kept)

    @contextmanager
    def lent(self, which: int = 0) -> Iterator[nn.Module]:
        """Like :meth:`swapped`, for a block that changes neither weights nor buffers: nothing is copied if possible."""
        current, means = self._tensors.current(), self._means[which]
        same = all(x.dtype == m.dtype for x, m in zip(current, means, strict=True))
        if not same or self._tensors.sharded or not self.steps:
            with self.swapped(which) as model:
                yield model
            return
        own = [each.data for each in current]
        try:
            for each, mean in zip(current, means, strict=True):
                each.data = mean
            yield self._model
        finally:
            for each, data in zip(current, own, strict=True):
                each.data = data

    @torch.no_grad()
    def copy_to_model(self, which: int = 0, *, batch_norm: Iterable[Any] | None = None) -> None:
        """Put an average into the model for good. Before the first step this changes no weights.

        Args:
            which: Index of the average, where ``tail`` has several.
            batch_norm: A loader from which the statistics of batch normalization are recomputed, as in
                :meth:`swapped`.
        """
        reshard(self._model)
        if self.steps:
            torch._foreach_copy_(self._tensors.current(), self._means[which])
        if batch_norm is not None:
            recompute_batch_norm(self._model, batch_norm)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, as tensors and plain numbers; references, not copies.

        Sharded parameters have sharded means, which ``torch.distributed.checkpoint`` saves and loads.
        """
        return {
            "steps": self.steps,
            "tails": list(self.tails),
            "names": list(self._tensors.names),
            "means": [self._tensors.as_parts(means) for means in self._means],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict`.

        Raises:
            StateDictError: the state is not one of TailAverage, or belongs to another model, to other tails, or to
                parameters that are not sharded as these are.
        """
        check_keys(state, self.state_dict(), "TailAverage")
        unfrozen = [name for name in state["names"] if name not in self._tensors.names]
        if unfrozen and self._tensors.can_include(unfrozen):
            self._begin(unfrozen)
        if list(state["tails"]) != list(self.tails) or list(state["names"]) != self._tensors.names:
            raise StateDictError(
                f"this TailAverage has tails {list(self.tails)} of {len(self._tensors.names)} tensors, and the state "
                f"has tails {list(state['tails'])} of {len(state['names'])} tensors: construct it as it was when saved"
            )
        for own, given in zip(self.state_dict()["means"][0], state["means"][0], strict=True):
            if is_sharded(own) != is_sharded(given):
                raise StateDictError(
                    "averages and model must both be sharded or whole: use torch.distributed.checkpoint"
                )
        self.steps = int(state["steps"])
        for means, given in zip(self._means, state["means"], strict=True):
            torch._foreach_copy_(means, [local_part(each).to(mean) for each, mean in zip(given, means, strict=True)])

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if begun := self._tensors.begun():
            self._begin(begun)
        if self._in_step is None and isinstance(optimizer, PopRiskAdamW) and self._sees_weights_first(optimizer):
            count = self._tensors.trained
            weights, means = self._tensors.current()[:count], self._means[0][:count]
            self._in_step = StepAverage(weights, means, lambda: self._weight(self.tails[0]))
            optimizer.average_in_step(self._in_step)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        moved: set[int] = set() if self._in_step is None else self._in_step.take_moved()
        overflow = getattr(optimizer, "found_inf", None)  # set by GradScaler for fused steps
        if overflow is None or not bool(overflow):  # otherwise the step was skipped
            self._update(moved)

    def _sees_weights_first(self, optimizer: Optimizer) -> bool:
        """Whether no earlier hook can change the weights between the step and this average."""
        return next(iter(optimizer._optimizer_step_post_hooks), None) == self._hooks[1].id

    def _leave_step(self) -> None:
        """Let no step move these averages any more; the next one is asked again."""
        if self._in_step is not None:
            self._in_step.closed = True
        self._in_step = None

    def _begin(self, names: Sequence[str]) -> None:
        """Average parameters that were frozen so far: their mean is the value that they have had."""
        self._leave_step()
        place = self._tensors.trained
        self._tensors.include(names)
        self._all_buffers.include(names)
        added = self._tensors.current()[place : place + len(names)]
        for means in self._means:
            means[place:place] = [_wide(each) for each in added]


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    raise RunError(
        "optimizer.step() was called inside `with average.swapped():`, where the model has the average in place of its "
        "weights: the step would be lost when the block ends. Call it outside of the block"
    )


@torch.no_grad()
def recompute_batch_norm(model: nn.Module, loader: Iterable[Any]) -> None:
    """Set the statistics of batch normalization to those of the loader's batches, at the weights that the model has."""
    from torch.optim.swa_utils import update_bn

    device = next((each.device for each in model.parameters()), None)
    update_bn(loader, model, device)


def move(means: list[Tensor], current: list[Tensor], weight: float) -> None:
    """Move each mean toward the current tensor by ``weight``; 16-bit tensors are averaged in float32."""
    torch._foreach_lerp_(means, [x.to(m.dtype) for m, x in zip(means, current, strict=True)], weight)


def _wide(x: Tensor) -> Tensor:
    """A copy in at least float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.detach().to(wide, copy=True)
