"""Writes a run while it goes on: segment by segment, each before the manifest that lists it."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from poprisk._core.store import WriterLock, writable_directory
from poprisk.runs import _checkpoint as checkpoint
from poprisk.runs._layout import Layout
from poprisk.runs._manifest import Content
from poprisk.runs._segment import SegmentWriter
from poprisk.runs._step import StepRecord
from poprisk.runs._storage import BESIDE, DirectoryStorage, MemoryStorage, Storage, all_records

SEGMENT_SECONDS = 30.0
"""Time after which the steps so far are written even if they do not fill a segment: what a kill can lose."""
now = time.monotonic


class RunWriter:
    """Writes complete segments, each before the manifest that lists it: a run killed at any moment can be opened.

    A directory is written in a separate thread, at most one segment behind, because a disk can be slower than a
    training step; errors are raised at the next segment or at the end.

    Args:
        storage: Where the run is written.
        layout: Layout of the flat weights.
        module: The module that is trained.
        parameters: Its parameters in the layout's order.
        optimizer: The optimizer of these parameters.
        examples: Number of training examples.
        segment_steps: Number of steps per segment.
    """

    def __init__(
        self,
        storage: Storage,
        layout: Layout,
        module: nn.Module,
        parameters: Sequence[Tensor],
        optimizer: Optimizer,
        examples: int,
        segment_steps: int,
    ) -> None:
        self.storage, self.num_steps, self._written = storage, 0, now()
        self.lock: WriterLock | None = None
        self.beside: Callable[[], Content] | None = None
        """What to write with every segment, for whoever continues the run; only the last one is kept."""
        self._layout, self._module, self._parameters, self._optimizer = layout, module, parameters, optimizer
        self._examples, self._segment_steps = examples, segment_steps
        self._manifest: dict[str, Any] | None = None
        self._finished = False
        self._options: list[dict[str, Any]] = []
        self._raw: dict[int, list[Any]] = {}
        self._first_buffers: dict[str, Tensor | None] = {}
        self._segment = SegmentWriter(0, examples, [])
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def claim(self, *, make: bool = False) -> None:
        """Be the only writer of the directory, until the run is finished; one that does not exist is made if asked for.

        Raises:
            RunError: another process writes into it; the message says which.
        """
        folder = self.storage.path
        if folder is not None and (make or folder.is_dir()) and (self.lock is None or not self.lock.is_held):
            self.lock = WriterLock(writable_directory(folder), take_over=not self._finished)

    def release(self) -> None:
        """Let others write into the directory."""
        if self.lock is not None:
            self.lock.release()

    @property
    def has_begun(self) -> bool:
        """Whether there is a manifest."""
        return self._manifest is not None

    def read_beside(self, name: str) -> Content | None:
        """A file beside the record: ``"held_back"`` or ``"kept"``."""
        record = None if self._manifest is None else self._manifest.get(name)
        return None if record is None else self.storage.read(record)

    def keep(self, content: Content) -> None:
        """Write the outcome beside the record, and the manifest that lists it."""
        assert self._manifest is not None
        self.wait()
        if self._finished:
            self.claim()
        try:
            self._manifest["kept"] = self.storage.write("kept", *content)
            self._write_manifest(self._manifest)
        finally:
            if self._finished:
                self.release()

    @property
    def is_finished(self) -> bool:
        """Whether nothing is recorded any more."""
        return self._finished

    def mark(self, name: str, value: Any) -> None:
        """Write an entry into the manifest, unless it is there."""
        assert self._manifest is not None
        if self._manifest.get(name) != value:
            self.wait()
            self._manifest[name] = value
            self._write_manifest(self._manifest)

    def begin(self, about: dict[str, Any]) -> None:
        """The first checkpoint, and the manifest."""
        if isinstance(self.storage, DirectoryStorage):
            self.storage.check_is_free()
            if self.lock is None:
                self.claim(make=True)
                self.storage.check_is_free()  # nobody came first
            self.storage.prepare()
        start = checkpoint.capture(self._layout, self._parameters, self._optimizer)
        self._note_buffers()
        self._options = [checkpoint.plain_options(group) for group in self._optimizer.param_groups]
        about["optimizer"]["groups"] = list(self._options)
        file = self.storage.write("start", start, None)
        self._manifest = {**about, "start": file, "segments": [], "num_steps": 0, "closed": False}
        self._write_manifest(self._manifest)
        self._segment = self._new_segment()

    def resume(
        self, manifest: dict[str, Any], num_steps: int, last: dict[str, Tensor], options: list[dict[str, Any]]
    ) -> None:
        """Restore module and optimizer from the run's last checkpoint, and continue from there."""
        if isinstance(self.storage, DirectoryStorage):
            self.storage.prepare()
        checkpoint.restore(last, self._layout, self._module, self._parameters, self._optimizer, options)
        self._manifest, self._options, self.num_steps = manifest, options, num_steps
        self._note_buffers()
        changed = [key for key in last if key.startswith(checkpoint.MODULE_BUFFER)]
        self._first_buffers |= {key.removeprefix(checkpoint.MODULE_BUFFER): None for key in changed}
        self._segment = self._new_segment()

    def add(self, record: StepRecord) -> None:
        """Add the step that was just taken."""
        for g, group in enumerate(self._optimizer.param_groups):
            raw = [value for key, value in group.items() if key != "params"]
            if raw == self._raw.get(g):
                continue
            if not any(isinstance(value, Tensor) for value in raw):  # tensors are changed in place
                self._raw[g] = raw
            old, new = self._options[g], checkpoint.plain_options(group)
            if new != old:
                changed = {key: value for key, value in new.items() if key not in old or old[key] != value}
                self._segment.options.append([self.num_steps, g, changed])
                self._options[g] = new
        self._segment.records.append(record)
        self.num_steps += 1
        if len(self._segment.records) >= self._segment_steps:
            self.flush()
        elif self.lock is not None and now() - self._written >= SEGMENT_SECONDS:
            self.flush(whole=False)

    def finish(self, *, whole: bool, closed: bool) -> None:
        """Write the remaining steps (unless the last one is not ``whole``), and whether the run was ``closed``."""
        try:
            if self._manifest is None:
                return
            self._finished = True
            if whole:
                self.flush()
            self.wait()
            if self._thread is not None:
                self._thread.shutdown()
            self._manifest["closed"] = closed
            self._write_manifest(self._manifest)
        finally:
            self.release()

    def wait(self) -> None:
        """Wait until all segments so far are on disk.

        Raises:
            OSError: they could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def flush(self, *, whole: bool = True) -> None:
        """Write the steps so far as a segment; if it is not ``whole``, the next one replaces it and begins with it."""
        segment = self._segment
        if self._manifest is None or not segment.records:
            return
        tensors = segment.tensors() | checkpoint.capture(self._layout, self._parameters, self._optimizer)
        tensors |= checkpoint.capture_buffers(self._module, self._first_buffers)
        notes = {"start_options": segment.start_options, "options": list(segment.options)}
        beside = None if self.beside is None else self.beside()
        name = f"segment-{segment.start:08d}" + ("" if whole else f"-{self.num_steps:08d}")
        written = (self._manifest, name, segment.start, self.num_steps, tensors, notes, beside)
        self.wait()
        if isinstance(self.storage, MemoryStorage):
            self._write(*written)
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="poprisk-run")
            self._pending = self._thread.submit(self._write, *written)
        self._written = now()
        if whole:
            self._segment = self._new_segment()

    def _write_manifest(self, manifest: dict[str, Any]) -> None:
        if self.lock is not None:
            self.lock.require()
        self.storage.write_manifest(manifest)

    def _write(
        self,
        manifest: dict[str, Any],
        name: str,
        start: int,
        stop: int,
        tensors: dict[str, Tensor],
        notes: Any,
        beside: Content | None,
    ) -> None:
        if self.lock is not None:
            self.lock.require()
        file = self.storage.write(name, tensors, notes)
        segments, old = manifest["segments"], [manifest.pop(name) for name in BESIDE if name in manifest]
        if segments and segments[-1]["start"] == start:
            old.append(segments.pop()["file"])
        segments.append({"start": start, "stop": stop, "file": file})
        manifest["num_steps"] = stop
        if beside is not None:
            manifest["held_back"] = self.storage.write(f"held-back-{stop:08d}", *beside)
        self._write_manifest(manifest)
        listed = {record["name"] for record in all_records(manifest)}
        for record in old:
            if record["name"] not in listed:
                self.storage.discard(record)

    def _note_buffers(self) -> None:
        """Copies, because batch normalization changes its statistics without changing their version counter."""
        self._first_buffers = {name: b.detach().clone() for name, b in self._module.named_buffers()}

    def _new_segment(self) -> SegmentWriter:
        return SegmentWriter(self.num_steps, self._examples, list(self._options))
