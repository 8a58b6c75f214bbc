"""What the recording callbacks of all trainers share: which examples are in a batch, and a block around each step.

Examples: a :class:`torch.utils.data.DataLoader` draws the indices of its batches in the main process, whatever the
number of its workers, and returns the batches in the order in which it drew them. The draws are noted, and each batch
that is trained on takes the next one. Every batch is compared with its examples: their number, and their targets if the
batch has a tensor of the same shape and dtype. The gradients of the first steps, and of some later ones, are compared
with the problem's.

Block: it is opened just before the optimizer step and closed right after it, before schedulers.
"""

import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.hooks import RemovableHandle

from poprisk.errors import HyperparameterError, PopRiskError, PopRiskWarning, RunError
from poprisk.report import analyze, can_rebuild
from poprisk.runs import Problem, Recorder, Run, StepContext, usual_interval

_KEPT_PARTS = ("examples", "curves")
"""Parts of an analysis that take little beside a training, and are all that a review needs."""


class DrawnBatches:
    """A sampler that notes what it draws; everything else is passed on to the sampler it wraps.

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
        self._waiting.clear()  # batches drawn ahead in an epoch that ended early are never trained on
        for drawn in self.drawn_from:
            self._waiting.append([int(drawn)] if not isinstance(drawn, list | tuple | Tensor) else [*map(int, drawn)])
            yield drawn

    def __len__(self) -> int:
        return len(self.drawn_from)

    def __getattr__(self, name: str) -> Any:
        if name in ("drawn_from", "_waiting"):  # not set yet while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.drawn_from, name)

    def take(self) -> Tensor:
        """The indices of the next batch.

        Raises:
            RunError: More batches were trained on than drawn.
        """
        if not self._waiting:
            raise RunError(
                "the watched loader did not draw this training batch, so its examples are unknown: train on the "
                "batches of one torch DataLoader"
            )
        return torch.tensor(self._waiting.popleft())


def watch_loader(loader: Any) -> DrawnBatches:
    """Note which examples a loader draws from now on; a second call returns the same object.

    Raises:
        RunError: It is not a torch DataLoader over a dataset with indices, or returns batches in another order.

    >>> loader = DataLoader(range(6), batch_size=4)
    >>> drawn = watch_loader(loader)
    >>> [(batch.tolist(), drawn.take().tolist()) for batch in loader]
    [([0, 1, 2, 3], [0, 1, 2, 3]), ([4, 5], [4, 5])]
    >>> watch_loader(loader) is drawn
    True
    """
    base = getattr(loader, "base_dataloader", loader)  # accelerate wraps the loader
    if not isinstance(base, DataLoader) or isinstance(base.dataset, IterableDataset):
        what = type(base.dataset if isinstance(base, DataLoader) else base).__name__
        raise RunError(
            f"{what} does not tell which examples are in a batch: use a torch DataLoader over a dataset with __len__ "
            "and __getitem__"
        )
    if not getattr(base, "in_order", True):
        raise RunError("the examples in batches of a loader with in_order=False are unknown: use in_order=True")
    place = "sampler" if base.batch_sampler is None else "batch_sampler"
    found = getattr(base, place)
    if not isinstance(found, DrawnBatches):
        found = DrawnBatches(found)
        object.__setattr__(base, place, found)  # torch forbids a plain assignment
    return found


def unwatch_loader(loader: Any) -> None:
    """Restore a loader's own sampler."""
    base = getattr(loader, "base_dataloader", loader)
    for place in ("sampler", "batch_sampler"):
        found = getattr(base, place, None)
        if isinstance(found, DrawnBatches):
            object.__setattr__(base, place, found.drawn_from)


