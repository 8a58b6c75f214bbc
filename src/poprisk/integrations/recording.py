"""What the recording callbacks of all trainers share: which examples made a batch, and a block around each step.

Which examples. A :class:`torch.utils.data.DataLoader` draws the indices of its batches in the main process, whatever
the number of its workers, and hands the batches out in the order in which it drew them. So the order of the draws is
noted, and each batch that is trained on takes the next one. Every batch is compared with the examples it should be made
of: their number, and their targets where the batch has a tensor of the same shape and dtype; and the first gradients
are compared with the problem's (:mod:`poprisk.runs._gradients`).

The block. It is opened when the optimizer is about to move and closed right after it moved, before schedulers.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from poprisk.errors import RunError
from poprisk.runs import Problem, Recorder, StepContext


class DrawnBatches:
    """A sampler that notes what it draws; everything else is the sampler it stands before.

    >>> drawn = DrawnBatches([[2, 0], [1, 3]])
    >>> batches = iter(drawn)
    >>> next(batches), next(batches)  # a loader draws ahead
    ([2, 0], [1, 3])
    >>> drawn.take(), drawn.take()
    (tensor([2, 0]), tensor([1, 3]))
    """

    def __init__(self, sampler: Any) -> None:
        self.drawn_from = sampler
        self._waiting: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[Any]:
        self._waiting.clear()  # what was drawn ahead in an epoch that ended early is never trained on
        for drawn in self.drawn_from:
            self._waiting.append([int(drawn)] if not isinstance(drawn, list | tuple | Tensor) else [*map(int, drawn)])
            yield drawn

    def __len__(self) -> int:
        return len(self.drawn_from)

    def __getattr__(self, name: str) -> Any:
        if name in ("drawn_from", "_waiting"):  # not there yet, while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.drawn_from, name)

    def take(self) -> Tensor:
        """The indices of the batch that comes next.

        Raises:
            RunError: more batches were trained on than drawn.
        """
        if not self._waiting:
            raise RunError(
                "a batch was trained on that the watched loader did not draw, so that its examples are not known: "
                "train on the batches of one torch DataLoader"
            )
        return torch.tensor(self._waiting.popleft())


def watch_loader(loader: Any) -> DrawnBatches:
    """Note, from now on, which examples a loader draws; a second call finds what the first one left.

    Raises:
        RunError: it is no torch DataLoader over a dataset with indices, or hands batches out in another order.

    >>> loader = DataLoader(range(6), batch_size=4)
    >>> drawn = watch_loader(loader)
    >>> [(batch.tolist(), drawn.take().tolist()) for batch in loader]
    [([0, 1, 2, 3], [0, 1, 2, 3]), ([4, 5], [4, 5])]
    >>> watch_loader(loader) is drawn
    True
    """
    base = getattr(loader, "base_dataloader", loader)  # accelerate wraps another one
    if not isinstance(base, DataLoader) or isinstance(base.dataset, IterableDataset):
        what = type(base.dataset if isinstance(base, DataLoader) else base).__name__
        raise RunError(
            f"{what} does not say which examples are in a batch: train on a torch DataLoader over a dataset with "
            "__len__ and __getitem__"
        )
    if not getattr(base, "in_order", True):
        raise RunError("a loader with in_order=False hands batches out as they come: their examples are not known")
    place = "sampler" if base.batch_sampler is None else "batch_sampler"
    found = getattr(base, place)
    if not isinstance(found, DrawnBatches):
        found = DrawnBatches(found)
        object.__setattr__(base, place, found)  # torch's own guards against samplers that disagree with batch_size
    return found


def unwatch_loader(loader: Any) -> None:
    """Put a loader's own sampler back."""
    base = getattr(loader, "base_dataloader", loader)
    for place in ("sampler", "batch_sampler"):
        found = getattr(base, place, None)
        if isinstance(found, DrawnBatches):
            object.__setattr__(base, place, found.drawn_from)


