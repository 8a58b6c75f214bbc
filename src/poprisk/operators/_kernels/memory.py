r"""Memory: how much is free, and how much the work on a tile takes."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from poprisk._core.autodiff import FlatModel
from poprisk.errors import HyperparameterError
from poprisk.operators._kernels.features import Recipe
from poprisk.operators._kernels.layers import Structure
from poprisk.operators._kernels.precision import Precision
from poprisk.operators._kernels.rounded import STRIP, row_layout

# Differentiating more examples than fill this many bytes at once is no faster; a GPU wants hundreds in each launch.
_CHUNK_BYTES = {"cpu": 2**27, "cuda": 5 * 2**32}
# Used where the system does not report how much memory is free.
_FALLBACK_MEMORY = 2**32
# Bytes per number of a tile made from rounded rows.
_SINGLE = 4


@dataclass(frozen=True, eq=False)
class Footprint:
    """Estimates the memory that the work on tiles of a kernel takes."""

    model: FlatModel
    structure: Structure
    recipe: Recipe | None
    """How features are made; None for vector products, which make none."""
    itemsize: int
    """Bytes per number of the weights."""
    precision: Precision | None = None
    device: torch.device | None = None
    """Default: the CPU."""

    @property
    def _device(self) -> str:
        return "cpu" if self.device is None else self.device.type

    @property
    def tile_itemsize(self) -> int:
        """Bytes per number of a tile."""
        return self.itemsize if self.precision is None else _SINGLE

    @property
    def replays(self) -> bool:
        """Whether chunks are replayed as CUDA graphs, which need one chunk size."""
        return self.precision is not None and self._device == "cuda"

    def chunk_limit(self, examples: int) -> int:
        """Number of examples beyond which differentiating more at a time is no faster."""
        if self.recipe is None:
            return examples
        limit = _CHUNK_BYTES.get(self._device, _CHUNK_BYTES["cpu"])
        return min(examples, max(1, limit // max(1, self.itemsize * features_work(self.recipe))))

    def bytes(self, rows: int, columns: int, chunk: int, kept: int | None = None) -> int:
        """Peak memory of the work on one tile."""
        kept, outputs = rows + columns if kept is None else kept, self.structure.p**2 * rows * columns
        if self.recipe is None:
            return self.itemsize * (product_numbers(self.structure, self.model.size, chunk) + 2 * outputs)
        if self.precision is None:
            return self.itemsize * _peak(self.recipe, kept, rows, columns, chunk)
        layout, p = row_layout(self.model, self.recipe), self.structure.p
        factors = 2 * self.itemsize * self.recipe.factor_length  # joined in a copy
        feature = p * (layout.columns * self.precision.itemsize + 4) + factors
        working = self.itemsize * _peak(self.recipe, 0, rows, columns, chunk) + _SINGLE * outputs
        if self.replays:
            return kept * feature + working + self.itemsize * chunk * features_work(self.recipe)  # held by a graph
        # A CPU multiplies short numbers as float32; memory that was freed may be too fragmented for the next side.
        strips = _SINGLE * p * (rows + columns) * min(STRIP, layout.width)
        return 3 * kept * feature // 2 + working + strips


def least_bytes(model: FlatModel, structure: Structure, recipe: Recipe | None, itemsize: int) -> int:
    """Memory for tiles of one example by one example, without the result."""
    return Footprint(model, structure, recipe, itemsize).bytes(1, 1, 1)


def features_work(recipe: Recipe) -> int:
    """Numbers held per example while features are computed."""
    s = recipe.structure
    by_output = sum(layer.positions * layer.outputs for layer in s.layers)
    patches = sum(layer.positions * layer.inputs for layer in recipe.unfolded if layer.positions > 1)
    # Each of the p backward passes holds about as many numbers as the forward pass kept; results are copied once.
    return (s.p + 2) * s.held + 2 * s.p * by_output + 2 * patches + 2 * s.p * recipe.row_length + recipe.factor_length


def product_numbers(structure: Structure, d: int, examples: int) -> int:
    """Numbers held by vector products: p directions with their copies, and the tangents of some examples."""
    return structure.p * (5 * d + 4 * examples * structure.held)


def _peak(recipe: Recipe, kept: int, rows: int, columns: int, chunk: int) -> int:
    p = recipe.structure.p
    positions = max((layer.positions for layer in recipe.factored), default=1)
    block = p * p * rows * columns
    products = (p * positions) ** 2 * columns if positions > 1 else block
    feature = p * recipe.row_length + recipe.factor_length
    contracting = 2 * products + block + positions**2 * rows * columns
    return kept * feature + max(contracting, chunk * features_work(recipe)) + block


def checked_memory(memory: int | None, device: torch.device) -> int:
    """The memory limit in bytes; by default half of what is free.

    >>> checked_memory(2**20, torch.device("cpu"))
    1048576
    """
    if memory is None:
        return free_memory(device)
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < 1:
        raise HyperparameterError(f"memory must be a positive number of bytes, got {memory!r}: try 2**30")
    return memory


def free_memory(device: torch.device) -> int:
    """Half of the memory that is free on a device now: the default memory limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    known = [room for room in (_available(), _left_to_the_group()) if room is not None]
    return min(known) // 2 if known else _FALLBACK_MEMORY


def _available(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that the system can provide without swapping, including file caches that it would drop."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


# A container's memory limit and use, for version 2 and version 1 of control groups.
_GROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def _left_to_the_group(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that a container may still allocate. File caches count as used there; inactive ones are added back."""
    for limit, used in _GROUPS:
        try:
            allowed = int((root / limit).read_text())  # "max", no limit, raises ValueError
            return max(0, allowed - int((root / used).read_text()) + _caches((root / used).parent / "memory.stat"))
        except (OSError, ValueError):
            continue
    return None


def _caches(stat: Path) -> int:
    """Inactive file caches of a control group."""
    try:
        found = re.search(r"^(?:total_)?inactive_file (\d+)", stat.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
