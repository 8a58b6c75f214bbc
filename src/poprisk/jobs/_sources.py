"""The recorded run that jobs are made from: found again by whoever works on them, and recognised."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poprisk._core.autodiff import Inputs
from poprisk._core.store import fingerprint
from poprisk.errors import DataError, JobError, RunError
from poprisk.jobs._keys import code_digest, content_key
from poprisk.jobs._manifest import Group
from poprisk.jobs._results import read_result, write_result
from poprisk.operators import aligned
from poprisk.risk import cast, moved
from poprisk.runs import Run, file_records


def open_run(run: Run | str | Path) -> Run:
    """The run as any worker will find it: on disk, its problem rebuilt from its description.

    Raises:
        JobError: it is only in memory, or its problem cannot be rebuilt by another process.
        DataError: there is no run, or a file of it is damaged.
    """
    path = run.path if isinstance(run, Run) else Path(run)
    if path is None:
        raise JobError("other processes must find the run, and it is only in memory: run.save(folder) first")
    found = Run.load(path)
    try:
        found.problem  # noqa: B018  (a property that rebuilds it)
    except RunError as error:
        raise JobError(
            f"other processes must rebuild the problem of {path} by themselves: make it with Problem.build and a "
            f"function that can be imported ({error})"
        ) from None
    return found


def problem_digest(run: Run) -> str:
    """What a model's outputs depend on beside its trained weights: examples, factory, frozen numbers, layout."""
    manifest, problem = run.manifest, run.problem.description
    parts = {key: problem[key] for key in ("make_model", "loss", "fingerprint", "test_fingerprint")}
    source = problem["source"] and {key: problem["source"].get(key) for key in ("path", "arguments")}
    frozen = {key: manifest[key] for key in ("layout", "frozen_sha256", "modes")}
    return content_key({**parts, **frozen, "source": source})


def run_digest(run: Run, stop: int | None = None) -> str:
    """What happened up to a step: the problem, and the hashes of the files that hold the steps before it."""
    manifest = run.manifest
    last = run.num_steps if stop is None else stop
    kept = [segment for segment in manifest["segments"] if segment["start"] < last]
    files = [record["sha256"] for record in file_records({**manifest, "segments": kept})]
    return content_key({"problem": problem_digest(run), "files": files, "optimizer": manifest["optimizer"]})


def where_is(run: Run, folder: Path) -> str:
    """The run's path seen from the folder of the jobs, so that both can be moved together."""
    assert run.path is not None
    return os.path.relpath(run.path.resolve(), folder.resolve())


def find_run(group: Group, folder: Path, device: torch.device) -> Run:
    """The run of a group, with its examples on a device, after a look at whether it is the one that was planned with.

    Raises:
        JobError: it is another one, or the code that planned was.
    """
    here = code_digest(*group.where["code"])
    if here != group.content["code"]:
        raise JobError(
            f"{group.name!r} was planned by other code than this (digest {group.content['code'][:12]}, here "
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
    """Put a vector among the results, named by its content, so that workers need not compute it again."""
    name = content_key(["vector", fingerprint({"vector": vector})])
    write_result(folder, name, {"vector": vector}, {})
    return name


def take_vector(folder: Path, name: str, device: torch.device) -> Tensor:
    """The vector of that name, checked.

    Raises:
        DataError: it is missing or damaged.
    """
    vector = read_result(folder, name)["vector"]
    if content_key(["vector", fingerprint({"vector": vector})]) != name:
        raise DataError(f"the vector {name[:12]} of {folder} is another one: plan the jobs again")
    return aligned(vector.to(device))


def examples_of(run: Run, which: str, dtype: torch.dtype) -> Inputs:
    """All training or all test inputs.

    Raises:
        DataError: the problem has no test set.
    """
    if which == "train":
        return run.problem.batch(dtype=dtype)[0]
    if run.problem.test is None:
        raise DataError(f"problem {run.problem.name!r} has no test set: give it test=…, or take the training kernel")
    inputs = moved(run.problem.test[0], run.problem.device)
    return tuple(cast(x, dtype) for x in inputs) if isinstance(inputs, tuple) else cast(inputs, dtype)


def dtype_named(name: str) -> torch.dtype:
    """float32 or float64 by name."""
    return {"float32": torch.float32, "float64": torch.float64}[name]


def dtype_name(dtype: torch.dtype | None, run: Run) -> str:
    """The name of a dtype, the run's own by default.

    Raises:
        DataError: neither float32 nor float64.
    """
    found = str(dtype or run.layout.dtype).removeprefix("torch.")
    if found not in ("float32", "float64"):
        raise DataError(f"jobs compute in float32 or float64, got {found}: pass dtype=torch.float32")
    return found


def settings(digest: str, what: str, code: tuple[str, ...], threads: int, device: str) -> dict[str, Any]:
    """The part of a group's content that every kind has."""
    return {
        "run": what,
        "digest": digest,
        "code": code_digest(*code),
        "threads": threads,
        "device": device,
    }
