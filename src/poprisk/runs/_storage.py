"""The files of a run, in a directory or in memory: what they hold, and how they are written while the run goes on."""

import copy
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from poprisk._core.store import (
    TensorFile,
    check_size,
    located,
    read_tensors,
    writable_directory,
    write_json,
    write_tensors,
    write_text,
)
from poprisk.errors import DataError, RunError
from poprisk.runs import _checkpoint as checkpoint
from poprisk.runs._layout import Layout
from poprisk.runs._manifest import (
    FORMAT_VERSION,
    Content,
    checked,
    digest,
    migrated_content,
    migrated_manifest,
    require_present,
)
from poprisk.runs._segment import SegmentWriter
from poprisk.runs._step import StepRecord

MANIFEST = "manifest.json"
_LEFTOVERS = ("start.safetensors", "segment-*.safetensors", "held-back-*.safetensors", "kept.safetensors", ".*.tmp")
_BESIDE = ("held_back", "kept")
"""Entries of a manifest that name a file beside the record: the state of a held-back choice, and its outcome."""


class MemoryStorage:
    """The files of a run, kept in memory."""

    path: Path | None = None

    def __init__(self) -> None:
        self._files: dict[str, Content] = {}
        self._manifest: dict[str, Any] | None = None

    def write(self, name: str, tensors: dict[str, Tensor], notes: Any) -> dict[str, Any]:
        """Keep tensors on the CPU."""
        self._files[name] = ({key: tensor.detach().cpu() for key, tensor in tensors.items()}, notes)
        return {"name": name}

    def read(self, record: dict[str, Any]) -> Content:
        """What was written under that name."""
        return self._files[record["name"]]

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replace the manifest."""
        self._manifest = copy.deepcopy(manifest)

    def discard(self, record: dict[str, Any]) -> None:
        """Forget a file."""
        self._files.pop(record["name"], None)

    def read_manifest(self) -> dict[str, Any] | None:
        """A copy of the manifest."""
        return copy.deepcopy(self._manifest)


class DirectoryStorage:
    """The files of a run in a directory, each written atomically; the manifest lists them with size and SHA-256.

    The manifest is written last. A process killed at any moment leaves the manifest of the last complete segment, and
    perhaps a file that no manifest lists, which the next recorder overwrites.
    """

    def __init__(self, path: str | Path) -> None:
        self.path: Path | None = Path(path)
        self._folder = Path(path)
        self._version = FORMAT_VERSION

    def check_is_free(self) -> None:
        """Check that a new run can be written to the directory.

        Raises:
            RunError: it holds a run, or files other than those left by a killed recorder.
        """
        if (self._folder / MANIFEST).exists():
            raise RunError(
                f"{self._folder} already holds a run: record into another directory, or continue it with resume=True"
            )
        if self._folder.is_dir():
            strange = next((f for f in self._folder.iterdir() if not any(f.match(p) for p in _LEFTOVERS)), None)
            if strange is not None:
                raise RunError(f"{self._folder} holds other files ({strange.name}): record into an empty directory")

    def prepare(self) -> None:
        """Create the directory, and remove what a killed recorder left before its first manifest.

        Raises:
            RunError: it holds a run of an older format.
        """
        writable_directory(self._folder)
        named = self._named_files()
        require_present(self._version, self._folder)
        for pattern in _LEFTOVERS:
            for file in self._folder.glob(pattern):
                if file.name not in named:
                    file.unlink()

    def write(self, name: str, tensors: dict[str, Tensor], notes: Any) -> dict[str, Any]:
        """Write a file of tensors."""
        return asdict(write_tensors(self._folder / f"{name}.safetensors", tensors, notes))

    def read(self, record: dict[str, Any]) -> Content:
        """Read a file, check its size and hash, and convert it to the current format."""
        return migrated_content(read_tensors(self._folder, TensorFile(**record)), self._version)

    def check_sizes(self, records: list[dict[str, Any]]) -> None:
        """Check that no file is missing or truncated, without reading them."""
        for record in records:
            check_size(self._folder, TensorFile(**record))

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replace the manifest, with a hash of itself; indented if the run is closed."""
        signed = {**manifest, "sha256": digest(manifest)}
        if manifest["closed"]:
            write_json(self._folder / MANIFEST, signed)
        else:
            write_text(self._folder / MANIFEST, json.dumps(signed, ensure_ascii=False))

    def discard(self, record: dict[str, Any]) -> None:
        """Remove a file that the manifest no longer lists."""
        (self._folder / record["name"]).unlink(missing_ok=True)

    def read_manifest(self) -> dict[str, Any] | None:
        """The manifest, checked, in the present format.

        Raises:
            DataError: it is damaged, of another kind, or of a format this version does not know.
        """
        path = self._folder / MANIFEST
        try:
            manifest = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DataError(f"{path} is damaged: it is not JSON ({error}); restore it from a copy") from None
        if not isinstance(manifest, dict) or manifest.get("kind") != "run":
            raise DataError(f"{path} is not the manifest of a run")
        manifest = checked(manifest, path)
        self._version = manifest["format_version"]
        return migrated_manifest(manifest)

    def _named_files(self) -> set[str]:
        manifest = self.read_manifest()
        return set() if manifest is None else {record["name"] for record in all_records(manifest)}


