"""The manifest of a run: versions, numerics, problem, obstacles to exact analyses; and the formats that can be opened.

A change that older versions would misread gets a new ``FORMAT_VERSION`` and a migration from the previous one; an
optional new entry needs none. Migrations are applied one after another to what was read and write nothing: a run stays
on disk as it was recorded, and ``Run.save`` writes it in the current format.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from poprisk._core.autodiff import ExampleLoss
from poprisk._core.store import check_schema, environment, importable, json_digest
from poprisk._version import __version__
from poprisk.errors import DataError, RunError
from poprisk.runs._checkpoint import frozen_fingerprint, modes_of
from poprisk.runs._gradients import randomness_of
from poprisk.runs._layout import Layout
from poprisk.runs._problem import Problem

FORMAT_VERSION = 1

Content = tuple[dict[str, Tensor], Any]
"""Tensors and notes of one file."""


@dataclass(frozen=True)
class Migration:
    """The changes from one version to the next."""

    name: str
    """Description of the change."""
    manifest: Callable[[dict[str, Any]], dict[str, Any]] = lambda manifest: manifest
    """Converts the manifest to the next version, without its format_version."""
    content: Callable[[Content], Content] = lambda content: content
    """Converts one file's tensors and notes to the next version."""


MIGRATIONS: Mapping[int, Migration] = {}
"""One migration from each earlier version, by that version. Empty, because there has been only one format."""


def checked(manifest: dict[str, Any], where: object) -> dict[str, Any]:
    """Check a manifest read from disk, and remove its hash.

    Raises:
        DataError: it is damaged, or of a later or unknown version (the message names the poprisk that can read it).

    >>> try:
    ...     checked({"format_version": 7, "environment": {"poprisk": "9.1"}}, "run/manifest.json")
    ... except DataError as error:
    ...     print(str(error).partition(": ")[2])
    read it with poprisk 9.1, which wrote it, or a later version
    """
    version = manifest.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or not _oldest() <= version <= FORMAT_VERSION:
        raise _unknown(version, manifest, where)
    manifest = dict(manifest)
    if manifest.pop("sha256", None) != json_digest(manifest):
        raise DataError(f"{where} is damaged: its content does not have the SHA-256 it names; restore it from a copy")
    return manifest


def migrated_manifest(manifest: dict[str, Any], where: object) -> dict[str, Any]:
    """Convert a checked manifest to the current format, and check every entry.

    Raises:
        DataError: an entry is missing or has another type, or entries contradict each other.
    """
    from poprisk.runs._schema import Manifest

    for version in range(manifest["format_version"], FORMAT_VERSION):
        manifest = {**MIGRATIONS[version].manifest(manifest), "format_version": version + 1}
    check_schema(Manifest, manifest, where)
    return manifest


def migrated_content(content: Content, version: int) -> Content:
    """Convert the content of a file from some version to the current format."""
    for step in range(version, FORMAT_VERSION):
        content = MIGRATIONS[step].content(content)
    return content


def require_present(version: int, where: object) -> None:
    """Check that a run has the current format, so that steps can be added.

    Raises:
        RunError: it has an older format; the message says how to continue.
    """
    if version != FORMAT_VERSION:
        changed = "; ".join(MIGRATIONS[step].name for step in range(version, FORMAT_VERSION))
        raise RunError(
            f"{where} holds a run of format_version {version}, but poprisk {__version__} writes "
            f"{FORMAT_VERSION} ({changed}): write a copy with Run.load(path).save(new_path), and continue the copy"
        )


def _oldest() -> int:
    return min(MIGRATIONS, default=FORMAT_VERSION)


def _unknown(version: Any, manifest: Mapping[str, Any], where: object) -> DataError:
    reads = FORMAT_VERSION if _oldest() == FORMAT_VERSION else f"{_oldest()} … {FORMAT_VERSION}"
    about = manifest.get("environment")
    writer = about.get("poprisk") if isinstance(about, Mapping) else None
    which = f"poprisk {writer}, which wrote it" if isinstance(writer, str) else "the poprisk that wrote it"
    later = isinstance(version, int) and version > FORMAT_VERSION
    needs = f"read it with {which}{', or a later version' if later else ''}"
    return DataError(f"{where} has format_version {version!r}, but poprisk {__version__} reads {reads}: {needs}")


def describe_training(module: nn.Module, problem: Problem | None, loss: str | ExampleLoss) -> dict[str, Any]:
    """The part of a manifest that does not depend on the recording's options."""
    return {
        "format_version": FORMAT_VERSION,
        "kind": "run",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": _environment(),
        "numerics": numerics(next(module.parameters()).device),
        "problem": None if problem is None else problem.description,
        "loss": {"name": loss} if isinstance(loss, str) else importable(loss).as_json(),
        "frozen_sha256": frozen_fingerprint(module),
        "modes": modes_of(module),
    }


def numerics(device: torch.device) -> dict[str, Any]:
    """Settings, other than versions, on which the last bits depend."""
    return {
        "device": device.type,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch_seed": torch.initial_seed(),
        "fused_by_default": True,  # PopRiskAdamW on the CPU; earlier recordings do not have this entry
    }


def obstacles(module: nn.Module, layout: Layout, augmentation: str | None) -> list[str]:
    """The reasons why exact analyses will not be possible."""
    found = [randomness_of(module)]
    low = sorted({d for d in layout.dtypes if d not in ("torch.float32", "torch.float64")})
    if low:
        found.append(f"the weights are {low[0]}, which is not precise enough: train in float32 or float64")
    if augmentation == "unseeded":
        found.append("inputs were changed at random without a seed: use problem.augment with step.generator")
    return [text for text in found if text is not None]


def check_same_run(manifest: dict[str, Any], here: dict[str, Any]) -> None:
    """Check that a run to continue was set up in the same way.

    Raises:
        RunError: it was not; the message names the first difference.
    """
    problem = manifest["problem"] and manifest["problem"]["fingerprint"]
    there = {**manifest, "optimizer": manifest["optimizer"]["name"], "problem": problem}
    for what, value in here.items():
        if there[what] != value:
            shown = "differs" if what in ("layout", "problem") else f"was {there[what]}, is {value}"
            raise RunError(f"the directory holds another run ({what} {shown}): record into another directory")


def plain(value: Any) -> Any:
    """The value after a round trip through JSON."""
    return json.loads(json.dumps(value))


@cache
def _environment() -> dict[str, Any]:
    """Cached, because it asks git for the commit."""
    return environment()
