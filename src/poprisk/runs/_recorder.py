r"""Recording a training loop: what happened in each optimizer step, without changing the loop."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poprisk._core.autodiff import ExampleLoss
from poprisk.errors import HyperparameterError, RunError
from poprisk.optim import witness_kept
from poprisk.runs._dataset import IndexedDataset
from poprisk.runs._disk_use import announce, bytes_per_step, usual_segment
from poprisk.runs._first_look import check_seeded
from poprisk.runs._formats import check_seed, whole
from poprisk.runs._gradient_check import GradientCheck
from poprisk.runs._gradients import GradientWatch
from poprisk.runs._held_back import KeptWriter
from poprisk.runs._layout import layout_of
from poprisk.runs._linearize import Linearizer, unexplained
from poprisk.runs._manifest import check_same_run, describe_training, obstacles, plain
from poprisk.runs._problem import Problem
from poprisk.runs._run import Run
from poprisk.runs._step import Indices, StepContext, StepRecord, micro_batches
from poprisk.runs._storage import DirectoryStorage, MemoryStorage, relocate
from poprisk.runs._writer import RunWriter

_CAREFUL = 10
"""Number of initial steps of a sparse recording that are checked as closely as those of a dense one."""


class Recorder:
    r"""Records a training loop into a :class:`~poprisk.runs.Run`: weights, batches by index, each step's linear map.

    It takes two or three lines in a training loop, which otherwise stays the same::

        recorder = Recorder("runs/first", model, optimizer, problem=problem, every=100)
        for index, x, y in DataLoader(recorder.dataset(data), batch_size=32, shuffle=True):
            with recorder.step(index) as step:
                optimizer.zero_grad()
                step.loss = criterion(model(x), y)
                step.loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        run = recorder.close()

    *Dense* (``every=1``): weights, preconditioner and momentum buffer of every step are kept, about three weight
    vectors a step (SGD: one or two). *Sparse* (``every=100``): weights and optimizer state of every hundredth step;
    the steps in between are recomputed on demand and checked against the next checkpoint bit by bit.

    Clipping by norm and unscaling are detected, micro-batches may be accumulated, and learning rates and other options
    of each parameter group may change. In dense recording, any other change of the weights before the block ends is
    kept as the step's source. With a ``problem``, the first steps are checked: the gradient must be that of the
    recorded examples under the recorded loss. Later a sample of the steps is checked, and the last one. A difference
    there is a warning; the run is recorded to its end, and exact analyses refuse the steps that the problem does not
    explain. With a :class:`~poprisk.KeepBest` for the same optimizer, ``keeper.finish()`` stores the kept weights and
    their risk in the run; call it before :meth:`close`.

    Supported optimizers: torch's SGD (momentum, dampening, Nesterov), Adam and AdamW (also with amsgrad) in every
    implementation, and PopRiskAdamW. Other optimizers, ``maximize`` and sparse gradients raise an error. PopRiskAdamW
    with a ``variance`` source can be recorded only densely.

    Args:
        path: Directory for the run, new or empty; None keeps the run in memory.
        model: The module that is trained.
        optimizer: An optimizer over all its trainable parameters.
        problem: The problem that is trained; without one, give ``loss`` and ``examples``.
        loss: The loss as for :class:`~poprisk.runs.Problem`, if no problem is given.
        examples: Number n of training examples, if no problem is given.
        every: Number of steps between checkpoints; 1 records densely.
        steps: Number of planned steps, used to estimate disk use.
        seed: Seed for ``step.generator``, from which a seeded augmentation draws.
        augmentation: ``"seeded"`` if all random changes of inputs are ``problem.augment`` with ``step.generator``,
            ``"unseeded"`` if there are others: recorded, but no exact analysis is possible. Default: seeded if the
            problem has an augmentation, else none.
        verify_steps: Number of initial steps to check against the problem; 0 also turns off the later samples, about
            one step of 64. Each check costs one gradient.
        segment_steps: Number of steps per file of a dense run; default: about 32 MiB.
        resume: Continue the run in the directory: model and optimizer are restored from its last checkpoint.
        training: Any JSON value that describes the training loop; kept in the manifest.

    Raises:
        RunError: the directory holds other files, or another process writes into it; the optimizer is not supported or
            not built from the model's parameters; there is not enough disk space for the planned steps.
        HyperparameterError: an argument is out of range or missing.
        DataError: the problem's ``augment`` draws random numbers from elsewhere than its generator.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with Recorder(None, model, optimizer, loss="squared", examples=4) as recorder:
    ...     for indices in ([0, 1], [2, 3]):
    ...         with recorder.step(indices):
    ...             model(torch.ones(2, 2)).square().sum(1).mean().mul(0.5).backward()
    ...             optimizer.step()
    ...             optimizer.zero_grad()
    >>> run = recorder.run
    >>> run.num_steps, run.step(1).batch, run.step(1).selection
    (2, tensor([2, 3]), tensor([2., 2.]))
    """

    def __init__(
        self,
        path: str | Path | None,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        problem: Problem | None = None,
        loss: str | ExampleLoss | None = None,
        examples: int | None = None,
        every: int = 1,
        steps: int | None = None,
        seed: int = 0,
        augmentation: Literal["seeded", "unseeded"] | None = None,
        verify_steps: int = 2,
        segment_steps: int | None = None,
        resume: bool = False,
        training: Any = None,
    ) -> None:
        every = whole("every must be a whole number, at least 1", every, 1)
        verify_steps = whole("verify_steps must be a whole number, at least 0", verify_steps, 0)
        steps, segment_steps, examples = (
            None if value is None else whole(f"{name} must be a whole number, at least 1", value, 1)
            for name, value in (("steps", steps), ("segment_steps", segment_steps), ("examples", examples))
        )
        if augmentation not in (None, "seeded", "unseeded"):
            raise HyperparameterError(f'augmentation must be "seeded", "unseeded" or None, got {augmentation!r}')
        kinds = {"model": nn.Module, "optimizer": Optimizer, "problem": Problem | None, "path": str | Path | None}
        for (name, kind), value in zip(kinds.items(), (model, optimizer, problem, path), strict=True):
            if not isinstance(value, kind):
                wanted, got = getattr(kind, "__name__", kind), type(value).__name__
                raise HyperparameterError(f"{name} must be of type {wanted}, got {got}: pass the one of your loop")
        by_hand = loss is not None and examples is not None
        if (problem is None) != by_hand or (problem is not None and (loss is not None or examples is not None)):
            raise HyperparameterError("give either problem=…, or loss=… and examples=…")
        self.problem, self.every, self.steps, self.seed = problem, every, steps, check_seed(seed)
        self.examples = len(problem) if problem is not None else int(examples or 0)
        self._model, self._optimizer = model, optimizer
        self.layout, self._parameters = layout_of(model, optimizer)
        self._linearizer = Linearizer(optimizer, self.layout, self._parameters)
        if every > 1 and getattr(optimizer, "_variance_source", None) is not None:
            raise RunError("PopRiskAdamW with a variance source cannot be replayed: record it with every=1")
        self._segment_steps = every if every > 1 else segment_steps or usual_segment(self.layout)
        self._augmentation = augmentation or ("seeded" if problem is not None and problem.augment else None)
        first = 0 if self._augmentation == "unseeded" else verify_steps
        if first and problem is not None:
            check_seeded(problem)
        checked = (problem, model, self.layout, self._parameters)
        self._check = GradientCheck(*checked, first=first, seed=seed, steps=steps)
        self._loss = problem.loss if problem is not None else loss or ""
        self._training = training
        storage = MemoryStorage() if path is None else DirectoryStorage(path)
        trained = (self.layout, model, self._parameters, optimizer)
        self._writer = RunWriter(storage, *trained, self.examples, self._segment_steps)
        self.kept_writer = KeptWriter(self._writer, model)
        witness_kept(optimizer, self.kept_writer)
        self._open: StepContext | None = None
        self._closed = self._broken = False
        self._versions: list[int] | None = None
        self._weights_after: Tensor | None = None
        self._writer.claim()
        try:
            self._prepare_storage(resume)
        except BaseException:
            self._writer.release()
            raise
        self._watch = GradientWatch(self._parameters, every_entry=self.is_dense)
        self._hooks = [
            optimizer.register_step_pre_hook(self._pre_step),
            optimizer.register_step_post_hook(self._post_step),
        ]

    @property
    def num_steps(self) -> int:
        """Number of steps recorded so far; a resumed loop continues with this step."""
        return self._writer.num_steps

    @property
    def writer(self) -> RunWriter:
        """What writes the files of the run."""
        return self._writer

    @property
    def is_dense(self) -> bool:
        """Whether every step's weights are kept."""
        return self.every == 1

    @property
    def bytes_per_step(self) -> float:
        """Estimated bytes per step on disk, without its indices."""
        return bytes_per_step(self._optimizer, self.layout, self.every, self._segment_steps)

    @property
    def estimated_bytes(self) -> int:
        """Estimated bytes of the planned steps (1000 if ``steps`` was not given) on disk."""
        start = self.layout.size * self.layout.dtype.itemsize
        return math.ceil(start + self.bytes_per_step * (self.steps or 1000))

    def dataset(self, dataset: Any) -> IndexedDataset:
        """The training set with each example's index in front, for a DataLoader or a loop.

        Raises:
            RunError: the dataset has no ``__getitem__`` or ``__len__``, or another length than the recorded one.
        """
        wrapped = IndexedDataset(dataset)
        if len(wrapped) != self.examples:
            raise RunError(
                f"the run has {self.examples} training examples, the dataset has {len(wrapped)}: pass the whole "
                "training set"
            )
        return wrapped

    def step(
        self,
        indices: Indices | Sequence[Tensor] | None = None,
        *,
        weights: Tensor | Sequence[Tensor | None] | None = None,
        loss_scale: float = 1.0,
    ) -> "StepContext":
        """A block around forward, backward and ``optimizer.step()`` of one step.

        Args:
            indices: Indices of the examples whose losses are averaged. For micro-batches, pass several tensors or call
                ``step.micro_batch(…)`` inside the block; their mean losses are averaged.
            weights: Weight of each example's loss in the loss of the step, if it is not a plain mean (ones for a sum).
            loss_scale: Factor by which the loss is multiplied before ``backward()`` and the gradients are divided
                before ``step()``, e.g. ``scaler.get_scale()``. The optimizer may skip a step only if this is not 1.

        Raises:
            RunError: the recorder is closed, another step is open, or the weights have changed since the last step.
            DataError: an index is out of range.
        """
        careful = self.is_dense or self.num_steps < _CAREFUL  # later the indices are checked when they are written
        return StepContext(self, self.num_steps, micro_batches(indices, weights), loss_scale, check_now=careful)

    @property
    def run(self) -> Run:
        """The run, up to the steps written so far."""
        if not self._writer.has_begun:
            raise RunError("nothing has been recorded yet: put a step inside `with recorder.step(indices):`")
        self._writer.wait()
        return Run(self._writer.storage, problem=self.problem)

    def flush(self) -> Run:
        """Write the steps so far, even if they do not fill a file, so that the run can be read during training.

        Returns:
            The run up to the last step.

        Raises:
            RunError: a step is open, or nothing has been recorded.
        """
        if self._open is not None:
            raise RunError("a step is still open: call flush() between steps, outside of the block")
        self._writer.flush()
        return self.run

    def close(self) -> Run:
        """Write the remaining steps and remove the hooks.

        Returns:
            The finished run.
        """
        self._finish(closed=True)
        return self.run

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._finish(closed=kind is None)

    # What happens at a step: enter, pre_step (gradients ready, weights not moved), post_step (moved), leave.

    def enter(self, step: "StepContext") -> None:
        """Called by the block when it begins."""
        if self._closed:
            raise RunError("the recorder is closed: make another one, with resume=True to continue the same run")
        if self._broken:
            raise RunError("an error interrupted the optimizer's update: resume from the last checkpoint")
        if self._open is not None:
            raise RunError("another step is still open: `with recorder.step(…):` blocks cannot be nested")
        if not self._writer.has_begun:
            self._begin(step)
        versions = [p._version for p in self._parameters]
        if self._versions is not None and versions != self._versions:
            raise _moved(self.num_steps)
        if self.is_dense:
            step.weights_before = self.layout.flatten(self._parameters)
            after = self._weights_after
            if after is not None and not torch.equal(after.nan_to_num(), step.weights_before.nan_to_num()):
                raise _moved(self.num_steps)
        self._open = step

    def leave(self, step: "StepContext", failed: bool) -> None:
        """Called by the block when it ends."""
        self._open = None
        self._watch.forget()
        if step.state == "moving":
            self._broken = True
        if step.state != "moved":
            if not failed and step.loss_scale == 1.0:
                raise RunError("no step was recorded: call optimizer.step() once inside the block")
            return
        record = StepRecord(step.parts, step.factor, step.loss_scale, step.detached_loss())
        if self.is_dense:
            self._weights_after = self.layout.flatten(self._parameters)
            record.weights, record.linear = step.weights_before, step.linear
            assert step.linear is not None
            assert step.gradient is not None
            assert step.weights_before is not None
            moved = (step.weights_before, self._weights_after)
            self._check.keep(step)
            record.source = unexplained(
                self.layout, step.linear, step.gradient, *moved, self._parameters, self._linearizer.ungated
            )
        self._versions = [p._version for p in self._parameters]
        self._writer.add(record)
        self._mark()

    def _pre_step(self, _: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        # args[0] is the optimizer; a closure computes the gradients, so they are looked at after it.
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._gradients_are_ready()
            return None

        def observed(*a: Any, **k: Any) -> Any:
            loss = closure(*a, **k)
            if self._open is not None and self._open.loss is None and isinstance(loss, Tensor | float):
                self._open.loss = loss
            self._gradients_are_ready()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": observed}
        return (args[0], observed, *args[2:]), kwargs

    def _gradients_are_ready(self) -> None:
        step = self._open
        if step is None:
            raise RunError(
                "optimizer.step() was called outside of `with recorder.step(indices):`, so its batch is unknown: "
                "put it inside the block, or call recorder.close() to stop recording"
            )
        if step.state != "open":
            raise RunError("optimizer.step() was called twice in one block: use one `with recorder.step(…):` per step")
        if not step.parts:
            raise RunError("the step has no batch: pass its indices to recorder.step(…), or call step.micro_batch(…)")
        if getattr(self._optimizer, "grad_scale", None) is not None:
            raise RunError(
                "the fused optimizer unscales gradients in its step: call scaler.unscale_(optimizer) before the step"
            )
        if self.is_dense or self.num_steps < _CAREFUL:
            self._linearizer.before()
        else:
            self._linearizer.before_a_sparse_step()
        step.factor = self._watch.factor()
        if self.is_dense:
            step.gradient = self.layout.flatten([p.grad for p in self._parameters if p.grad is not None])
        self._check.look(step)
        step.state = "moving"

    def _post_step(self, *_: Any) -> None:
        step = self._open
        if step is None:
            return
        overflow = getattr(self._optimizer, "found_inf", None)
        skipped = overflow is not None and bool(overflow)
        if self.is_dense and not skipped:
            step.linear = self._linearizer.after()
        step.state = "open" if skipped else "moved"

    # Files.

    def _prepare_storage(self, resume: bool) -> None:
        storage = self._writer.storage
        if isinstance(storage, MemoryStorage):
            return
        manifest = storage.read_manifest() if resume else None
        if manifest is not None and not manifest["num_steps"]:
            storage.forget()  # left by a training that ended before its first step was written
            manifest = None
        if manifest is None:
            storage.check_is_free()
            return
        here = {**self._about(), "optimizer": self._linearizer.name}
        compared = ("layout", "optimizer", "examples", "every", "seed", "training")
        problem = None if self.problem is None else self.problem.fingerprint
        check_same_run(manifest, {"problem": problem, **{key: here[key] for key in compared}})
        if self.problem is not None and manifest["problem"] is not None:
            self.problem.check_is(manifest["problem"])
        run = Run(storage)
        steps, self._check.found = run.num_steps, run.unexplained
        self._writer.resume(manifest, steps, run.checkpoint(steps), run.options(steps))

    def _begin(self, step: StepContext) -> None:
        """Announce the disk space needed, then write the first checkpoint."""
        if self._writer.storage.path is not None:
            indices = 8 * sum(len(index) for index, _ in step.parts) * (self.steps or 1000)
            announce(self._writer.storage.path, self.estimated_bytes + indices, self.steps)
            if self.problem is not None:
                self.problem.remember()
        about = describe_training(self._model, self.problem, self._loss)
        relocate(about, None, self._writer.storage.path)
        obstacle = obstacles(self._model, self.layout, self._augmentation)
        self._writer.begin({**about, **self._about(), "obstacles": obstacle})

    def _about(self) -> dict[str, Any]:
        return {
            "examples": self.examples,
            "layout": plain(self.layout.as_json()),
            "optimizer": {"name": self._linearizer.name},
            "every": self.every,
            "seed": self.seed,
            "augmentation": self._augmentation,
            "training": plain(self._training),
        }

    def _finish(self, *, closed: bool) -> None:
        if self._closed:
            return
        self._closed = True
        self._watch.close()
        for hook in self._hooks:
            hook.remove()
        try:
            self._check.finish()
        finally:
            self._mark()
            self._writer.finish(whole=not self._broken, closed=closed)

    def _mark(self) -> None:
        found = self._check.found
        if found is not None and self._writer.has_begun:
            self._writer.mark("unexplained", vars(found))


def _moved(step: int) -> RunError:
    return RunError(
        f"the weights changed between steps {step - 1} and {step}, outside of `with recorder.step(…):`: change them "
        "inside the block, or close the recorder and record another run"
    )
