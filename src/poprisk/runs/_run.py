r"""A recorded run: what happened, immutable, opened from memory or from disk."""

from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from poprisk._core.arguments import checked
from poprisk._core.autodiff import FlatModel
from poprisk._core.html import card, sparkline
from poprisk._core.store import WriterLock
from poprisk.errors import DataError, PopRiskError, RunError
from poprisk.runs import _checkpoint as checkpoint
from poprisk.runs._data_check import check_converged
from poprisk.runs._gradient_check import Unexplained
from poprisk.runs._held_back import Kept
from poprisk.runs._layout import Layout
from poprisk.runs._problem import Problem
from poprisk.runs._segment import SegmentReader
from poprisk.runs._step import AffineStep
from poprisk.runs._storage import DirectoryStorage, Storage, all_records, copy_beside, file_records, relocate

_QUICK = 64 * 2**20
"""Size of the files up to which the summary in a notebook reads the losses."""


class Run:
    r"""What happened in a training run, step by step.

    Weights, buffers and steps are flat vectors over the trainable parameters, in the order of
    ``Module.named_parameters``, on the CPU whatever device the run was recorded on. If only checkpoints were recorded,
    the steps between them are recomputed on demand, from one checkpoint to the next, which must agree bit by bit;
    ``tolerate=True`` accepts a deviation, e.g. on another machine.

    A run is made by :func:`~poprisk.runs.train`, :meth:`Recorder.close <poprisk.runs.Recorder.close>` or :meth:`load`.

    >>> from poprisk.runs import Problem, train
    >>> problem = Problem(torch.nn.Linear, "squared", torch.eye(2), torch.ones(2, 1),
    ...                   arguments={"in_features": 2, "out_features": 1})
    >>> run = train(problem, lambda params: torch.optim.SGD(params, lr=0.1), steps=3, progress=False)
    >>> run.num_steps, run.weights(3).shape, bool(run.losses[2] < run.losses[0])
    (3, torch.Size([3]), True)
    """

    _replay_segment: ClassVar[Callable[..., SegmentReader]]
    """Recomputes the steps between two checkpoints; set by :mod:`poprisk.runs._replay`, which imports this module."""

    def __init__(
        self, storage: Storage, *, problem: Problem | None = None, tolerate: bool = False, trust: bool = False
    ) -> None:
        manifest = storage.read_manifest()
        if manifest is None:
            raise DataError(
                f"{getattr(storage, 'path', 'the storage')} is not a recorded run: it has no manifest; "
                "pass the directory that poprisk train or train(path=…) wrote"
            )
        self._storage, self._manifest, self._tolerate, self._trust = storage, manifest, tolerate, trust
        self.layout = Layout.from_json(manifest["layout"])
        if problem is not None and manifest["problem"] is not None:
            problem.check_is(manifest["problem"])
        elif problem is not None and len(problem) != manifest["examples"]:
            raise DataError(
                f"the run has {manifest['examples']} training examples, but problem {problem.name!r} has "
                f"{len(problem)}: pass the problem that was trained"
            )
        self._problem = problem
        self._content = lru_cache(maxsize=4)(self._read)
        self._replayed = lru_cache(maxsize=2)(self._replay)

    @classmethod
    @checked
    def load(
        cls,
        path: str | Path,
        *,
        problem: Problem | None = None,
        tolerate: bool = False,
        trust: bool = False,
        salvage: bool = False,
    ) -> "Run":
        """Open a run from its directory. If the process was killed, the run ends with its last complete segment.

        Nothing is executed by opening a run. Its problem is rebuilt when it is needed, if this user has recorded with
        the same call on this machine; otherwise pass ``problem``, or ``trust=True``.

        Args:
            path: The directory.
            problem: The problem that was trained, if it cannot be rebuilt from its import path; its data are checked.
            tolerate: Whether to accept replayed weights that deviate from the recorded checkpoints.
            trust: Whether to import and call what the run names, whoever wrote it: it may do anything that you may.
            salvage: Whether to open a damaged run up to its last good segment; every file is read.

        Raises:
            DataError: there is no run, a file is missing or damaged, or the problem is another one.
        """
        storage = DirectoryStorage(path, salvage=salvage)
        run = cls(storage, problem=problem, tolerate=tolerate, trust=trust)
        storage.check_sizes(all_records(run._manifest))
        return run

    @checked
    def save(self, path: str | Path) -> "Run":
        """Write the run into a new directory, e.g. one that was recorded in memory, and open it there.

        Raises:
            RunError: the directory is not empty.
        """
        target = DirectoryStorage(path)
        target.check_is_free()
        target.prepare()
        manifest = self.manifest
        relocate(manifest, self.path, target.path)
        with WriterLock(path):
            manifest["start"] = target.write("start", *self._storage.read(manifest["start"]))
            for segment in manifest["segments"]:
                name = f"segment-{segment['start']:08d}"
                segment["file"] = target.write(name, *self._storage.read(segment["file"]))
            copy_beside(manifest, self._storage, target)
            target.write_manifest(manifest)
        if self._problem is not None:
            self._problem.remember()
        return Run(target, problem=self._problem, tolerate=self._tolerate, trust=self._trust)

    @property
    def path(self) -> Path | None:
        """The directory of the run; None if it is in memory."""
        return getattr(self._storage, "path", None)

    @property
    def manifest(self) -> dict[str, Any]:
        """Environment, versions, problem, optimizer, seeds, files: a copy of what is in ``manifest.json``."""
        import copy

        return copy.deepcopy(self._manifest)

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return self._manifest["num_steps"]

    @property
    def num_examples(self) -> int:
        """Number n of training examples."""
        return self._manifest["examples"]

    @property
    def num_trained(self) -> int:
        """Number of training examples without those that ``train(…, hold_back=…)`` held back."""
        training = self._manifest["training"]
        held = training.get("hold_back") if isinstance(training, dict) else None
        return self.num_examples - (held["examples"] if isinstance(held, dict) else 0)

    @property
    def num_weights(self) -> int:
        """Number d of trainable weights."""
        return self.layout.size

    @property
    def is_dense(self) -> bool:
        """Whether every step's weights were recorded."""
        return self._manifest["every"] == 1

    @property
    def checkpoints(self) -> list[int]:
        """The steps k at which weights and optimizer state were recorded, from 0 to ``num_steps``."""
        return [0, *(segment["stop"] for segment in self._manifest["segments"])]

    @cached_property
    def problem(self) -> Problem:
        """The problem that was trained.

        Raises:
            RunError: the problem was not recorded or cannot be rebuilt; the message says what to pass to :meth:`load`.
            UntrustedError: the run names code that this user has not run on this machine.
        """
        if self._problem is not None:
            return self._problem
        description = self._manifest["problem"]
        if description is None:
            raise RunError(
                "the run was recorded without a problem: open it with Run.load(path, problem=…), a problem with "
                f"{self.num_examples} training examples"
            )
        try:
            return Problem.from_description(description, self.path, trust=self._trust)
        except DataError as error:
            raise RunError(f"open the run with Run.load(path, problem=…): {error}") from None

    @cached_property
    def kept(self) -> Kept | None:
        """What :class:`~poprisk.KeepBest` kept: the best averaged weights; None without held-back examples.

        It is there after ``train(…, hold_back=…)``, or ``keeper.finish()`` in a loop of your own. The steps of the run
        are not changed by it: ``weights(num_steps)`` are those of the last step.
        """
        record = self._manifest.get("kept")
        return None if record is None else Kept.from_content(self._storage.read(record), self.num_examples)

    @cached_property
    def trained(self) -> Bool[Tensor, "n"]:
        """Which examples steps may have trained on: all but those that were held back."""
        trained = torch.ones(self.num_examples, dtype=torch.bool)
        if self.kept is not None:
            trained[self.kept.held] = False
        return trained

    def module(self, dtype: torch.dtype | None = None) -> nn.Module:
        """A new module, as in the run but with the problem's initial weights, on the device of the examples.

        Submodules that were in evaluation mode are in evaluation mode again. ``layout.split(weights(k))`` gives the
        parameters before step k.

        Args:
            dtype: Data type of the weights; default: the recorded one.

        Raises:
            RunError: the problem is not known, or its model differs in parameter names, shapes or frozen values.
        """
        return checkpoint.rebuild_module(self.problem, self._manifest, self.layout).to(dtype=dtype)

    def model(self, dtype: torch.dtype | None = None) -> FlatModel:
        """The model as functions of its flat weights, with the problem's loss.

        Raises:
            RunError: as for :meth:`module`.
        """
        return FlatModel(self.module(dtype), self.problem.loss)

    @property
    def obstacles(self) -> tuple[str, ...]:
        """The reasons why exact analyses are not possible; empty if they are."""
        found = self.unexplained
        return (*self._manifest["obstacles"], *(() if found is None else (found.reason,)))

    @property
    def unexplained(self) -> Unexplained | None:
        """From which step on the recorded problem does not explain the gradients, and why; None if it does."""
        found = self._manifest.get("unexplained")
        return None if found is None else Unexplained(**found)

    def require_exact(self, stop: int | None = None) -> None:
        """Check that exact analyses of this run, or of its steps before ``stop``, are possible.

        Raises:
            RunError: they are not; the message gives the first of the ``obstacles``.
        """
        found = self.unexplained
        agrees = found is None or (stop is not None and stop <= found.step)
        obstacles = self._manifest["obstacles"] if agrees else self.obstacles
        if obstacles:
            until = "" if agrees or found is None or not found.step else f" (possible up to stop={found.step})"
            raise RunError(f"no exact analysis of this run is possible: {obstacles[0]}{until}")

    @property
    def augmented(self) -> bool:
        """Whether the inputs of the steps were augmented."""
        return self._manifest["augmentation"] is not None

    @cached_property
    def losses(self) -> Float[Tensor, "steps"]:
        """The loss of each step's batch before the step, in float64; NaN if the loop did not set it."""
        parts = [self._segment(i).losses for i in range(len(self._manifest["segments"]))]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)

    def last_losses(self, steps: int) -> Float[Tensor, "steps"]:
        """The last of :attr:`losses`, read from the files that have them alone."""
        if "losses" in vars(self):
            return self.losses[-steps:]
        segments = self._manifest["segments"]
        wanted = [i for i, segment in enumerate(segments) if segment["stop"] > self.num_steps - steps]
        return torch.cat([self._segment(i).losses for i in wanted])[-steps:]

    def weights(self, k: int) -> Float[Tensor, "d"]:
        """The flat weights before step k; ``weights(num_steps)`` are the final weights."""
        self._check(k, self.num_steps)
        at = self.checkpoints
        if k in at:
            return checkpoint.weights_of(self._checkpoint(at.index(k)))
        return self._dense(k).weights(k)

    def buffer(self, k: int) -> Float[Tensor, "d"]:
        """The momentum buffer v before step k; zero before the first step and without momentum."""
        self._check(k, self.num_steps)
        at = self.checkpoints
        if k in at:
            return checkpoint.buffer_of(self._checkpoint(at.index(k)), self.layout)
        return self._dense(k).buffer_after(k - 1)

    def step(self, k: int) -> AffineStep:
        """Step k as an affine map of its gradient."""
        self._check(k, self.num_steps - 1)
        return self._dense(k).step(k)

    def batch(self, k: int) -> Int[Tensor, "b"]:
        """Indices of the training examples in step k's batch."""
        return self.recorded(k).batch(k)

    def recorded(self, k: int) -> SegmentReader:
        """The file that contains step k, as it was written: batches, factors and losses, never recomputed."""
        self._check(k, self.num_steps - 1)
        return self._segment(next(i for i, s in enumerate(self._manifest["segments"]) if k < s["stop"]))

    def options(self, k: int) -> list[dict[str, Any]]:
        """Each parameter group's options at step k; ``options(num_steps)`` are those of the last step."""
        self._check(k, self.num_steps)
        if not self.num_steps:
            return [dict(group) for group in self._manifest["optimizer"]["groups"]]
        last = min(k, self.num_steps - 1)
        return self.recorded(last).options(last)

    def checkpoint(self, k: int) -> dict[str, Tensor]:
        """Weights and optimizer state before step k, which must be one of ``checkpoints``."""
        if k not in self.checkpoints:
            raise DataError(f"k must be one of the run's checkpoints, {self.checkpoints[:20]}, got {k}")
        return self._checkpoint(self.checkpoints.index(k))

    def verify(self) -> None:
        """Read every file and check its hash.

        Raises:
            DataError: a file is missing or damaged; the message names it.
        """
        files = file_records(self._manifest)
        for i in range(len(files)):
            self._read(i)
        for record in all_records(self._manifest)[len(files) :]:
            self._storage.read(record)

    def __repr__(self) -> str:
        kind = "dense" if self.is_dense else f"checkpoints every {self._manifest['every']}"
        where = "in memory" if self.path is None else str(self.path)
        return f"Run({self.num_steps} steps, {self.num_weights} weights, {kind}, {where})"

    def _repr_html_(self) -> str:
        about, optimizer = self._manifest, self._manifest["optimizer"]
        rates = sorted({f"{group['lr']:g}" for group in optimizer["groups"] if "lr" in group})
        rows = {
            "steps": f"{self.num_steps}" + ("" if about["closed"] else " (still running, or interrupted)"),
            "examples": self.num_examples,
            "weights": self.num_weights,
            "optimizer": optimizer["name"] + (f", initial lr {' and '.join(rates)}" if rates else ""),
            "recorded": "every step" if self.is_dense else f"a checkpoint every {about['every']} steps",
            "location": "in memory" if self.path is None else self.path,
            "started": about["created"],
            "versions": f"poprisk {about['environment']['poprisk']}, torch {about['environment']['torch']}",
            "exact analyses": f"not possible: {self.obstacles[0]}" if self.obstacles else "possible",
        }
        losses, notes = self._losses_to_show()
        if losses:
            rows["batch loss"] = f"{losses[0]:.4g} → {losses[-1]:.4g}"
        name = (about["problem"] or {}).get("name", "no problem was recorded")
        return card(f"Run: {name}", rows, picture=sparkline(losses, "loss of each step's batch"), notes=notes)

    def _losses_to_show(self) -> tuple[list[float], list[str]]:
        """The finite losses, and a note if the files are too large or damaged."""
        files = [segment["file"] for segment in self._manifest["segments"]]
        if "losses" not in vars(self) and sum(file.get("size", 0) for file in files) > _QUICK:
            return [], ["losses not shown, because the files are large; run.losses reads them"]
        try:
            return self.losses[self.losses.isfinite()].tolist(), []
        except PopRiskError as error:
            return [], [f"the losses cannot be read: {error}"]

    def _check(self, k: int, last: int) -> None:
        if not hasattr(k, "__index__") or not 0 <= int(k) <= last:
            raise DataError(f"the run has {self.num_steps} steps: k must lie in 0 … {last}, got {k}")

    def _read(self, i: int) -> tuple[dict[str, Tensor], Any]:
        """The content of file i: 0 is the start, i + 1 is segment i."""
        return self._storage.read_part(self._manifest, i)

    def _checkpoint(self, i: int) -> dict[str, Tensor]:
        return self._content(i)[0]

    def _segment(self, i: int) -> SegmentReader:
        tensors, notes = self._content(i + 1)
        start = self._manifest["segments"][i]["start"]
        return SegmentReader(start, tensors, notes, self.layout, self.num_examples)

    def _dense(self, k: int) -> SegmentReader:
        found = self.recorded(k)
        return found if found.is_dense else self._replayed(found.start, found.stop)

    def _replay(self, start: int, stop: int) -> SegmentReader:
        return self._replay_segment(self, start, stop, tolerate=self._tolerate)


def as_run(run: Run | str | Path) -> Run:
    """A run to analyze, as it is or from its directory; a RunError if it has no finite loss and weights at its end."""
    if isinstance(run, str | Path):
        run = Run.load(run)
    if not isinstance(run, Run):
        raise DataError(f"expected a Run or the path of its directory, got {type(run).__name__}: train one")
    check_converged(run)
    return run
