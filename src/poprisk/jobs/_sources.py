"""The recorded run behind jobs: how workers find it and verify that it is the right one."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poprisk._core.autodiff import Inputs
from poprisk._core.store import fingerprint
from poprisk.errors import DataError, JobError, RunError
from poprisk.jobs._manifest import JobGroup, code_digest, content_key
from poprisk.jobs._results import read_result, write_result
from poprisk.operators import aligned
from poprisk.risk import cast, moved
from poprisk.runs import Run, file_records


def open_run(run: Run | str | Path) -> Run:
    """The run as every worker finds it: on disk, with its problem rebuilt from its description.

    Raises:
        JobError: the run is only in memory, or another process cannot rebuild its problem.
        DataError: there is no run, or one of its files is damaged.
    """
    path = run.path if isinstance(run, Run) else Path(run)
    if path is None:
        raise JobError("other processes must find the run, but it is only in memory: call run.save(folder) first")
    found = Run.load(path)
    try:
        found.problem  # noqa: B018  (a property that rebuilds it)
    except RunError as error:
        raise JobError(
            f"other processes cannot rebuild the problem of {path}: create it with Problem.build and an importable "
            f"function ({error})"
        ) from None
    return found


def problem_digest(run: Run) -> str:
    """Hash of what outputs depend on besides the trained weights: examples, model factory, frozen values, layout."""
    manifest, problem = run.manifest, run.problem.description
    parts = {key: problem[key] for key in ("make_model", "loss", "fingerprint", "test_fingerprint")}
    source = problem["source"] and {key: problem["source"].get(key) for key in ("path", "arguments")}
    frozen = {key: manifest[key] for key in ("layout", "frozen_sha256", "modes")}
    return content_key({**parts, **frozen, "source": source})


def run_digest(run: Run, stop: int | None = None) -> str:
    """Hash of a run up to a step: the problem, and the files that hold the steps before it."""
    manifest = run.manifest
    last = run.num_steps if stop is None else stop
    kept = [segment for segment in manifest["segments"] if segment["start"] < last]
    files = [record["sha256"] for record in file_records({**manifest, "segments": kept})]
    return content_key({"problem": problem_digest(run), "files": files, "optimizer": manifest["optimizer"]})


def where_is(run: Run, folder: Path) -> str:
    """The path of the run relative to the directory of the jobs, so that both can be moved together."""
    assert run.path is not None
    return os.path.relpath(run.path.resolve(), folder.resolve())


def find_run(group: JobGroup, folder: Path, device: torch.device) -> Run:
    """The run of a group with its examples on a device, verified to be the one that was planned with.

    Raises:
        JobError: the run differs, or the jobs were planned by other code.
    """
    here = code_digest(*group.where["code"])
    if here != group.content["code"]:
        raise JobError(
            f"{group.name!r} was planned by another version of the code (digest {group.content['code'][:12]}, here "
            f"{here[:12]}): use the version that planned it, or plan into a new directory"
        )
    run = Run.load(folder / group.where["run"])
    if device.type != "cpu":
        run = Run.load(folder / group.where["run"], problem=run.problem.to(device))
    stop = group.where.get("stop")
    digest = problem_digest(run) if group.content["run"] == "problem" else run_digest(run, stop)
    if digest != group.content["digest"]:
        raise JobError(f"{run.path} is not the run that {group.name!r} was planned with: plan into a new directory")
    return run


def keep_vector(folder: Path, vector: Tensor) -> str:
    """Store a vector among the results under a hash of its content, so that workers need not compute it again."""
    name = content_key(["vector", fingerprint({"vector": vector})])
    write_result(folder, name, {"vector": vector}, {})
    return name


def take_vector(folder: Path, name: str, device: torch.device) -> Tensor:
    """The vector of that name, verified.

    Raises:
        DataError: the vector is missing or damaged.
    """
    vector = read_result(folder, name)["vector"]
    if content_key(["vector", fingerprint({"vector": vector})]) != name:
        raise DataError(f"the vector {name[:12]} in {folder} is damaged: plan the jobs again")
    return aligned(vector.to(device))


def examples_of(run: Run, which: str, dtype: torch.dtype) -> Inputs:
    """All training or all test inputs.

    Raises:
        DataError: the problem has no test set.
    """
    if which == "train":
        return run.problem.batch(dtype=dtype)[0]
    if run.problem.test is None:
        raise DataError(
            f"problem {run.problem.name!r} has no test set: pass test=… to Problem, or use the training kernel"
        )
    inputs = moved(run.problem.test[0], run.problem.device)
    return tuple(cast(x, dtype) for x in inputs) if isinstance(inputs, tuple) else cast(inputs, dtype)


def dtype_named(name: str) -> torch.dtype:
    """float32 or float64 by name."""
    return {"float32": torch.float32, "float64": torch.float64}[name]


def dtype_name(dtype: torch.dtype | None, run: Run) -> str:
    """The name of a dtype; default: that of the run.

    Raises:
        DataError: the dtype is neither float32 nor float64.
    """
    found = str(dtype or run.layout.dtype).removeprefix("torch.")
    if found not in ("float32", "float64"):
        raise DataError(f"jobs compute in float32 or float64, got {found}: pass dtype=torch.float32")
    return found


def settings(digest: str, what: str, code: tuple[str, ...], threads: int, device: str) -> dict[str, Any]:
    """The part of the content that groups of every kind have."""
    return {
        "run": what,
        "digest": digest,
        "code": code_digest(*code),
        "threads": threads,
        "device": device,
    }
