"""A run on its way to its files: steps are collected, and written a segment at a time with the checkpoint after it."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from poprisk.runs import _checkpoint as checkpoint
from poprisk.runs._layout import Layout
from poprisk.runs._run import Run
from poprisk.runs._segment import SegmentWriter
from poprisk.runs._step import StepRecord
from poprisk.runs._storage import DirectoryStorage, MemoryStorage


class RunWriter:
    """Writes whole segments, each before the manifest that names it: a kill at any moment leaves a run that opens.

    A directory is written in a thread of its own, one segment behind at most, because waiting for a disk takes longer
    than many a training step; what goes wrong there is raised at the next segment, or at the end.

    Args:
        storage: Where to.
        layout: Of the flat weights.
        module: That is trained.
        parameters: In the layout's order.
        optimizer: Of these parameters.
        examples: How many training examples there are.
        segment_steps: Steps in one segment.
    """

    def __init__(
        self,
        storage: DirectoryStorage | MemoryStorage,
        layout: Layout,
        module: nn.Module,
        parameters: Sequence[Tensor],
        optimizer: Optimizer,
        examples: int,
        segment_steps: int,
    ) -> None:
        self.storage, self.num_steps = storage, 0
        self._layout, self._module, self._parameters, self._optimizer = layout, module, parameters, optimizer
        self._examples, self._segment_steps = examples, segment_steps
        self._manifest: dict[str, Any] | None = None
        self._options: list[dict[str, Any]] = []
        self._raw: dict[int, list[Any]] = {}
        self._first_buffers: dict[str, Tensor | None] = {}
        self._segment = SegmentWriter(0, examples, [])
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there is a manifest."""
        return self._manifest is not None

    def begin(self, about: dict[str, Any]) -> None:
        """The first checkpoint, and the manifest."""
        if isinstance(self.storage, DirectoryStorage):
            self.storage.prepare()
        start = checkpoint.capture(self._layout, self._parameters, self._optimizer)
        self._note_buffers()
        self._options = [checkpoint.plain_options(group) for group in self._optimizer.param_groups]
        about["optimizer"]["groups"] = list(self._options)
        file = self.storage.write("start", start, None)
        self._manifest = {**about, "start": file, "segments": [], "num_steps": 0, "closed": False}
        self.storage.write_manifest(self._manifest)
        self._segment = self._new_segment()

    def resume(self, manifest: dict[str, Any]) -> None:
        """Put module and optimizer where the run's last checkpoint was, and go on from there."""
        if isinstance(self.storage, DirectoryStorage):
            self.storage.prepare()
        run = Run(self.storage)
        last, options = run.checkpoint(run.num_steps), run.options(run.num_steps)
        checkpoint.restore(last, self._layout, self._module, self._parameters, self._optimizer, options)
        self._manifest, self._options, self.num_steps = manifest, options, run.num_steps
        self._note_buffers()
        changed = [key for key in last if key.startswith(checkpoint.MODULE_BUFFER)]
        self._first_buffers |= {key.removeprefix(checkpoint.MODULE_BUFFER): None for key in changed}
        self._segment = self._new_segment()

    def add(self, record: StepRecord) -> None:
        """One more step, just taken."""
        for g, group in enumerate(self._optimizer.param_groups):
            raw = [value for key, value in group.items() if key != "params"]
            if raw == self._raw.get(g):
                continue
            if not any(isinstance(value, Tensor) for value in raw):  # a tensor is the same object with another value
                self._raw[g] = raw
            old, new = self._options[g], checkpoint.plain_options(group)
            if new != old:
                changed = {key: value for key, value in new.items() if key not in old or old[key] != value}
                self._segment.options.append([self.num_steps, g, changed])
                self._options[g] = new
        self._segment.records.append(record)
        self.num_steps += 1
        if len(self._segment.records) >= self._segment_steps:
            self._flush()

    def flush(self) -> None:
        """Write the steps so far as a segment of their own."""
        self._flush()

    def finish(self, *, whole: bool, closed: bool) -> None:
        """Write what is left (unless the last step is not ``whole``) and say whether the run ended as it should."""
        if self._manifest is None:
            return
        if whole:
            self._flush()
        self.wait()
        if self._thread is not None:
            self._thread.shutdown()
        self._manifest["closed"] = closed
        self.storage.write_manifest(self._manifest)

    def wait(self) -> None:
        """Until all that was handed over is on the disk.

        Raises:
            OSError: it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _flush(self) -> None:
        segment = self._segment
        if self._manifest is None or not segment.records:
            return
        tensors = segment.tensors() | checkpoint.capture(self._layout, self._parameters, self._optimizer)
        tensors |= checkpoint.capture_buffers(self._module, self._first_buffers)
        notes = {"start_options": segment.start_options, "options": segment.options}
        self.wait()
        if isinstance(self.storage, MemoryStorage):
            self._write(self._manifest, segment.start, self.num_steps, tensors, notes)
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="poprisk-run")
            self._pending = self._thread.submit(
                self._write, self._manifest, segment.start, self.num_steps, tensors, notes
            )
        self._segment = self._new_segment()

    def _write(self, manifest: dict[str, Any], start: int, stop: int, tensors: dict[str, Tensor], notes: Any) -> None:
        file = self.storage.write(f"segment-{start:08d}", tensors, notes)
        manifest["segments"].append({"start": start, "stop": stop, "file": file})
        manifest["num_steps"] = stop
        self.storage.write_manifest(manifest)

    def _note_buffers(self) -> None:
        """Version counters would not do: batch normalization writes its statistics past them."""
        self._first_buffers = {name: b.detach().clone() for name, b in self._module.named_buffers()}

    def _new_segment(self) -> SegmentWriter:
        return SegmentWriter(self.num_steps, self._examples, list(self._options))
