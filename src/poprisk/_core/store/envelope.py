"""Result files: a result with its format version, configuration, environment and commit."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from poprisk._core.store.files import write_json
from poprisk._version import __version__
from poprisk.errors import DataError

FORMAT_VERSION = 1
"""Version of result files; files of other versions are not read."""


def save_result(path: str | Path, kind: str, config: Mapping[str, Any], result: Mapping[str, Any]) -> Path:
    """Write a result with its configuration and environment."""
    envelope = {
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "config": dict(config),
        "result": dict(result),
    }
    return write_json(path, envelope)


def load_result(path: str | Path, kind: str) -> dict[str, Any]:
    """Read a saved result, with its configuration and environment."""
    try:
        envelope = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(
            f"{path} should be a saved {kind!r} result, but is not JSON ({error}); create it again"
        ) from None
    found = envelope.get("kind") if isinstance(envelope, dict) else None
    if found != kind:
        raise DataError(f"{path} should be a saved {kind!r} result, but its kind is {found!r}")
    version = envelope.get("format_version")
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path} has format_version {version!r}, but poprisk {__version__} reads {FORMAT_VERSION}: create "
            "the result again, or read it with the version that wrote it"
        )
    return envelope


def environment() -> dict[str, Any]:
    """Versions, processor, threads and commit, on which numbers may depend; nothing that identifies the machine."""
    import numpy
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "poprisk": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """The commit of this source tree, with ``+changes`` if files differ from it; None for an installed package."""
    package = Path(__file__).resolve().parents[2]
    top = _git(package, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() / "src" / "poprisk" != package:
        return None  # installed inside the checkout of another project
    commit = _git(package, "rev-parse", "HEAD")
    changed = _git(package, "status", "--porcelain", "--untracked-files=normal", "--", ".")
    return f"{commit}+changes" if commit and changed else commit


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