def check_batch(batch: Any, indices: Tensor, problem: Problem | None) -> None:
    """Refuses a batch that cannot be made of these examples.

    Raises:
        RunError: another number of examples, or other targets.
    """
    found = list(_tensors(batch))
    sizes = {len(x) for x in found if x.dim()}
    if sizes and len(indices) not in sizes:
        raise RunError(
            f"a batch of {max(sizes)} should be made of the {len(indices)} examples {indices[:4].tolist()} …: the "
            "collate function, or a hook that changes batches, must leave each example in its place"
        )
    if problem is None:
        return
    targets = problem.targets[indices.to(problem.device)].cpu()
    alike = [x.detach().cpu() for x in found if x.shape == targets.shape and x.dtype == targets.dtype]
    if alike and not any(torch.equal(x, targets) for x in alike):
        raise RunError(
            f"the batch of examples {indices[:4].tolist()} … does not have their targets: the problem's examples must "
            "be those of the loader's dataset, in the same order"
        )


def find_network(model: nn.Module, wanted: nn.Module | None, name: str | None = None) -> nn.Module:
    """The part of a trainer's module that a problem's model is: of that name, or with the same parameters.

    Args:
        model: The trainer's.
        wanted: The problem's model, built anew; None where there is no problem.
        name: Of the part.

    Raises:
        RunError: there is none, or the named one is another.

    >>> part = nn.Linear(2, 1)
    >>> find_network(nn.ModuleDict({"net": part}), nn.Linear(2, 1)) is part
    True
    """
    parts = dict(model.named_modules())
    if name is not None and name not in parts:
        raise RunError(f"{type(model).__name__} has no part {name!r}: network= is one of {_some(list(parts)[1:])}")
    named = model if name is None else parts[name]
    if wanted is None:
        return named
    shapes = _shapes(wanted)
    for part in parts.values() if name is None else [named]:
        if _shapes(part) == shapes:
            return part
    raise RunError(
        f"no part of {type(model).__name__} is the problem's model: that has parameters {_some(list(shapes))}, the "
        f"module {_some(list(_shapes(named)))}, or their shapes differ; make_model must build what the module trains"
    )


class StepBlocks:
    """A recorder's block around each step of a trainer that steps by itself.

    Args:
        make: Makes the recorder of an optimizer, whose hooks stand between those that open and close the block.
        optimizer: That is stepped.
        batches: The micro-batches of the step at hand, their weights where these are not 1 / (their number), and the
            step's loss if it is known before the step.
        after: Called with the block before it is closed.
    """

    def __init__(
        self,
        make: Callable[[], Recorder],
        optimizer: Optimizer,
        batches: Callable[[], tuple[Sequence[Tensor], Sequence[Tensor] | None, Any]],
        after: Callable[[StepContext], None] = lambda step: None,
    ) -> None:
        self._batches, self._after = batches, after
        self._step: StepContext | None = None
        self._hooks = [optimizer.register_step_pre_hook(self._open)]
        try:
            self.recorder = make()
        except BaseException:
            self._hooks[0].remove()
            raise
        self._hooks.append(optimizer.register_step_post_hook(self._close))

    def _open(self, *_: Any) -> None:
        indices, weights, loss = self._batches()
        self._step = self.recorder.step(list(indices), weights=None if weights is None else list(weights))
        self._step.__enter__()
        self._step.loss = loss

    def _close(self, *_: Any) -> None:
        step, self._step = self._step, None
        if step is not None:
            self._after(step)
            step.__exit__(None, None, None)

    def end(self, error: BaseException | None = None) -> None:
        """Close the recorder; after an error as one that was interrupted, with the steps that were whole."""
        for hook in self._hooks:
            hook.remove()
        step, self._step = self._step, None
        kind = RunError if error is None else type(error)
        if step is not None:
            step.__exit__(kind, error, None)
        self.recorder.__exit__(None if error is None else kind, error, None)


def make_recorder(
    path: str | Path | None,
    network: nn.Module,
    optimizer: Optimizer,
    problem: Problem | None,
    examples: int,
    **options: Any,
) -> Recorder:
    """A recorder for a problem, or, without one, for so many examples under whatever loss the trainer computes.

    Raises:
        RunError: the problem and the loader's dataset are not of one length, or as by :class:`~poprisk.runs.Recorder`.
    """
    if problem is None:
        return Recorder(path, network, optimizer, loss="the trainer's own", examples=examples, **options)
    if len(problem) != examples:
        raise RunError(
            f"problem {problem.name!r} has {len(problem)} examples, the training loader's dataset {examples}: they "
            "must be the same, in the same order"
        )
    return Recorder(path, network, optimizer, problem=problem, **options)


def unwrapped(optimizer: Any) -> Optimizer:
    """The torch optimizer inside what trainers put around it."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" … ({len(names)})" if len(names) > 4 else "") if names else "none"
