"""Assembles the results of jobs: a matrix into one file that can be memory-mapped, a resampling into its estimates."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from poprisk._core.store import atomic_file, write_json
from poprisk.errors import DataError, JobError, MixedNumericsWarning
from poprisk.jobs._disk_matrix import DiskMatrix
from poprisk.jobs._fold_members import buffers_of
from poprisk.jobs._kernel_tiles import precision_of
from poprisk.jobs._manifest import JobGroup, Manifest
from poprisk.jobs._results import read_result, result_notes
from poprisk.jobs._sources import find_run
from poprisk.risk import Resampled, k_fold_of_weights


def assemble_matrix(
    folder: str | Path, name: str, *, memory_limit: int | None = None, device: torch.device | str = "cpu"
) -> DiskMatrix:
    r"""Assemble a matrix from the results of its jobs, in a ``.npy`` file of the directory, unless that exists already.

    Every result is verified before it is used; only a few tiles are in memory at a time.

    Args:
        folder: Directory of the jobs.
        name: Name of a kernel or an operator, as returned by ``JobPlan``.
        memory_limit: Memory limit of products in bytes; default: the limit of the plan, or 1 GiB.
        device: Device for products.

    Returns:
        A linear operator; ``mapped()`` is a tensor over the file, ``path`` the file, which numpy reads. For a kernel in
        lower precision, ``bound`` is the largest bound of its tiles on :math:`|\Delta K_{ij}| / \sqrt{K_{ii} K_{jj}}`.

    Raises:
        JobError: results are missing or damaged, or the group is not a matrix.
        DataError: there is no such group.
    """
    group, where = Manifest.load(folder).group(name), Path(folder)
    if group.where.get("layout") not in ("tiles", "columns"):
        raise JobError(f"{name!r} is not a matrix: use assemble_resampled")
    path = where / "assembled" / f"{group.digest[:24]}.npy"
    bound = _kept_bound(path)
    if not path.exists() or (bound is None and precision_of(group) is not None):
        _check_complete(group, where)
        with atomic_file(path) as file:
            bound = _write_matrix(file, group, where)
            if bound is not None:  # written before the matrix gets its name
                write_json(path.with_suffix(".json"), {"precision": group.content["precision"], "bound": bound})
        _remove_leftovers(group, where)
    limit = memory_limit or group.where.get("memory_limit") or 2**30
    options = {"symmetric": group.where["symmetric"], "memory_limit": limit, "device": device}
    return DiskMatrix(path, **options, bound=bound)


def assemble_resampled(folder: str | Path, name: str) -> Resampled:
    """Assemble the result of :func:`poprisk.risk.k_fold` from trainings done as jobs.

    Raises:
        JobError: results are missing or damaged, or the group is not a K-fold.
        DataError: there is no such group.
    """
    group, where = Manifest.load(folder).group(name), Path(folder)
    if group.where.get("layout") != "members":
        raise JobError(f"{name!r} is not a K-fold: use assemble_matrix")
    _check_complete(group, where)
    found = [_read(where, group, key) for key in group.keys]
    run = find_run(group, where, torch.device("cpu"))
    notes = [note for each in found for note in json.loads(bytes(each["notes"].tolist()))]
    weights = torch.cat([each["weights"] for each in found])
    seed, buffers = group.content["seed"], buffers_of(found)
    return k_fold_of_weights(run, weights, seed, notes=tuple(dict.fromkeys(notes)), buffers=buffers)


def _check_complete(group: JobGroup, folder: Path) -> None:
    """Refuses where results are missing; warns where they were made on machines that round differently."""
    kinds, missing = set(), 0
    for key in group.keys:
        notes = result_notes(folder, key)
        missing += notes is None
        if notes is not None:
            kinds.add(json.dumps(notes.get("numerics"), sort_keys=True))
    if missing:
        raise JobError(
            f"{missing} of {len(group.keys)} jobs of {group.name!r} are not done: run_jobs({str(folder)!r}), or python "
            f"-m poprisk jobs work {folder}"
        )
    if len(kinds) > 1:
        warnings.warn(
            f"{group.name!r} was computed on {len(kinds)} kinds of machine ({'; '.join(sorted(kinds))}): it equals "
            "what one of them gives to rounding, not to the bit",
            MixedNumericsWarning,
            stacklevel=3,
        )


def _read(folder: Path, group: JobGroup, key: str) -> dict[str, Tensor]:
    try:
        return read_result(folder, key)
    except DataError as error:
        raise JobError(
            f"a result of {group.name!r} cannot be used, {error}: python -m poprisk jobs work {folder} --verify"
        ) from None


def _kept_bound(path: Path) -> float | None:
    """The stored bound of an assembled matrix in lower precision."""
    try:
        return float(json.loads(path.with_suffix(".json").read_bytes())["bound"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _write_matrix(file: BinaryIO, group: JobGroup, folder: Path) -> float | None:
    """Write all blocks; returns the largest bound on their error, if there are bounds."""
    rows, columns = group.where["shape"]
    dtype = np.dtype(group.where["dtype"])
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (rows, columns)}
    np.lib.format.write_array_header_1_0(file, header)
    begin, bounds = file.tell(), []
    file.truncate(begin + rows * columns * dtype.itemsize)
    for key, indices in zip(group.keys, group.jobs, strict=True):
        result = _read(folder, group, key)
        bounds += [result["bound"].item()] if "bound" in result else []
        for row, column, block in _blocks(group, indices, result["block"]):
            for i, numbers in enumerate(block.contiguous().numpy()):
                file.seek(begin + ((row + i) * columns + column) * dtype.itemsize)
                file.write(numbers.data)
    return max(bounds, default=None)


def _blocks(group: JobGroup, indices: list[int], block: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """A block and the position of its corner; for a symmetric kernel also the transpose below the diagonal."""
    if group.where["layout"] == "columns":
        yield 0, indices[0], block
        return
    scale = group.where.get("outputs", 1)
    row, column = indices[0] * scale, indices[2] * scale
    yield row, column, block
    if group.where["symmetric"] and row != column:
        yield column, row, block.T


def _remove_leftovers(group: JobGroup, folder: Path) -> None:
    """Delete temporary files that killed workers left for jobs that are done now."""
    keys = set(group.keys)
    for path in (folder / "results").glob("*/.*.tmp"):
        if path.name[1:].partition(".")[0] in keys:
            path.unlink(missing_ok=True)