Storage = DirectoryStorage | MemoryStorage
"""What a run reads from and a recorder writes to."""


def file_records(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The files of the record: the start and all segments."""
    return [manifest["start"], *(segment["file"] for segment in manifest["segments"])]


def all_records(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """All files that a manifest lists, with those beside the record."""
    return [*file_records(manifest), *(manifest[name] for name in _BESIDE if name in manifest)]


def copy_beside(manifest: dict[str, Any], source: "Storage", target: "Storage") -> None:
    """Copy the files beside the record, and name the copies in the manifest."""
    for name in _BESIDE:
        if name in manifest:
            file = manifest[name]["name"].removesuffix(".safetensors")
            manifest[name] = target.write(file, *source.read(manifest[name]))


def relocate(manifest: dict[str, Any], old: Path | None, new: Path | None) -> None:
    """Make the path of the problem's script, relative to directory ``old``, relative to directory ``new``."""
    source = manifest["problem"] and manifest["problem"]["source"]
    if source:
        manifest["problem"]["source"] = located(source, old, new)


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
        self.storage, self.num_steps = storage, 0
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
        self._manifest["kept"] = self.storage.write("kept", *content)
        self.storage.write_manifest(self._manifest)

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
            self.storage.write_manifest(self._manifest)

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

    def finish(self, *, whole: bool, closed: bool) -> None:
        """Write the remaining steps (unless the last one is not ``whole``), and whether the run was ``closed``."""
        if self._manifest is None:
            return
        self._finished = True
        if whole:
            self.flush()
        self.wait()
        if self._thread is not None:
            self._thread.shutdown()
        self._manifest["closed"] = closed
        self.storage.write_manifest(self._manifest)

    def wait(self) -> None:
        """Wait until all segments so far are on disk.

        Raises:
            OSError: they could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def flush(self) -> None:
        """Write the steps so far as a segment."""
        segment = self._segment
        if self._manifest is None or not segment.records:
            return
        tensors = segment.tensors() | checkpoint.capture(self._layout, self._parameters, self._optimizer)
        tensors |= checkpoint.capture_buffers(self._module, self._first_buffers)
        notes = {"start_options": segment.start_options, "options": segment.options}
        beside = None if self.beside is None else self.beside()
        written = (self._manifest, segment.start, self.num_steps, tensors, notes, beside)
        self.wait()
        if isinstance(self.storage, MemoryStorage):
            self._write(*written)
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="poprisk-run")
            self._pending = self._thread.submit(self._write, *written)
        self._segment = self._new_segment()

    def _write(
        self,
        manifest: dict[str, Any],
        start: int,
        stop: int,
        tensors: dict[str, Tensor],
        notes: Any,
        beside: Content | None,
    ) -> None:
        file = self.storage.write(f"segment-{start:08d}", tensors, notes)
        manifest["segments"].append({"start": start, "stop": stop, "file": file})
        manifest["num_steps"] = stop
        old = [manifest.pop(name) for name in _BESIDE if name in manifest]  # of an earlier step
        if beside is not None:
            manifest["held_back"] = self.storage.write(f"held-back-{stop:08d}", *beside)
        self.storage.write_manifest(manifest)
        for record in old:
            self.storage.discard(record)

    def _note_buffers(self) -> None:
        """Copies, because batch normalization changes its statistics without changing their version counter."""
        self._first_buffers = {name: b.detach().clone() for name, b in self._module.named_buffers()}

    def _new_segment(self) -> SegmentWriter:
        return SegmentWriter(self.num_steps, self._examples, list(self._options))
