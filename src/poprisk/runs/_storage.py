"""The files of a run, in a directory or in memory: what they hold, and how they are read and checked."""

import copy
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from poprisk._core.store import (
    LOCK,
    TensorFile,
    WriterLock,
    check_size,
    json_digest,
    located,
    member,
    read_json,
    read_tensors,
    writable_directory,
    write_json,
    write_tensors,
    write_text,
)
from poprisk.errors import DataError, RunError
from poprisk.runs._manifest import (
    FORMAT_VERSION,
    Content,
    checked,
    migrated_content,
    migrated_manifest,
    require_present,
)

MANIFEST = "manifest.json"
_LEFTOVERS = ("start.safetensors", "segment-*.safetensors", "held-back-*.safetensors", "kept.safetensors", ".*.tmp")
BESIDE = ("held_back", "kept")
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

    def read_part(self, manifest: dict[str, Any], i: int) -> Content:
        """The start (0) or segment i - 1 of a manifest."""
        return self.read(file_records(manifest)[i])

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

    def __init__(self, path: str | Path, *, salvage: bool = False) -> None:
        self.path: Path | None = Path(path)
        self._folder = Path(path)
        self._version, self._salvage = FORMAT_VERSION, salvage

    def check_is_free(self) -> None:
        """Check that the directory holds no run, and no files but those left by a killed recorder; else a RunError."""
        if (self._folder / MANIFEST).exists():
            raise RunError(
                f"{self._folder} already holds a run: record into another directory, or continue it with resume=True"
            )
        if self._folder.is_dir():
            known = (*_LEFTOVERS, LOCK)
            strange = next((f for f in self._folder.iterdir() if not any(f.match(p) for p in known)), None)
            if strange is not None:
                raise RunError(f"{self._folder} holds other files ({strange.name}): record into an empty directory")

    def prepare(self) -> None:
        """Create the directory, and remove what a killed recorder left; a RunError if a run there has an old format."""
        writable_directory(self._folder)
        named = self._named_files()
        require_present(self._version, self._folder)
        for pattern in _LEFTOVERS:
            for file in self._folder.glob(pattern):
                if file.name not in named:
                    file.unlink()

    def forget(self) -> None:
        """Remove the manifest; the next recorder removes what it listed."""
        (self._folder / MANIFEST).unlink(missing_ok=True)

    def write(self, name: str, tensors: dict[str, Tensor], notes: Any) -> dict[str, Any]:
        """Write a file of tensors."""
        return asdict(write_tensors(self._folder / f"{name}.safetensors", tensors, notes))

    def read(self, record: dict[str, Any]) -> Content:
        """Read a file, check its size and hash, and convert it to the current format."""
        return migrated_content(read_tensors(self._folder, TensorFile(**record)), self._version)

    def read_part(self, manifest: dict[str, Any], i: int) -> Content:
        """Read the start (0) or segment i - 1 of a manifest, and check that it holds what it should."""
        from poprisk.runs._content import check_content

        record = file_records(manifest)[i]
        content = self.read(record)
        check_content(manifest, i, content, str(self._folder / record["name"]))
        return content

    def check_sizes(self, records: list[dict[str, Any]]) -> None:
        """Check that no file is missing or truncated, without reading them."""
        for record in records:
            check_size(self._folder, TensorFile(**record))

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replace the manifest, with a hash of itself; indented if the run is closed."""
        signed = {**manifest, "sha256": json_digest(manifest)}
        if manifest["closed"]:
            write_json(self._folder / MANIFEST, signed)
        else:
            write_text(self._folder / MANIFEST, json.dumps(signed, ensure_ascii=False))

    def discard(self, record: dict[str, Any]) -> None:
        """Remove a file that the manifest no longer lists."""
        member(self._folder, record["name"]).unlink(missing_ok=True)

    def read_manifest(self) -> dict[str, Any] | None:
        """The manifest, checked, in the present format; a DataError if it is damaged, or of another kind or format."""
        path = self._folder / MANIFEST
        try:
            manifest = read_json(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not isinstance(manifest, dict) or manifest.get("kind") != "run":
            raise DataError(f"{path} is not the manifest of a run: pass the directory of a recorded run")
        manifest = checked(manifest, path)
        self._version = manifest["format_version"]
        manifest = migrated_manifest(manifest, path)
        return self._salvaged(manifest) if self._salvage else manifest

    def _salvaged(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """The manifest up to the last segment before the first that is missing or damaged."""
        self.read_part(manifest, 0)
        segments = manifest["segments"]
        good = next((i for i in range(len(segments)) if not self._is_good(manifest, i + 1)), len(segments))
        whole = good == len(segments)
        bare = {k: v for k, v in manifest.items() if k not in BESIDE or (whole and self._is_good(manifest, k))}
        return (
            bare
            if whole
            else {**bare, "segments": segments[:good], "num_steps": segments[good]["start"], "closed": False}
        )

    def _is_good(self, manifest: dict[str, Any], which: int | str) -> bool:
        with suppress(DataError):
            self.read(manifest[which]) if isinstance(which, str) else self.read_part(manifest, which)
            return True
        return False

    def _named_files(self) -> set[str]:
        manifest = self.read_manifest()
        return set() if manifest is None else {record["name"] for record in all_records(manifest)}


def repair(path: str | Path) -> tuple[int, int]:
    """Cut a damaged run after its last good segment; a run whose files are good stays as it is.

    Returns:
        The number of steps now, and before.

    Raises:
        DataError: there is no run, or its manifest or its start is damaged.
        RunError: another process writes it, or it is of an older format.
    """
    if DirectoryStorage(path).read_manifest() is None:
        raise DataError(f"{path} is not a recorded run: it has no manifest; pass the directory of a damaged one")
    with WriterLock(path):
        before, storage = DirectoryStorage(path).read_manifest() or {}, DirectoryStorage(path, salvage=True)
        manifest = storage.read_manifest() or {}
        require_present(storage._version, path)
        if manifest != before:
            storage.write_manifest(manifest)
    return manifest["num_steps"], before["num_steps"]


Storage = DirectoryStorage | MemoryStorage
"""What a run reads from and a recorder writes to."""


def file_records(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The files of the record: the start and all segments."""
    return [manifest["start"], *(segment["file"] for segment in manifest["segments"])]


def all_records(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """All files that a manifest lists, with those beside the record."""
    return [*file_records(manifest), *(manifest[name] for name in BESIDE if name in manifest)]


def copy_beside(manifest: dict[str, Any], source: "Storage", target: "Storage") -> None:
    """Copy the files beside the record, and name the copies in the manifest."""
    for name in BESIDE:
        if name in manifest:
            file = manifest[name]["name"].removesuffix(".safetensors")
            manifest[name] = target.write(file, *source.read(manifest[name]))


def relocate(manifest: dict[str, Any], old: Path | None, new: Path | None) -> None:
    """Make the path of the problem's script, relative to directory ``old``, relative to directory ``new``."""
    source = manifest["problem"] and manifest["problem"]["source"]
    if source:
        manifest["problem"]["source"] = located(source, old, new)
