"""Where a run's files are: a directory, or memory; both with the same two kinds of content, tensors and a manifest."""

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

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
from poprisk.runs._formats import (
    FORMAT_VERSION,
    Content,
    checked,
    digest,
    migrated_content,
    migrated_manifest,
    require_present,
)

MANIFEST = "manifest.json"
_LEFTOVERS = ("start.safetensors", "segment-*.safetensors", ".*.tmp")


class MemoryStorage:
    """Nothing reaches the disk."""

    path: Path | None = None

    def __init__(self) -> None:
        self._files: dict[str, Content] = {}
        self._manifest: dict[str, Any] | None = None

    def write(self, name: str, tensors: dict[str, Tensor], notes: Any) -> dict[str, Any]:
        """Keep tensors, on the CPU."""
        self._files[name] = ({key: tensor.detach().cpu() for key, tensor in tensors.items()}, notes)
        return {"name": name}

    def read(self, record: dict[str, Any]) -> Content:
        """What was written under that name."""
        return self._files[record["name"]]

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replace the manifest."""
        self._manifest = copy.deepcopy(manifest)

    def read_manifest(self) -> dict[str, Any] | None:
        """A copy of the manifest."""
        return copy.deepcopy(self._manifest)


class DirectoryStorage:
    """Files written aside and renamed; the manifest, written last, lists them with size and SHA-256.

    A process killed at any moment leaves the manifest of the last whole segment, and perhaps a file that no manifest
    names, which the next recorder writes over.
    """

    def __init__(self, path: str | Path) -> None:
        self.path: Path | None = Path(path)
        self._folder = Path(path)
        self._version = FORMAT_VERSION

    def check_is_free(self) -> None:
        """Refuses a directory in which something else lives.

        Raises:
            RunError: it holds a run, or files that are not what a killed recorder leaves.
        """
        if (self._folder / MANIFEST).exists():
            raise RunError(
                f"{self._folder} holds a run already: record into another directory, or go on with it by resume=True"
            )
        if self._folder.is_dir():
            strange = next((f for f in self._folder.iterdir() if not any(f.match(p) for p in _LEFTOVERS)), None)
            if strange is not None:
                raise RunError(f"{self._folder} holds other files ({strange.name}): record into an empty directory")

    def prepare(self) -> None:
        """Make the directory, and clear what a killed recorder left before its first manifest.

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
        """Read a file back, its size and hash checked, in the present format."""
        return migrated_content(read_tensors(self._folder, TensorFile(**record)), self._version)

    def check_sizes(self, records: list[dict[str, Any]]) -> None:
        """Refuses a run with missing or truncated files, without reading them."""
        for record in records:
            check_size(self._folder, TensorFile(**record))

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replace the manifest, with a hash of itself; laid out for reading when the run is closed."""
        signed = {**manifest, "sha256": digest(manifest)}
        if manifest["closed"]:
            write_json(self._folder / MANIFEST, signed)
        else:
            write_text(self._folder / MANIFEST, json.dumps(signed, ensure_ascii=False))

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
        return set() if manifest is None else {record["name"] for record in file_records(manifest)}


Storage = DirectoryStorage | MemoryStorage
"""What a run reads from and a recorder writes to."""


def file_records(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Every file a manifest names."""
    return [manifest["start"], *(segment["file"] for segment in manifest["segments"])]


def relocate(manifest: dict[str, Any], old: Path | None, new: Path | None) -> None:
    """Let the manifest of a run in directory ``old`` lead to its problem's script from directory ``new``."""
    source = manifest["problem"] and manifest["problem"]["source"]
    if source:
        manifest["problem"]["source"] = located(source, old, new)
