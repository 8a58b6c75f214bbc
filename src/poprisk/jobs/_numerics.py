"""What the bits of a result depend on besides its inputs and code: threads, arithmetic, kind of processor."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from poprisk._core.store import create_exclusively
from poprisk.errors import DeviceError, JobError
from poprisk.operators import float32_products

NUMERICS = "numerics.json"


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Fixes the number of threads, IEEE products and deterministic convolutions within a block.

    Sums are then split in the same way on all machines.

    >>> with pinned(1):
    ...     torch.get_num_threads()
    1
    """
    before, repeatable = torch.get_num_threads(), torch.backends.cudnn.deterministic
    torch.set_num_threads(threads)
    torch.backends.cudnn.deterministic = True
    try:
        with float32_products("ieee"):
            yield
    finally:
        torch.set_num_threads(before)
        torch.backends.cudnn.deterministic = repeatable


def numerics_here(devices: set[str]) -> dict[str, Any]:
    """The version of torch and the kinds of processor, which determine how results are rounded.

    >>> numerics_here({"cpu"})["gpu"] is None
    True
    """
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if "cuda" in devices and torch.cuda.is_available() else None,
    }


def check_numerics(folder: str | Path, devices: set[str], *, tolerate: bool) -> dict[str, Any]:
    """Checks that this machine is of the same kind as the first worker's, unless ``tolerate`` is set.

    Raises:
        JobError: versions or processor differ from those of the first worker.
    """
    path, here = Path(folder) / NUMERICS, numerics_here(devices)
    if create_exclusively(path, json.dumps(here).encode()) or tolerate:
        return here
    try:
        first = json.loads(path.read_bytes())
    except ValueError:
        raise JobError(f"{path} is damaged: remove it while no worker is running") from None
    if first != here:
        raise JobError(
            f"the first worker had {_words(first)}, this machine has {_words(here)}: results would agree only up to "
            "rounding; use machines of one kind, or allow it with tolerate (--tolerate)"
        )
    return here


def chosen_device(device: str, local_rank: int | None) -> torch.device:
    """The device of a worker; with several GPUs, each local rank gets its own.

    Raises:
        DeviceError: the jobs were planned for a GPU, and none is available.
    """
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError("the jobs were planned for device 'cuda', but no GPU is available: plan with device='cpu'")
    return torch.device("cuda", (local_rank or 0) % torch.cuda.device_count())


def _words(numerics: dict[str, Any]) -> str:
    return f"torch {numerics.get('torch')} on {numerics.get('gpu') or numerics.get('cpu')}"