def check_batch(batch: Any, indices: Tensor, problem: Problem | None) -> None:
    """Check that a batch can consist of these examples.

    Raises:
        RunError: The number of examples or their targets differ.
    """
    found = list(_tensors(batch))
    sizes = {len(x) for x in found if x.dim()}
    if sizes and len(indices) not in sizes:
        raise RunError(
            f"a batch of {max(sizes)} should consist of the {len(indices)} examples {indices[:4].tolist()} …: the "
            "collate function, or a hook that changes batches, must keep each example in its place"
        )
    if problem is None:
        return
    targets = problem.targets[indices.to(problem.device)].cpu()
    alike = [x.detach().cpu() for x in found if x.shape == targets.shape and x.dtype == targets.dtype]
    if alike and not any(torch.equal(x, targets) for x in alike):
        raise RunError(
            f"the targets of the batch are not those of the problem's examples {indices[:4].tolist()} …: the problem "
            "must have the examples of the loader's dataset, in the same order"
        )


def find_network(model: nn.Module, wanted: nn.Module | None, name: str | None = None) -> nn.Module:
    """Find the part of a trainer's module that is the problem's model, by name or by its parameters.

    Args:
        model: The trainer's module.
        wanted: The problem's model, newly built; None if there is no problem.
        name: Name of the part.

    Raises:
        RunError: There is no such part, or the named one differs.

    >>> part = nn.Linear(2, 1)
    >>> find_network(nn.ModuleDict({"net": part}), nn.Linear(2, 1)) is part
    True
    """
    parts = dict(model.named_modules())
    if name is not None and name not in parts:
        raise RunError(f"{type(model).__name__} has no part {name!r}: network must be one of {_some(list(parts)[1:])}")
    named = model if name is None else parts[name]
    if wanted is None:
        return named
    shapes = _shapes(wanted)
    for part in parts.values() if name is None else [named]:
        if _shapes(part) == shapes:
            return part
    raise RunError(
        f"no part of {type(model).__name__} matches the problem's model, which has the parameters "
        f"{_some(list(shapes))}; the module has {_some(list(_shapes(named)))}, or other shapes: make_model must build "
        "what the module trains"
    )


class TrainerRecording:
    """What the recording callbacks of all trainers share: a recorder, and a block around each optimizer step.

    Args:
        path: Directory for the run, new or empty; None keeps it in memory.
        problem: What is trained, or None.
        every: Steps between checkpoints; 1 records every step, about three weight vectors each. Default: 1, or more
            if that would take more than 1 GiB.
        augmentation: ``"unseeded"`` if the dataset changes its inputs at random.
        verify_steps: Number of initial steps to compare with the problem; 0 also turns off the later samples.
        analyze: Whether to keep an audit of the labels and the learning curves with the run at the end.
    """

    def __init__(
        self,
        path: str | Path | None,
        problem: Problem | None = None,
        *,
        every: int | None = None,
        augmentation: Literal["unseeded"] | None = None,
        verify_steps: int = 2,
        analyze: bool = True,
    ) -> None:
        if isinstance(path, Problem) or not isinstance(problem, Problem | None):
            got = f"{type(path).__name__} and {type(problem).__name__}"
            raise HyperparameterError(f'expected a folder and a problem, got {got}: write RecordRun("runs/1", problem)')
        self.path, self.problem, self.analyze = path, problem, analyze
        self._options = {"every": every, "augmentation": augmentation, "verify_steps": verify_steps}
        self._recorder: Recorder | None = None
        self._drawn: DrawnBatches | None = None
        self._loader: Any = None
        self._step: StepContext | None = None
        self._hooks: list[RemovableHandle] = []

    @property
    def run(self) -> Run:
        """The run, as far as it has been written.

        Raises:
            RunError: Training has not begun.
        """
        if self._recorder is None:
            raise RunError("nothing has been recorded yet: train with this callback first")
        return self._recorder.run

    def _begin(self, loader: Any, network: nn.Module, optimizer: Any, steps: int | None, about: dict[str, Any]) -> None:
        """Begin to record; the recorder's hooks run between those that open and close a step."""
        optimizer = unwrapped(optimizer)
        self._loader, self._drawn = loader, watch_loader(loader)
        self._hooks = [optimizer.register_step_pre_hook(self._open)]
        try:
            every = self._options["every"] or usual_interval(network, optimizer, steps)
            options = {**self._options, "every": every, "steps": steps, "training": about}
            self._recorder = make_recorder(self.path, network, optimizer, self.problem, len(loader.dataset), **options)
        except BaseException:
            self._hooks.pop().remove()
            raise
        self._hooks.append(optimizer.register_step_post_hook(self._close))

    def _batches(self) -> tuple[Sequence[Tensor], Sequence[Tensor] | None, Any]:
        """The micro-batches of the current step, their weights if not 1 / (their size), and the loss if known."""
        raise NotImplementedError

    def _before_close(self, step: StepContext) -> None:
        """Called with each step before it is closed."""

    def _open(self, *_: Any) -> None:
        assert self._recorder is not None
        indices, weights, loss = self._batches()
        self._step = self._recorder.step(list(indices), weights=None if weights is None else list(weights))
        self._step.__enter__()
        self._step.loss = loss

    def _close(self, *_: Any) -> None:
        step, self._step = self._step, None
        if step is not None:
            self._before_close(step)
            step.__exit__(None, None, None)

    def _end(self, error: BaseException | None = None) -> None:
        """Close the recorder; after an error, keep the complete steps."""
        hooks, self._hooks, self._drawn = self._hooks, [], None
        step, self._step = self._step, None
        if not hooks or self._recorder is None:
            return
        for hook in hooks:
            hook.remove()
        kind = RunError if error is None else type(error)
        if step is not None:
            step.__exit__(kind, error, None)
        self._recorder.__exit__(None if error is None else kind, error, None)
        unwatch_loader(self._loader)
        if error is None and self.analyze and self.problem is not None:
            _keep_analysis(self.run)


