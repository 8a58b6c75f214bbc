"""What the bits of a result depend on beside its inputs and its code: threads, arithmetic, the kind of processor."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from poprisk._core.store import create_exclusively
from poprisk.errors import DeviceError, HyperparameterError, JobError
from poprisk.operators import float32_products

NUMERICS = "numerics.json"
DEVICES = ("cpu", "cuda")


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """One number of threads, IEEE products and repeatable convolutions for the time of a block.

    So sums are split the same way everywhere.

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
    """The versions and the kinds of processor that round as those here do.

    >>> numerics_here({"cpu"})["gpu"] is None
    True
    """
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if "cuda" in devices and torch.cuda.is_available() else None,
    }


def check_numerics(folder: str | Path, devices: set[str], *, tolerate: bool) -> dict[str, Any]:
    """The first worker's kind of machine decides; the others must be of the same kind, or say that they know.

    Raises:
        JobError: versions or processor are others than the first worker's.
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
            f"the first worker had {_words(first)}, here is {_words(here)}: results would agree to rounding, not to "
            "the bit; use machines of one kind, or allow it with tolerate (--tolerate)"
        )
    return here


def chosen_device(device: str, local_rank: int | None) -> torch.device:
    """The device of a worker: its own GPU where there are several.

    Raises:
        DeviceError: the jobs were planned for a GPU, and there is none.
    """
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError("the jobs were planned for device 'cuda', and no GPU is here: plan with device='cpu'")
    return torch.device("cuda", (local_rank or 0) % torch.cuda.device_count())


def check_device(device: str) -> str:
    """Refuses anything but the two kinds.

    Raises:
        HyperparameterError: as said.

    >>> check_device("cpu")
    'cpu'
    """
    if device not in DEVICES:
        raise HyperparameterError(f"device must be one of {list(DEVICES)}, the kind and not the number, got {device!r}")
    return device


def _words(numerics: dict[str, Any]) -> str:
    return f"torch {numerics.get('torch')} on {numerics.get('gpu') or numerics.get('cpu')}"