def _keep_analysis(run: Run) -> None:
    """Analyze a run here, where its problem is, if its directory could not be opened with it; a failure is a warning.

    The random numbers of the program stay as they were.
    """
    if run.path is None or not run.num_steps or can_rebuild(run):
        return
    try:
        with torch.random.fork_rng():
            analyze(run, parts=_KEPT_PARTS)
    except (PopRiskError, RuntimeError, OSError) as error:
        warnings.warn(
            f"the run is recorded in {run.path}, but was not analyzed: {error}; call poprisk.analyze(record.run), or "
            "pass analyze=False",
            PopRiskWarning,
            stacklevel=2,
        )


def check_from_start(step: int) -> None:
    """Check that a training starts at its first step.

    Raises:
        RunError: It continues from a checkpoint.
    """
    if step:
        raise RunError(
            f"the training continues from step {step} of a checkpoint, and its first steps were not recorded: record a "
            "training from the start"
        )


def make_recorder(
    path: str | Path | None,
    network: nn.Module,
    optimizer: Optimizer,
    problem: Problem | None,
    examples: int,
    **options: Any,
) -> Recorder:
    """A recorder for a problem or, without one, for a number of examples under the trainer's own loss.

    Raises:
        RunError: The problem and the dataset differ in length, or see :class:`~poprisk.runs.Recorder`.
    """
    if problem is None:
        return Recorder(path, network, optimizer, loss="the trainer's own", examples=examples, **options)
    if len(problem) != examples:
        raise RunError(
            f"problem {problem.name!r} has {len(problem)} examples, the training loader's dataset {examples}: "
            "both must have the same examples, in the same order; after keep_best, make it of trainer.train_dataset"
        )
    return Recorder(path, network, optimizer, problem=problem, **options)


def unwrapped(optimizer: Any) -> Optimizer:
    """The torch optimizer inside the wrappers of a trainer."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def batch_length(batch: Any) -> int:
    """Number of examples in a batch: the first axis of its first tensor."""
    return next((len(each) for each in _tensors(batch) if each.dim()), 0)


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
